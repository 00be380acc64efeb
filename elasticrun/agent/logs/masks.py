"""Compares lines by their text without numbers, and marks differing numbers in a folded line.

A number may be part of a word (`loss=2.31`, `shard0017.tar`); color escape sequences are not
numbers. A line without a letter consists of numbers only, so there the numbers are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

DIFFERS: Final = b"~"
"""Precedes a number that comes from the first rank and differs on other ranks."""

_VALUE: Final = rb"(?:(?<![\w.)])[+-])?(?:0[xX][0-9a-fA-F]+|\d+(?:\.\d+)*(?:[eE][+-]?\d+)?)"
_NUMBER: Final = re.compile(_VALUE)
_ESCAPE: Final = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
_PIECES: Final = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|(" + _VALUE + rb")")
_LETTER: Final = re.compile(rb"[A-Za-z\x80-\xff]")
_OWN_PREFIX: Final = re.compile(rb"\[rank\d+\]: ?")
_BAR: Final = re.compile(rb"\|[^|]*\|")


def body(line: bytes) -> bytes:
    """The line without the `[rank3]:` that torch puts before some lines."""
    if line.startswith(b"[rank") and (found := _OWN_PREFIX.match(line)):
        return line[found.end() :]
    return line


def bare(line: bytes) -> bytes:
    """The line without colors."""
    return _ESCAPE.sub(b"", line)


def key_of(line: bytes) -> bytes:
    """A key that is equal for lines that differ only in their numbers. A line without letters is
    its own key."""
    text = body(line)
    key = _masked(text)
    bare = _ESCAPE.sub(b"", key) if b"\x1b" in key else key
    return key if _LETTER.search(bare) else text


def moment_of(line: bytes) -> bytes:
    """A key for lines of the same moment of training: measured values (`loss=2.31`) may differ;
    counts of steps or items may not."""
    text = bare(body(line))
    return _NUMBER.sub(lambda one: b"\0" if b"." in one[0] else one[0], text)


def bar_key(line: bytes) -> bytes:
    """A key that is equal for all states of a bar: without numbers and the drawing between two
    `|`."""
    return b"\r" + _masked(_BAR.sub(b"|\0|", body(line)))


def _masked(text: bytes) -> bytes:
    if b"\x1b" in text:
        return _PIECES.sub(_mask_piece, text)
    return _NUMBER.sub(b"\0", text)


def _mask_piece(piece: re.Match[bytes]) -> bytes:
    return piece[0] if piece[1] is None else b"\0"


def numbers(line: bytes) -> list[bytes]:
    """The numbers that `key_of` masks, in order."""
    if b"\x1b" not in line:
        return _NUMBER.findall(body(line))
    return [piece[1] for piece in _PIECES.finditer(body(line)) if piece[1] is not None]


def mark_differing(line: bytes, differing: Iterable[int]) -> bytes:
    """The first rank's line, with a mark before each number (by index in `numbers`) that differs on
    another rank."""
    marked, place = frozenset(differing), -1

    def mark(piece: re.Match[bytes]) -> bytes:
        nonlocal place
        if piece[1] is None:
            return piece[0]
        place += 1
        return DIFFERS + piece[0] if place in marked else piece[0]

    text = body(line)
    return _PIECES.sub(mark, text) if marked else text
