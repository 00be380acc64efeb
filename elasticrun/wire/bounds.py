"""What a field of a message may hold; its annotation says it: `Annotated[int, Whole(1, 65535)]`.

A bound takes where a value stands (for its sentence) and the value, and returns it or raises
`WireError`. What comes in is checked field by field before anything of elasticrun sees it: no
negative size, no endless text, no word outside its enum, no NaN. What goes out passes the same
checks, after texts have been cut to their bound. A field without a bound of its own has that of its
type: a `str` is `text`, a `float` is `seconds`, an `int` is from 0 to INT64.

Ranks and the fork server import this: nothing stands here that costs them anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Final

INT32: Final = 2**31 - 1
INT64: Final = 2**63 - 1

MAX_TEXT: Final = 4096
"""Longest sentence, traceback or path in a message, in characters; the sender cuts."""

MAX_NAME: Final = 1024
"""Longest name (of a job, node, host, role), in characters; a longer one is refused, not cut."""

MAX_SECONDS: Final = 1e9
"""Longest duration that is believed: 31 years, which people write for "for ever"."""

MAX_LOCAL_RANKS: Final = 4096
"""Most ranks on one node; ten times the cores of the largest hosts there are."""

MAX_ATTEMPT: Final = 64
"""Characters of the name of an attempt to persist."""

Bound = Callable[[str, Any], Any]


class WireError(ValueError):
    """A message that is not one of ours or breaks a bound; the text is a sentence for people."""


# ---------------------------------------------------------------- bounds


class Whole:
    """A whole number between these two."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def __call__(self, where: str, value: int) -> int:
        if not self.low <= value <= self.high:
            raise WireError(f"{where} is {value}, not between {self.low} and {self.high}")
        return int(value)


def seconds(where: str, value: float) -> float:
    """A duration, neither negative nor without end."""
    if not (math.isfinite(value) and 0 <= value <= MAX_SECONDS):
        raise WireError(f"{where} is {value} s, not between 0 and {MAX_SECONDS:.0f} s")
    return float(value)


def limit(where: str, value: float) -> float:
    """A duration in which something is to be done."""
    if seconds(where, value) == 0:
        raise WireError(f"{where} is {value} s, with which nothing can be done in time")
    return float(value)


def amount(where: str, value: float) -> float:
    """A number that is neither negative nor without end."""
    if not (math.isfinite(value) and value >= 0):
        raise WireError(f"{where} is {value}, which is no amount")
    return float(value)


def ratio(where: str, value: float) -> float:
    """How many times a usual value something must be to stand out: above 1, and not without end."""
    if not (math.isfinite(value) and value > 1):
        raise WireError(f"{where} is {value}, not a ratio above 1")
    return float(value)


def text(where: str, value: str) -> str:
    """Free text for people: the sender cuts it, the receiver refuses what is longer."""
    if len(value) > MAX_TEXT:
        raise WireError(f"{where} has {len(value)} characters, more than {MAX_TEXT}")
    return value


def tail(where: str, value: str) -> str:
    """Text of which the sender keeps the end: a traceback says last what went wrong."""
    return text(where, value)


class Line:
    """One printable line of so many characters, never cut, because a cut name is another name."""

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


class OneOf:
    """One of a few words; `make` turns it into its enum."""

    def __init__(self, *words: str, make: Callable[[str], str] = str) -> None:
        self.words, self.make = words, make

    def __call__(self, where: str, value: str) -> str:
        if value not in self.words:
            raise WireError(f"{where} is {value[:80]!r}, not one of {', '.join(self.words)}")
        return self.make(value)


class Exactly:
    """Bytes of this length, or (`empty`) none at all."""

    def __init__(self, length: int, *, empty: bool = False) -> None:
        self.length, self.empty = length, empty

    def __call__(self, where: str, value: bytes) -> bytes:
        if len(value) != self.length and (value or not self.empty):
            raise WireError(f"{where} has {len(value)} bytes, not {self.length}")
        return bytes(value)


class AtMost:
    """A list that is no longer."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, where: str, value: Any) -> Any:
        if len(value) > self.count:
            raise WireError(f"{where} lists {len(value)}, more than {self.count}")
        return value


def cut(value: str, most: int, *, keep_end: bool = False) -> str:
    """At most `most` characters, none of which UTF-8 cannot carry (half a surrogate pair)."""
    if len(value) > most:
        value = "…" + value[1 - most :] if keep_end else value[: most - 1] + "…"
    return value.encode("utf-8", "replace").decode()


# ---------------------------------------------------------------- what many fields are

Count = Annotated[int, Whole(0, INT32)]
Pid = Annotated[int, Whole(-1, INT32)]
StepOrNone = Annotated[int, Whole(-1, INT64)]
Limit = Annotated[float, limit]
Amount = Annotated[float, amount]
Ratio = Annotated[float, ratio]
Name = Annotated[str, Line(1, MAX_NAME)]
NameOrEmpty = Annotated[str, Line(0, MAX_NAME)]
Attempt = Annotated[str, Line(1, MAX_ATTEMPT)]
