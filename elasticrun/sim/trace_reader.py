"""A trace as what it says, line by line; what is wrong with it in a sentence.

The ring's two files are read as one. A file that begins in the midst of a master's life is only a
beginning where the file before it is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from elasticrun.config_json import typed
from elasticrun.core.effects import Attached, Heard, JobEvent
from elasticrun.core.facts import Facts
from elasticrun.core.trace_form import TRACE_VERSION, event_from_plain
from elasticrun.wire.messages import Beat, JobSpec

OLDER: Final = ".1"
"""Added to the name of the ring's file in use: the one before it."""

MAX_LINE: Final = 64 * 1024 * 1024
"""No line is longer: facts of 100,000 nodes have some 30 MB."""


class NoTrace(Exception):
    """The file is no trace of ours; the text is one sentence."""


@dataclass(frozen=True, slots=True)
class Head:
    """A master begins, or the ring's next file does."""

    version: str
    job_id: str
    term: int
    spec: JobSpec | None
    facts: Facts | None
    at: float
    wall: str
    midst: bool = False
    facts_age: float = 0.0
    streams: tuple[Attached, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The brain took something in; what it said, in words, and what it raised, if it did."""

    at: float
    event: JobEvent
    minted: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Gap:
    """Something is missing here; a sentence. `cut`: the writer died in the middle of a line."""

    why: str
    cut: bool = False


Item = Head | Step | Gap


def read(path: Path) -> Iterator[Item]:
    """What the trace at `path` (a file, or the folder of a record) says. NoTrace."""
    if path.is_dir():
        path = path / "trace"
    older = path.with_name(path.name + OLDER)
    files = [older, path] if older.exists() and path.exists() else [path]
    for number, file in enumerate(files):
        try:
            opened = file.open("rb")
        except OSError as wrong:
            raise NoTrace(f"{file} cannot be read: {wrong.strerror or wrong}") from None
        with opened:
            yield from _read_file(file, opened, first=not number)


def _read_file(path: Path, file: BinaryIO, *, first: bool) -> Iterator[Item]:
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        if not line.strip():
            continue
        try:
            items = list(_items(json.loads(line)))
        except (ValueError, TypeError, RecursionError) as wrong:
            if first:
                raise NoTrace(f"{path} is no trace: {_why(wrong)}") from None
            cut = not line.endswith(b"\n") or _is_cut(file)
            yield Gap(f"line {number} of {path.name} {_damage(wrong, cut)}", cut)
            continue
        if first and not (items and isinstance(items[0], Head)):
            raise NoTrace(f"{path} is no trace: it does not begin with a master's head")
        first = False
        yield from items
    if first:
        raise NoTrace(f"{path} is no trace: it is empty")


def _is_cut(file: BinaryIO) -> bool:
    """Whether a master that began after this line found it unfinished: it ended the line, and the
    next one is its head."""
    here = file.tell()
    following = file.readline(64)
    file.seek(here)
    return following.startswith(b'{"trace":')


def _damage(wrong: Exception, cut: bool) -> str:
    return "was not written to its end: its master was killed" if cut else f"is damaged: {wrong}"


def _why(wrong: Exception) -> str:
    return "it is not text of that form" if isinstance(wrong, json.JSONDecodeError) else str(wrong)


def _items(line: Any) -> Iterator[Item]:
    if not isinstance(line, dict):
        raise ValueError("a line of it is no object")
    if "trace" in line:
        yield _head(line)
    elif "beats" in line:
        for at, session, number in line["beats"]:
            yield Step(typed(at, float), Heard(typed(session, int), Beat(typed(number, int))))
    elif "dropped" in line:
        yield Gap(f"{typed(line['dropped'], int)} events were not written here: the disk was slow")
    else:
        yield Step(
            typed(line.get("t"), float),
            event_from_plain(line.get("e")),
            typed(line.get("mint", []), tuple[str, ...]),
            typed(line.get("do", []), tuple[str, ...]),
            typed(line.get("raised", ""), str),
        )


def _head(line: dict[str, Any]) -> Head:
    if line["trace"] != TRACE_VERSION:
        raise ValueError(
            f"it is of version {line['trace']!r}, and this elasticrun reads {TRACE_VERSION}"
        )
    streams = [event_from_plain(stream) for stream in line.get("streams", [])]
    return Head(
        version=typed(line.get("version"), str),
        job_id=typed(line.get("job"), str),
        term=typed(line.get("term"), int),
        spec=typed(line.get("spec"), JobSpec | None),
        facts=typed(line.get("facts"), Facts | None),
        at=typed(line.get("t"), float),
        wall=typed(line.get("wall", ""), str),
        midst=typed(line.get("midst", False), bool),
        facts_age=typed(line.get("facts_age", 0.0), float),
        streams=tuple(stream for stream in streams if isinstance(stream, Attached)),
    )
