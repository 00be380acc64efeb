"""Files to which lines are appended, with a size limit: `events.jsonl` (events) and `progress.csv`
(metrics of rank 0)."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elasticrun.host.runs.layout import replace_file
from elasticrun.wire.messages import MAX_METRICS

MAX_PROGRESS_BYTES: Final = 16 * 1024 * 1024
"""Size in bytes of `progress.csv` beyond which every second row is removed, so that the remaining
rows still cover the whole run."""

FIXED_COLUMNS: Final = ("time", "round", "step")
"""The first columns of `progress.csv`, before those of the metrics."""

NUMBER: Final = re.compile(r"[+-]?(?:\d[\d.e+-]*|inf|nan)")
"""Format of the values that are written; a rank's other values are left out."""


class Appended:
    """A file that is opened for each write, so that it is recreated if it was moved or removed."""

    def __init__(self, path: Path, most: int) -> None:
        """`most`: size in bytes beyond which the older half of the lines is removed."""
        self._path = path
        self._most = most

    def add(self, lines: bytes) -> None:
        """Append whole lines. Raises OSError."""
        if append(self._path, lines) > self._most:
            data = self._path.read_bytes()
            replace_file(self._path, data[data.index(b"\n", len(data) // 2) + 1 :])


def append(path: Path, lines: bytes) -> int:
    """Append to a file, created if missing; returns its new size in bytes. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with open(fd, "ab", buffering=0) as file:
        file.write(lines)
        return file.tell()


@dataclass(frozen=True, slots=True)
class ProgressRow:
    """A row of `progress.csv`; `values`: numbers as text."""

    time: float  # seconds since 1970
    round: int
    step: int
    values: dict[str, str]


class ProgressFile:
    """A CSV table to which columns can be added; in a new column the earlier rows are empty."""

    def __init__(self, path: Path) -> None:
        """Continue the file if it exists. Raises OSError if it cannot be read."""
        self._path = path
        self._columns: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            data = path.read_bytes()
            self._columns = next(csv.reader([data.split(b"\n", 1)[0].decode()]), [])
            if data and not data.endswith(b"\n"):  # its last writer was killed
                append(path, b"\n")

    def add(self, rows: Sequence[ProgressRow]) -> str:
        """Append rows; returns the name of a metric that got no column because there are already
        MAX_METRICS, "" if there is none. Raises OSError."""
        names = dict.fromkeys(name for row in rows for name in row.values)
        new = [name for name in names if name not in self._columns]
        room = MAX_METRICS + len(FIXED_COLUMNS) - len(self._columns or FIXED_COLUMNS)
        if new[:room] or not self._columns:
            self._add_columns([*(self._columns or FIXED_COLUMNS), *new[:room]])
        lines = _csv(
            [f"{row.time:.3f}", row.round, row.step]
            + [row.values.get(name, "") for name in self._columns[len(FIXED_COLUMNS) :]]
            for row in rows
        )
        if append(self._path, lines) > MAX_PROGRESS_BYTES:
            head, *left = self._path.read_bytes().splitlines(keepends=True)
            replace_file(self._path, b"".join([head, *left[1::2]]))
        return next(iter(new[room:]), "")

    def _add_columns(self, columns: list[str]) -> None:
        data = self._path.read_bytes() if self._columns else b""
        left = data[data.find(b"\n") + 1 :]
        more = b"," * (len(columns) - len(self._columns or FIXED_COLUMNS))
        replace_file(self._path, _csv([columns]) + left.replace(b"\n", more + b"\n"))
        self._columns = columns


def _csv(rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
