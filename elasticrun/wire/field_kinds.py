"""The kinds of fields that messages have: how each is read from protobuf, written, and bounded.

`fields.py` says which field of which message is of which kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from elasticrun.wire import messages as m

INT32: Final = 2**31 - 1
INT64: Final = 2**63 - 1


class WireError(ValueError):
    """A message that is not one of ours or breaks a bound; the text is a sentence for people."""


@dataclass(frozen=True, slots=True)
class Int:
    """A whole number between two bounds."""

    low: int
    high: int

    def load(self, where: str, message: Any, name: str) -> int:
        return self.check(where, getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: int) -> None:
        setattr(message, name, self.check(where, value))

    def check(self, where: str, value: int) -> int:
        if not self.low <= value <= self.high:
            raise WireError(f"{where} is {value}, not between {self.low} and {self.high}")
        return int(value)


@dataclass(frozen=True, slots=True)
class Flag:
    """Yes or no."""

    def load(self, where: str, message: Any, name: str) -> bool:
        return bool(getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: bool) -> None:
        setattr(message, name, bool(value))


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration, neither negative nor without end; `zero`: it may be none at all."""

    zero: bool = True

    def load(self, where: str, message: Any, name: str) -> float:
        return self.check(where, getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: float) -> None:
        setattr(message, name, self.check(where, value))

    def check(self, where: str, value: float) -> float:
        if not (math.isfinite(value) and 0 <= value <= m.MAX_SECONDS):
            raise WireError(f"{where} is {value} s, not between 0 and {m.MAX_SECONDS:.0f} s")
        if value == 0 and not self.zero:
            raise WireError(f"{where} is {value} s, with which nothing can be done in time")
        return float(value)


@dataclass(frozen=True, slots=True)
class Amount:
    """A number that is neither negative nor without end."""

    def load(self, where: str, message: Any, name: str) -> float:
        return self.check(where, getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: float) -> None:
        setattr(message, name, self.check(where, value))

    def check(self, where: str, value: float) -> float:
        if not (math.isfinite(value) and value >= 0):
            raise WireError(f"{where} is {value}, which is no amount")
        return float(value)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times a usual value something must be to stand out: above 1, and not without end."""

    def load(self, where: str, message: Any, name: str) -> float:
        return self.check(where, getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: float) -> None:
        setattr(message, name, self.check(where, value))

    def check(self, where: str, value: float) -> float:
        if not (math.isfinite(value) and value > 1):
            raise WireError(f"{where} is {value}, not a ratio above 1")
        return float(value)


@dataclass(frozen=True, slots=True)
class Text:
    """Free text for people: the sender cuts it, the receiver refuses what is longer."""

    tail: bool = False  # keep the end: a traceback says last what went wrong

    def load(self, where: str, message: Any, name: str) -> str:
        value = str(getattr(message, name))
        if len(value) > m.MAX_TEXT:
            raise WireError(f"{where} has {len(value)} characters, more than {m.MAX_TEXT}")
        return value

    def store(self, where: str, message: Any, name: str, value: str) -> None:
        setattr(message, name, cut(value, m.MAX_TEXT, tail=self.tail))


@dataclass(frozen=True, slots=True)
class Name:
    """A name: one printable line that is never cut, because a cut name is another name."""

    empty: bool = False
    most: int = m.MAX_NAME  # characters

    def load(self, where: str, message: Any, name: str) -> str:
        return self.check(where, getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: str) -> None:
        setattr(message, name, self.check(where, value))

    def check(self, where: str, value: str) -> str:
        if not value and not self.empty:
            raise WireError(f"{where} is empty")
        if len(value) > self.most:
            raise WireError(f"{where} has {len(value)} characters, more than {self.most}")
        if not value.isprintable():
            raise WireError(f"{where} holds a character that cannot be printed")
        return value


@dataclass(frozen=True, slots=True)
class Word:
    """One of a few words; `make` turns it into its enum."""

    words: tuple[str, ...]
    make: Callable[[str], str] = str

    def load(self, where: str, message: Any, name: str) -> str:
        return self.make(self.check(where, getattr(message, name)))

    def store(self, where: str, message: Any, name: str, value: str) -> None:
        setattr(message, name, self.check(where, str(value)))

    def check(self, where: str, value: str) -> str:
        if value not in self.words:
            raise WireError(f"{where} is {value[:80]!r}, not one of {', '.join(self.words)}")
        return value


@dataclass(frozen=True, slots=True)
class Bytes:
    """A nonce or a proof: of exactly this length, or (`empty`) none at all."""

    length: int
    empty: bool = False

    def load(self, where: str, message: Any, name: str) -> bytes:
        return self.check(where, getattr(message, name))

    def store(self, where: str, message: Any, name: str, value: bytes) -> None:
        setattr(message, name, self.check(where, value))

    def check(self, where: str, value: bytes) -> bytes:
        if len(value) != self.length and (value or not self.empty):
            raise WireError(f"{where} has {len(value)} bytes, not {self.length}")
        return bytes(value)


def cut(text: str, most: int, *, tail: bool = False) -> str:
    """At most `most` characters, none of which UTF-8 cannot carry (half a surrogate pair)."""
    if len(text) > most:
        text = "…" + text[1 - most :] if tail else text[: most - 1] + "…"
    return text.encode("utf-8", "replace").decode()
