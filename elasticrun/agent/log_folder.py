"""The folder under $TMPDIR for the logs of a run that named none, and what runs before this one
have left there. All of it blocks.

Its owner holds the lock of a file in it for as long as it lives. What is there without the file is
torchrun's, or was kept on purpose, and is nobody's to remove.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Final

PREFIX: Final = "torchelastic_"

LOCK: Final = ".owner"

KEPT_FOR: Final = 24 * 3600.0
"""Seconds since its last line for which output is kept whose owner was killed: people read the
logs of a run that has ended so, and a scheduler starts the next run at once."""

MOST: Final = 4096
"""Entries of the folder for temporary files that are looked at."""


class LogFolder:
    """`torchelastic_XXXX`, ours until the process ends. Raises OSError if it cannot be made."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        lock = os.path.join(self.path, LOCK)
        self._fd = os.open(lock + ".new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks; then it is never swept
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(lock + ".new", lock)  # locked before anybody can see it

    def leave(self, superfluous: Iterable[str]) -> None:
        """At the end of the run: remove the files of these names, and what is empty then. The rest
        is kept on purpose."""
        names = {LOCK, LOCK + ".new", *superfluous}
        for folder, _, files in os.walk(self.path, topdown=False):
            for file in files:
                path = os.path.join(folder, file)
                with contextlib.suppress(OSError):
                    if file in names:
                        os.unlink(path)
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        os.close(self._fd)


def sweep(now: float | None = None) -> None:
    """Remove the folders of this user's runs that were killed: what nothing was written into at
    once, output KEPT_FOR seconds after its last line."""
    now = time.time() if now is None else now
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for _, entry in zip(range(MOST), entries, strict=False):
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _sweep_one(entry, now)


def _sweep_one(entry: os.DirEntry[str], now: float) -> None:
    if not entry.is_dir(follow_symlinks=False):
        return
    if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
        return
    fd = os.open(os.path.join(entry.path, LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        written = max(_last_written(entry.path), default=0.0)
        if written + KEPT_FOR < now:
            shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(fd)


def _last_written(path: str) -> Iterator[float]:
    """The times of the files in which there is something."""
    for folder, _, files in os.walk(path):
        for file in files:
            about = os.lstat(os.path.join(folder, file))
            if about.st_size:
                yield about.st_mtime
