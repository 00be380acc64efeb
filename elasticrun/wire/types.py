"""Bounds of message fields, common records, and the conversion of any record to JSON.

The common records are rounds, endpoints, the user's program and the findings of a check.

An annotation states what a field may contain: `Annotated[int, Between(1, 65535)]`. A bound takes
the location of a value (for its sentence) and the value, and returns it or raises `WireError`.
Received data is checked field by field before any other code sees it: no negative sizes, no
unlimited texts, no words outside an enum, no NaN. Sent data passes the same checks, after texts
have been cut to their bound. A field without its own bound has that of its type: a `str` is `text`,
a `float` is `seconds`, an `int` is from 0 to INT64.

A record is a dataclass or a struct: `loads(dumps(record), type(record)) == record`. Anything that
is not exactly such a record raises ValueError with a sentence: no code guesses what somebody may
have meant. `strict` is for data from other processes: no text with a NUL, no number that no field
can have.

Ranks and the fork server import this module, so it imports nothing that loads slowly: it handles
structs without importing msgspec.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise, repeat
from typing import Annotated, Any, Final, TypeVar

INT32: Final = 2**31 - 1
INT64: Final = 2**63 - 1

MAX_TEXT: Final = 4096
"""Maximum characters of a sentence, traceback or path in a message; the sender truncates it."""

MAX_NAME: Final = 1024
"""Maximum characters of a name (of a job, node, host, role); a longer one is refused."""

MAX_SECONDS: Final = 1e9
"""Maximum duration in seconds: 31 years, which people write for "forever"."""

MAX_LOCAL_RANKS: Final = 4096
"""Maximum number of ranks on one node; ten times the cores of the largest hosts."""

MAX_ATTEMPT: Final = 64
"""Maximum characters of the name of an attempt to persist."""

MAX_DATASETS: Final = 64
"""Maximum number of datasets of which the ranks of a job may take work."""

MAX_DATASET_NAME: Final = 128
MAX_SAMPLES: Final = 2**40
MAX_EPOCHS: Final = 2**20
"""Maximum length of a dataset's name, number of its samples, and of its epochs."""

MAX_MARKS: Final = 16
"""Maximum number of steps for which a rank reports what it had used; older ones are dropped."""

MAX_LEASES: Final = 1024
"""Maximum number of leases in a report. A rank reports those that it has used since its oldest mark
that is still open."""

MAX_USED: Final = 60_000
"""Maximum characters of what was used of all datasets (`core/work/spans.py`): enough for 10,000
ranks, each with a partly used lease."""

Bound = Callable[[str, Any], Any]


class WireError(ValueError):
    """An invalid message, or one that violates a bound; the text is a sentence for people."""


# ---------------------------------------------------------------- bounds


class Between:
    """An integer from `low` to `high`, inclusive."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def __call__(self, where: str, value: int) -> int:
        if not self.low <= value <= self.high:
            raise WireError(f"{where} is {value}, not between {self.low} and {self.high}")
        return int(value)


def _number(holds: Callable[[float], bool], else_it_is: str) -> Bound:
    """The bound of a number that satisfies `holds` and is neither NaN nor infinite."""

    def bound(where: str, value: float) -> float:
        if not (math.isfinite(value) and holds(value)):
            raise WireError(f"{where} is {value}{else_it_is}")
        return float(value)

    return bound


seconds = _number(
    lambda value: 0 <= value <= MAX_SECONDS, f" s, not between 0 and {MAX_SECONDS:.0f} s"
)
"""The bound of a duration."""

amount = _number(lambda value: value >= 0, ", not an amount of 0 or more")

ratio = _number(lambda value: value > 1, ", not a ratio above 1")
"""The bound of a factor: how many times the usual value is an outlier."""


def limit(where: str, value: float) -> float:
    """The bound of a time limit in seconds; it must not be 0."""
    if seconds(where, value) == 0:
        raise WireError(f"{where} is {value} s, but a time limit must be above 0")
    return float(value)


def text(where: str, value: str) -> str:
    """The bound of free text for people: the sender truncates it, the receiver refuses a longer
    one."""
    if len(value) > MAX_TEXT:
        raise WireError(f"{where} has {len(value)} characters, more than {MAX_TEXT}")
    return value


def tail(where: str, value: str) -> str:
    """The bound of text of which the sender keeps the end: a traceback's last lines name the
    error."""
    return text(where, value)


class OneLine:
    """One printable line of `least` to `most` characters; never truncated, because half a name is
    another name."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most

    def __call__(self, where: str, value: str) -> str:
        if len(value) < self.least:
            raise WireError(f"{where} is empty")
        if len(value) > self.most:
            raise WireError(f"{where} has {len(value)} characters, more than {self.most}")
        if not value.isprintable():
            raise WireError(f"{where} holds a character that cannot be printed")
        return value


class WholeText:
    """Text of at most `most` bytes; never truncated, because half of it would be unreadable."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, where: str, value: str) -> str:
        if len(value.encode()) > self.most:
            raise WireError(f"{where} is longer than {self.most} bytes")
        return value


class OneOf:
    """One of these words; `make` converts it to its enum."""

    def __init__(self, *words: str, make: Callable[[str], str] = str) -> None:
        self.words, self.make = words, make

    def __call__(self, where: str, value: str) -> str:
        if value not in self.words:
            raise WireError(f"{where} is {value[:80]!r}, not one of {', '.join(self.words)}")
        return self.make(value)


class Exactly:
    """Bytes of this length; if `empty`, also none at all."""

    def __init__(self, length: int, *, empty: bool = False) -> None:
        self.length, self.empty = length, empty

    def __call__(self, where: str, value: bytes) -> bytes:
        if len(value) != self.length and (value or not self.empty):
            raise WireError(f"{where} has {len(value)} bytes, not {self.length}")
        return bytes(value)


class AtMost:
    """A list of at most this length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, where: str, value: Any) -> Any:
        if len(value) > self.count:
            raise WireError(f"{where} lists {len(value)}, more than {self.count}")
        return value


def cut(value: str, most: int, *, keep_end: bool = False) -> str:
    """Truncate to at most `most` characters, and replace those that UTF-8 cannot encode (half a
    surrogate pair)."""
    if len(value) > most:
        value = "…" + value[1 - most :] if keep_end else value[: most - 1] + "…"
    return value.encode("utf-8", "replace").decode()


# ---------------------------------------------------------------- types of many fields

Count = Annotated[int, Between(0, INT32)]
Pid = Annotated[int, Between(-1, INT32)]
StepOrNone = Annotated[int, Between(-1, INT64)]
Limit = Annotated[float, limit]
Amount = Annotated[float, amount]
Ratio = Annotated[float, ratio]
Name = Annotated[str, OneLine(1, MAX_NAME)]
NameOrEmpty = Annotated[str, OneLine(0, MAX_NAME)]
Attempt = Annotated[str, OneLine(1, MAX_ATTEMPT)]


# ---------------------------------------------------------------- ranks as ranges


def spans_of(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """First and last number of each run of consecutive numbers, ascending."""
    found: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if found and rank == found[-1][1] + 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return found


MIN_RANGE: Final = 3
"""Minimum number of consecutive ranks written as a range; fewer are listed."""


def write_ranges(ranks: Iterable[int], *, pairs: bool = False) -> str:
    """The ranks in ascending order, each once, as `0-41,43` or, with a stride, `0-62:2`; "" for
    none. `pairs`: two neighbors form a range too."""
    rest = sorted(set(ranks))
    parts: list[str] = []
    at = 0
    while at < len(rest):
        end = at + 1
        if end < len(rest):
            stride = rest[end] - rest[at]
            while end + 1 < len(rest) and rest[end + 1] - rest[end] == stride:
                end += 1
            if end - at + 1 >= MIN_RANGE or (pairs and stride == 1):
                parts.append(f"{rest[at]}-{rest[end]}" + (f":{stride}" if stride > 1 else ""))
                at = end + 1
                continue
        parts.append(str(rest[at]))
        at += 1
    return ",".join(parts)


def read_ranges(text: str, limit: int) -> tuple[int, ...]:
    """The ranks below `limit` in a text like that of `write_ranges`, in its order. Raises
    ValueError if it is invalid."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        span, _, stride = part.partition(":")
        first, _, last = span.partition("-")
        low, high, step = int(first), int(last or first), int(stride or 1)
        if step < 1:
            raise ValueError(f"{part!r}: a stride is 1 or more")
        found.extend(range(low, min(high + 1, limit), step))
    return tuple(found)


# ---------------------------------------------------------------- records

REPEAT_WITHIN: Final = 1.0
"""Seconds after a SIGTERM within which another one counts as the same: Slurm sends it twice within
milliseconds, to every process, at a time limit and at a preemption. (A second ^C is intentional.)
"""


@dataclass(frozen=True, slots=True)
class RoundName:
    """The whole name of a round; every fence compares all three parts.

    A number alone is ambiguous once a master has come back empty and counted again, so a
    round also carries the master's term and a nonce that nobody could have guessed.
    """

    term: int
    number: Annotated[int, Between(1, INT64)]  # grows by one with every round of the job
    nonce: Name

    def __str__(self) -> str:
        return f"{self.number} ({self.term}/{self.nonce})"


@dataclass(frozen=True, slots=True)
class Skip:
    """What the ranks of a round do not restore, unless nothing else is left."""

    storage_from: StepOrNone = -1  # checkpoints of this step and later; -1: none
    memory: bool = False  # the snapshot in memory: ranks failed soon after restoring it
    all_but: StepOrNone = -1  # all steps except this one, which a person requests; -1: none


NO_SKIP: Final = Skip()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host (name or address, IPv6 without brackets) and a TCP port."""

    host: Name
    port: Annotated[int, Between(1, 65535)]

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


MAX_TENSOR_NAME: Final = 200
"""Maximum length of the name of a tensor in a message; of a longer one the end is kept."""

MAX_DEVICE_NAME: Final = 120
MAX_PARTS: Final = 64
"""Number of parts in which tensors are compared."""


def tensor_name(fqn: str) -> str:
    """The name of a tensor in messages."""
    printable = "".join(c if c.isprintable() else "?" for c in fqn[-MAX_TENSOR_NAME:])
    return printable.strip() or "?"


def key_of_name(name: str) -> int:
    """A hash of `tensor_name`; fits a signed 64-bit number."""
    from hashlib import blake2b  # not in the ranks of scripts that do not use it

    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def parts_of(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """Divide the range into at most `parts` ranges of about the same length, none empty."""
    size = last - first
    count = min(parts, size)
    ends = [first + at * size // count for at in range(count + 1)] if count > 0 else []
    return list(pairwise(ends))


def mint_incarnation() -> str:
    """A name for one run of an agent; random, because clocks and pids can repeat."""
    return os.urandom(8).hex()


def mint_nonce() -> str:
    """Eight hex digits that distinguish two rounds with the same number."""
    return os.urandom(4).hex()


class EntryKind(StrEnum):
    """How the user's program is started in a rank."""

    SCRIPT = "script"  # python -u target args...
    MODULE = "module"  # python -u -m target args...
    COMMAND = "command"  # target args...  (--no-python)
    RUN_PATH = "run-path"  # runpy.run_path(target) in a multiprocessing child
    FUNCTION = "function"  # a function of elastic_launch's caller


@dataclass(frozen=True, slots=True)
class Entrypoint:
    """The user's program and its arguments, before `${local_rank}` is replaced."""

    kind: EntryKind
    target: str
    args: tuple[str, ...] = ()

    def words(self) -> tuple[str, ...]:
        """Kind, target and arguments, in one tuple."""
        return (str(self.kind), self.target, *self.args)


class Level(StrEnum):
    """The result of a check. A warning never stops a job; a failure does with `--precheck`."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of one machine.

    `check`: which check, in plain words ("disk, log folder", "shared memory"); one check may have
    several findings. `seen`: what was found, in a sentence, with the figure and the limit. `todo`:
    what the operator can do; empty if nothing.
    """

    check: str
    state: Level
    seen: str
    todo: str = ""


# ---------------------------------------------------------------- any record as JSON

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
"""Types whose values are JSON already: most values of a large round, for which there is a fast
path."""

_STRICT_INT: Final = 2**63
_STRICT_FLOAT: Final = 1e18
_FLOAT_BITS: Final = 1024  # a larger int has no float

R = TypeVar("R")


def dumps(record: Any) -> str:
    """A record (of records, tuples, dicts, strings and numbers) as JSON."""
    return json.dumps(plain(record))


def loads(text: str | bytes, kind: type[R]) -> R:
    """The record of type `kind` in `text`. Raises ValueError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"this is not a {kind.__name__}: it is not JSON") from None
    record: R = typed(value, kind)
    return record


def plain(value: Any) -> Any:
    """A record for `json.dumps`; `typed(plain(record), type(record)) == record`."""
    kind: type = type(value)
    if kind in _SCALARS:
        return value
    if is_record(kind):
        return {
            name: item if type(item := getattr(value, name)) in _SCALARS else plain(item)
            for name in _names(kind)
        }
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def typed(value: Any, kind: Any, where: str = "", *, strict: bool = False) -> Any:
    """The value of type `kind` from its `plain` form; `where`: its location, for the sentence.
    Raises ValueError."""
    where = where or getattr(kind, "__name__", str(kind))
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        for each in inner:
            with contextlib.suppress(ValueError):
                return typed(value, each, where, strict=strict)
    elif origin is tuple and isinstance(value, list):
        if inner[1:] == (...,):
            return tuple(_item(item, inner[0], where, strict) for item in value)
        if len(value) != len(inner):
            raise ValueError(f"{where} has {len(value)} entries instead of {len(inner)}")
        return tuple(map(_item, value, inner, repeat(where), repeat(strict)))
    elif origin is dict and isinstance(value, dict):
        return {
            _key(key, inner[0], where, strict): _item(item, inner[1], where, strict)
            for key, item in value.items()
        }
    elif isinstance(kind, type):
        if isinstance(value, dict) and is_record(kind):
            return _record(value, kind, where, strict)
        return _scalar(value, kind, where, strict)
    raise ValueError(f"{where} has the wrong type {type(value).__name__}")


def is_record(kind: type) -> bool:
    """Whether this is a class with named fields: a dataclass, or a struct of msgspec."""
    return hasattr(kind, "__struct_fields__") or is_dataclass(kind)


@cache
def _names(kind: type) -> tuple[str, ...]:
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    names: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
    return names


@cache
def fields_of(kind: type) -> dict[str, Any]:
    """The fields of a record with their types; cached for rounds with ten thousand seats."""
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in _names(kind)}


@cache
def resolve(kind: Any) -> None:
    """Look up the fields of a record and of all records in it, while sys.modules still has their
    modules: the fork server hides its own before it reads its second message."""
    of = fields_of(kind).values() if isinstance(kind, type) and is_record(kind) else ()
    for inner in (*of, *typing.get_args(kind)):
        resolve(inner)


def _item(value: Any, kind: Any, where: str, strict: bool) -> Any:
    """`typed`, with a fast path for scalars."""
    if type(value) is kind and kind in _SCALARS and (not strict or _is_usual(value)):
        return value
    return typed(value, kind, where, strict=strict)


def _record(body: dict[str, Any], kind: type, where: str, strict: bool) -> Any:
    hints = fields_of(kind)
    for name in body:
        if name not in hints:
            raise ValueError(f"{where} has no field {name[:60]!r}")
    values = {
        name: _item(value, hints[name], f"{where}.{name}", strict) for name, value in body.items()
    }
    try:
        return kind(**values)
    except TypeError:
        missing = next((name for name in hints if name not in body), "a field")
        raise ValueError(f"{where} comes without {missing}") from None


def _key(text: str, kind: type, where: str, strict: bool) -> Any:
    if kind is not int:
        return _item(text, kind, where, strict)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{where} has the key {text[:60]!r}, which is not a number") from None


def _scalar(value: Any, kind: type, where: str, strict: bool) -> Any:
    if issubclass(kind, StrEnum) and isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"{where} is {value[:60]!r}, which is not an allowed value") from None
    if kind is float and type(value) is int and value.bit_length() < _FLOAT_BITS:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} has the wrong type {type(value).__name__}")
    if strict and not _is_usual(value):
        raise ValueError(f"{where} has the wrong type or is out of range")
    return value


def _is_usual(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" not in value
    if isinstance(value, float):
        return abs(value) < _STRICT_FLOAT  # false for NaN
    return not isinstance(value, int) or -_STRICT_INT <= value < _STRICT_INT
