"""What the parts of `Snapshots` share: a snapshot's name, and what is to be told."""

from __future__ import annotations

from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName

Key = tuple[RoundName, int]
"""The name of a snapshot: its round and step."""


def key_of(restore: m.Restore) -> Key:
    """The name of the snapshot that is restored."""
    return (restore.round, restore.step)


def order_of(key: Key) -> tuple[int, int, int]:
    """Snapshots in the order of time."""
    return (key[0].term, key[0].number, key[1])


class Outbox:
    """What came of it, in order, until the caller takes it."""

    def __init__(self) -> None:
        self.orders: list[tuple[tuple[str, ...], m.Order]] = []  # nodes, and what they are told
        self.news: list[tuple[str, str]] = []  # a sentence for the operator, and its level

    def tell(self, order: m.Order, *nodes: str) -> None:
        """An order for these nodes."""
        self.orders.append((nodes, order))

    def say(self, text: str, level: str = "info") -> None:
        """A sentence for the operator."""
        self.news.append((text, level))
