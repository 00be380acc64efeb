"""Slurm's lists of nodes, `n[1-3,7],gpu[01-04]-ib`, as names: no `scontrol` is asked."""

from __future__ import annotations

import re
from itertools import product
from typing import Final

MAX_NAMES: Final = 100_000
"""Names in one list; beyond it something else is wrong."""

MAX_LENGTH: Final = 1_000_000
"""Characters of a list."""

MAX_DIGITS: Final = 18

_NAME = re.compile(r"[A-Za-z0-9_.:-]*\Z")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?\Z")


class BadHostlist(Exception):
    """The text is no list of nodes; the sentence says why."""


def expand(text: str) -> list[str]:
    """The names in their order. BadHostlist."""
    if len(text) > MAX_LENGTH:
        raise BadHostlist(f"a list of nodes has {MAX_LENGTH} characters at most")
    names: list[str] = []
    for item in _items(text.strip()):
        names += _expanded(item, MAX_NAMES - len(names))
    return names


def _items(text: str) -> list[str]:
    """What stands between the commas outside brackets."""
    items, inside = [""], False
    for char in text:
        if char in "[]":
            if inside == (char == "["):
                raise BadHostlist(f"the brackets of {_short(text)} do not fit together")
            inside = not inside
        if char == "," and not inside:
            items.append("")
        else:
            items[-1] += char
    if inside:
        raise BadHostlist(f"the brackets of {_short(text)} do not fit together")
    if any(not item for item in items):
        raise BadHostlist(f"{_short(text)} names nothing at one place")
    return items


def _expanded(item: str, room: int) -> list[str]:
    """One item: text and brackets in turn. The last bracket counts fastest."""
    pieces = re.split(r"[\[\]]", item)  # text, ranges, text, ranges, ... text
    choices: list[list[str]] = []
    total = 1
    for place, piece in enumerate(pieces):
        if place % 2 == 0:
            if not _NAME.match(piece):
                raise BadHostlist(f"{_short(item)} is not the name of a node")
            choices.append([piece])
            continue
        choices.append(_numbers(piece, item, room // total))
        total *= len(choices[-1])
    if total > room:
        raise BadHostlist(f"more than {MAX_NAMES} nodes are not supported")
    return ["".join(parts) for parts in product(*choices)]


def _numbers(text: str, item: str, room: int) -> list[str]:
    """`1-3,07-12` as texts of the width of the first number."""
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.match(part)
        if match is None or max(map(len, part.split("-"))) > MAX_DIGITS:
            raise BadHostlist(f"[{_short(text)}] in {_short(item)} is no range of numbers")
        first, last = match[1], match[2] or match[1]
        low, high = int(first), int(last)
        if high < low:
            raise BadHostlist(f"[{_short(text)}] in {_short(item)} counts backwards")
        if len(found) + high - low + 1 > room:
            raise BadHostlist(f"more than {MAX_NAMES} nodes are not supported")
        found += [str(one).zfill(len(first)) for one in range(low, high + 1)]
    return found


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
