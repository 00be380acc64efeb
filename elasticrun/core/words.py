"""Small change of sentences."""

from __future__ import annotations

from collections.abc import Sequence

NAMED = 4
"""Most nodes that a sentence lists by name; of more it names the first and counts the rest."""


def some(count: int, thing: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def names(nodes: Sequence[str]) -> str:
    """`n0`, `n0 and n1`, `n0, n1 and n2`, `n0, n1, n2 and 7 others`."""
    if len(nodes) > NAMED:
        return f"{', '.join(nodes[: NAMED - 1])} and {len(nodes) - NAMED + 1} others"
    if len(nodes) < 2:
        return "".join(nodes)
    return f"{', '.join(nodes[:-1])} and {nodes[-1]}"
