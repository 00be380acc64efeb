"""Small change of sentences."""

from __future__ import annotations


def some(count: int, thing: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
