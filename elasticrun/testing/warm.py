"""One warm process for a whole run of pytest, from which the jobs of its tests are forked.

It is started by the first job that may use it and shared by all processes of the run (xdist's
workers, too). A job whose environment differs in what matters starts cold, as outside of tests; so
does one with ELASTICRUN_WARM_SERVER=off.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from elasticrun.wire import env

FOLDER: Final = "ELASTICRUN_TESTING_WARM"
"""Variable that names the run's folder to the processes that share it; its value may be `off`."""

IDLE: Final = 900.0
"""Seconds without a job after which it ends by itself, where the run was killed."""

MAX_STARTS: Final = 16
"""It ends by itself when a test installs a package, and is started again; not for ever."""

OF_A_TEST: Final = ("ELASTICRUN_TEST_", "TMPDIR", "XDG_RUNTIME_DIR")
"""Variables that belong to one test, by which its processes are found or kept apart."""

_SOCKET: Final = "warm.sock"


def begin() -> str:
    """Make the run's folder, unless another process of this run has: its path, or "" then."""
    if os.environ.get(FOLDER):
        return ""
    folder = tempfile.mkdtemp(prefix="elasticrun-warm-")
    os.environ[FOLDER] = folder
    return folder


def end(folder: str) -> None:
    """End the run's warm process and remove its folder; "": that is another process' to do."""
    from elasticrun.wire import frames, warm

    if not folder:
        return
    with contextlib.suppress(OSError), warm.connect(Path(folder, _SOCKET), 5.0) as conn:
        conn.sendall(frames.encode(warm.Leave()))
        conn.recv(1)  # its end
    shutil.rmtree(folder, ignore_errors=True)
    os.environ.pop(FOLDER, None)


def named(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable by which a launcher with these variables finds the run's warm process, which is
    started with them if there is none yet; nothing where the run has none."""
    folder = os.environ.get(FOLDER, "")
    if folder in ("", "off") or env.WARM_SERVER in environ:
        return {}
    place = Path(folder, _SOCKET)
    try:
        with open(Path(folder, "starts"), "ab") as starts:
            fcntl.flock(starts, fcntl.LOCK_EX)
            if not place.is_socket() and starts.tell() < MAX_STARTS:
                starts.write(b".")
                starts.flush()
                start(place, {n: v for n, v in environ.items() if not n.startswith(OF_A_TEST)})
    except OSError:
        return {}
    return {env.WARM_SERVER: str(place)} if place.is_socket() else {}


def start(place: Path, environ: Mapping[str, str]) -> None:
    """Start a warm process with these variables; where it cannot be, jobs start cold."""
    from elasticrun.agent.warm import start as start_warm

    start_warm(place, IDLE, (), environ)
