"""Between a launcher and a warm process: where its socket is, and what the two say.

A warm process (`forkserver.warm`) has torch imported and forks fork servers for launchers of its
own user. Its socket lies in the user's run folder, which is the user's alone; its name is made of
what decides which launchers it can serve at all: the interpreter, its environment folder and our
package, then the cgroup and the namespaces. The rest is compared at each request, by the warm
process, which says what differs.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elasticrun.wire.env import WARM_SERVER
from elasticrun.wire.frames import peer_of
from elasticrun.wire.run_folder import run_folder

OFF: Final = "off"
"""Value of ELASTICRUN_WARM_SERVER by which no warm process is looked for."""

DESCRIPTORS: Final = 5
"""Sent once an Ask is granted: the agent's conversation, standard streams, working directory."""

NAMESPACES: Final = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")

PACKAGE: Final = Path(__file__).resolve().parent.parent


# ---------------------------------------------------------------- to the warm process


@dataclass(frozen=True, slots=True)
class Ask:
    """Fork a fork server with these variables, signal dispositions and signal mask. The descriptors
    come when that is granted, with one byte: a process that stands still must not hold them."""

    env: dict[str, str]
    ignored: tuple[int, ...]
    blocked: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Teach:
    """These modules were imported by the ranks of a job; have them, too."""

    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Describe:
    """Say what you are."""


@dataclass(frozen=True, slots=True)
class Leave:
    """End; the fork servers that were forked stay."""


# ---------------------------------------------------------------- from it


@dataclass(frozen=True, slots=True)
class Granted:
    """Send the descriptors."""


@dataclass(frozen=True, slots=True)
class Forked:
    """The fork server runs. From here on its guard speaks, which is its parent."""

    pid: int


@dataclass(frozen=True, slots=True)
class Over:
    """The fork server has ended (negative: by that signal), and nothing below it is left."""

    code: int


@dataclass(frozen=True, slots=True)
class Refused:
    """This launcher cannot be served; `reason` completes "it is not used: "."""

    reason: str


@dataclass(frozen=True, slots=True)
class Description:
    """`modules`: how many are imported; `left`: seconds until it ends unless it is used."""

    pid: int
    torch: str
    modules: int
    served: int
    left: float
    learning: bool


ToWarm = Ask | Teach | Describe | Leave
FromWarm = Granted | Forked | Over | Refused | Description


# ---------------------------------------------------------------- the place


def environment_name(executable: str = sys.executable) -> str:
    """Which interpreter with which packages; what only such a process can serve."""
    words = (os.path.realpath(executable), sys.prefix, sys.base_prefix, str(PACKAGE), sys.version)
    return hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()[:12]


def place_name(pid: int | str = "self") -> str:
    """In which cgroup and namespaces a process is, of which none may be left by a fork."""
    words = [Path(f"/proc/{pid}/cgroup").read_text()]
    for name in NAMESPACES:
        try:
            words.append(os.readlink(f"/proc/{pid}/ns/{name}"))
        except FileNotFoundError:  # an older kernel's
            words.append("")
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]


def socket_path(environ: Mapping[str, str]) -> Path:
    """Where the warm process of this process' user and surroundings listens, if there is one.
    OSError where there is no folder that is the user's alone."""
    return run_folder(environ) / f"warm-{environment_name()}-{place_name()}.sock"


def find(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """The socket of a warm process that may serve us, or None; then why one that is there cannot,
    if there is one."""
    named = environ.get(WARM_SERVER, "")
    if named == OFF:
        return None, ""
    if named:
        return Path(named), ""
    path = socket_path(environ)
    if path.is_socket():
        return path, ""
    others = path.parent.glob(f"warm-{environment_name()}-*.sock")
    return None, "it is of another cgroup or namespace" if next(others, None) else ""


def connect(path: Path, limit: float) -> socket.socket:
    """A connection to the process that listens there, if it is of our own user. OSError if not."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        conn.settimeout(limit)
        conn.connect(f"/proc/self/fd/{folder}/{path.name}")  # a socket's path has 107 bytes at most
        if peer_of(conn)[1] != os.geteuid():
            raise PermissionError(f"the process behind {path} is of another user")
    except BaseException:
        conn.close()
        raise
    finally:
        os.close(folder)
    return conn
