"""What a field of a message may hold; its annotation says it: `Annotated[int, whole(1, 65535)]`.

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


def whole(low: int, high: int) -> Bound:
    """A whole number between these two."""

    def check(where: str, value: int) -> int:
        if not low <= value <= high:
            raise WireError(f"{where} is {value}, not between {low} and {high}")
        return int(value)

    return check


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


def name(least: int, most: int) -> Bound:
    """One printable line of so many characters, never cut, because a cut name is another name."""

    def check(where: str, value: str) -> str:
        if len(value) < least:
            raise WireError(f"{where} is empty")
        if len(value) > most:
            raise WireError(f"{where} has {len(value)} characters, more than {most}")
        if not value.isprintable():
            raise WireError(f"{where} holds a character that cannot be printed")
        return value

    return check


def one_of(*words: str, make: Callable[[str], str] = str) -> Bound:
    """One of a few words; `make` turns it into its enum."""

    def check(where: str, value: str) -> str:
        if value not in words:
            raise WireError(f"{where} is {value[:80]!r}, not one of {', '.join(words)}")
        return make(value)

    return check


def exactly(length: int, *, empty: bool = False) -> Bound:
    """Bytes of this length, or (`empty`) none at all."""

    def check(where: str, value: bytes) -> bytes:
        if len(value) != length and (value or not empty):
            raise WireError(f"{where} has {len(value)} bytes, not {length}")
        return bytes(value)

    return check


def at_most(count: int) -> Bound:
    """A list that is no longer."""

    def check(where: str, value: Any) -> Any:
        if len(value) > count:
            raise WireError(f"{where} lists {len(value)}, more than {count}")
        return value

    return check


def cut(value: str, most: int, *, keep_end: bool = False) -> str:
    """At most `most` characters, none of which UTF-8 cannot carry (half a surrogate pair)."""
    if len(value) > most:
        value = "…" + value[1 - most :] if keep_end else value[: most - 1] + "…"
    return value.encode("utf-8", "replace").decode()


# ---------------------------------------------------------------- what many fields are

Count = Annotated[int, whole(0, INT32)]
Pid = Annotated[int, whole(-1, INT32)]
StepOrNone = Annotated[int, whole(-1, INT64)]
Limit = Annotated[float, limit]
Amount = Annotated[float, amount]
Ratio = Annotated[float, ratio]
Name = Annotated[str, name(1, MAX_NAME)]
NameOrEmpty = Annotated[str, name(0, MAX_NAME)]
Attempt = Annotated[str, name(1, MAX_ATTEMPT)]
