"""The last lines that a rank wrote to its files, for the record of its failure."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from typing import Final

MOST_LINES: Final = 50
MOST_BYTES: Final = 4096
"""Limits for all files of one rank together."""

LIMIT: Final = 0.5
"""Seconds for reading the files; from a slower disk nothing is reported."""


def last_lines(paths: Iterable[str]) -> str:
    """The ends of these files, one after the other; "" if there are none. Blocks."""
    files = [path for path in dict.fromkeys(paths) if path and path != os.devnull]
    if not files:
        return ""
    share = MOST_BYTES // len(files)
    texts = filter(None, (_tail(path, share) for path in files))
    return "\n".join("\n".join(texts).splitlines()[-MOST_LINES:])


def _tail(path: str, most: int) -> str:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a FIFO would block
        with open(fd, "rb") as file:
            about = os.fstat(fd)
            if stat.S_ISREG(about.st_mode):
                file.seek(max(0, about.st_size - most))
                data = file.read(most)
                whole = data if about.st_size <= most else data[data.find(b"\n") + 1 :]
                return whole.decode(errors="replace").rstrip()
    return ""
