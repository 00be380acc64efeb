"""A module in the real site-packages, for tests of --preload: nothing but a folder that pip would
write to holds installed packages.

It is there for the whole run of pytest, and tests write into it. A file that came and went would
change the folder, which every fork server of the run's warm process takes for an upgrade."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

NAME = "elasticrun_test_pre"
PLACE = Path(sysconfig.get_path("purelib")) / f"{NAME}.py"
EMPTY = "value = 1\n"

_held = -1
"""Locked, shared, as long as this run needs the module: several may run at once."""


def plant() -> None:
    """Once, before any process of the run is started. Where the folder is not ours to write to,
    the tests that want the module fail."""
    global _held
    while _held < 0:
        try:
            fd = os.open(PLACE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return
        fcntl.flock(fd, fcntl.LOCK_SH)
        if PLACE.exists() and os.path.samestat(os.fstat(fd), PLACE.stat()):
            _held = fd
        else:  # another run has removed it meanwhile
            os.close(fd)


@contextlib.contextmanager
def written() -> Iterator[Path]:
    """The module, which a test may write to, and nobody else meanwhile: what one test plants, a
    fork server of another would import."""
    lock = Path(tempfile.gettempdir()) / f"{NAME}-{zlib.crc32(os.fsencode(PLACE))}.lock"
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        empty()
        try:
            yield PLACE
        finally:
            empty()


def empty() -> None:
    """As if it had never been imported."""
    PLACE.write_text(EMPTY)
    for compiled in (PLACE.parent / "__pycache__").glob(f"{NAME}.*"):
        compiled.unlink()


def remove() -> None:
    """When the run is over; the last one of several takes it away."""
    global _held
    if _held >= 0:
        try:
            fcntl.flock(_held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            empty()
            PLACE.unlink()
        except BlockingIOError:
            pass
        os.close(_held)
        _held = -1
