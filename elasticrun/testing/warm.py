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
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from elasticrun.testing.plugin import WARM_FOLDER
from elasticrun.wire import env

IDLE: Final = 900.0
"""Seconds without a job after which it ends by itself, where the run was killed."""

MAX_STARTS: Final = 16
"""It ends by itself when a test installs a package, and is started again; not for ever."""

OF_A_TEST: Final = ("ELASTICRUN_TEST_", "TMPDIR", "XDG_RUNTIME_DIR")
"""Variables that belong to one test, by which its processes are found or kept apart."""

_SOCKET: Final = "warm.sock"


def end(folder: str) -> None:
    """End the run's warm process and remove its folder."""
    from elasticrun.wire import frames, warm

    with contextlib.suppress(OSError), warm.connect(Path(folder, _SOCKET), 5.0) as conn:
        conn.sendall(frames.encode(warm.Leave()))
        conn.recv(1)  # its end
    shutil.rmtree(folder, ignore_errors=True)


def named(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable by which a launcher with these variables finds the run's warm process, which is
    started with them if there is none yet; nothing where the run has none."""
    folder = os.environ.get(WARM_FOLDER, "")
    if folder in ("", "off") or env.WARM_SERVER in environ:
        return {}
    place = Path(folder, _SOCKET)
    try:
        place.parent.mkdir(mode=0o700, exist_ok=True)
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
