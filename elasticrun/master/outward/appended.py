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

MOST_PROGRESS: Final = 16 * 1024 * 1024
"""Bytes of `progress.csv` beyond which every second row is removed, so that the curve stays
complete."""

OWN: Final = ("time", "round", "step")
"""Its first columns."""

NUMBER: Final = re.compile(r"[+-]?(?:\d[\d.e+-]*|inf|nan)")
"""Accepted number formats; other values of a rank are not written."""


class Appended:
    """A file opened for each line, so that it is recreated if it was moved or removed."""

    def __init__(self, path: Path, most: int) -> None:
        """`most`: size in bytes beyond which the older half is removed."""
        self._path = path
        self._most = most

    def add(self, lines: bytes) -> None:
        """Append whole lines. OSError."""
        if append(self._path, lines) > self._most:
            data = self._path.read_bytes()
            replace_file(self._path, data[data.index(b"\n", len(data) // 2) + 1 :])


def append(path: Path, lines: bytes) -> int:
    """Append and return the new size. OSError."""
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
    """A CSV table to which columns can be added; earlier rows are empty there."""

    def __init__(self, path: Path) -> None:
        """Continue an existing file. OSError if it cannot be read."""
        self._path = path
        self._columns: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            data = path.read_bytes()
            self._columns = next(csv.reader([data.split(b"\n", 1)[0].decode()]), [])
            if data and not data.endswith(b"\n"):  # its writer was killed
                append(path, b"\n")

    def add(self, rows: Sequence[ProgressRow]) -> str:
        """Append rows; returns a name for which there is no column left, "" for none. OSError."""
        names = dict.fromkeys(name for row in rows for name in row.values)
        new = [name for name in names if name not in self._columns]
        room = MAX_METRICS + len(OWN) - len(self._columns or OWN)
        if new[:room] or not self._columns:
            self._widen([*(self._columns or OWN), *new[:room]])
        lines = _csv(
            [f"{row.time:.3f}", row.round, row.step]
            + [row.values.get(name, "") for name in self._columns[len(OWN) :]]
            for row in rows
        )
        if append(self._path, lines) > MOST_PROGRESS:
            head, *left = self._path.read_bytes().splitlines(keepends=True)
            replace_file(self._path, b"".join([head, *left[1::2]]))
        return next(iter(new[room:]), "")

    def _widen(self, columns: list[str]) -> None:
        data = self._path.read_bytes() if self._columns else b""
        left = data[data.find(b"\n") + 1 :]
        more = b"," * (len(columns) - len(self._columns or OWN))
        replace_file(self._path, _csv([columns]) + left.replace(b"\n", more + b"\n"))
        self._columns = columns


def _csv(rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
