"""A file that lines are added to, and that never grows without end."""

from __future__ import annotations

import os
from pathlib import Path

from elasticrun.runs.layout import replace_file


class Appended:
    """Opened for each line: a file that was moved or removed meanwhile is begun anew."""

    def __init__(self, path: Path, most: int) -> None:
        """`most`: bytes, beyond which the older half goes."""
        self._path = path
        self._most = most

    def add(self, lines: bytes) -> None:
        """Whole lines. OSError."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(fd, "ab", buffering=0) as file:
            size = file.tell()
            file.write(lines)
        if size + len(lines) > self._most:
            data = self._path.read_bytes()
            replace_file(self._path, data[data.index(b"\n", len(data) // 2) + 1 :])
