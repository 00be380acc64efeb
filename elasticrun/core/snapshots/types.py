"""What the components of `Snapshots` share: a snapshot's name, and the outgoing orders."""

from __future__ import annotations

from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName

Key = tuple[RoundName, int]
"""The name of a snapshot: its round and step."""


def key_of(restore: m.Restore) -> Key:
    """The name of a snapshot that is restored."""
    return (restore.round, restore.step)


def sort_key(key: Key) -> tuple[int, int, int]:
    """Sort key: snapshots by age, the oldest first."""
    return (key[0].term, key[0].number, key[1])


class Outbox:
    """Queues orders and log lines until the caller takes them."""

    def __init__(self) -> None:
        self.orders: list[tuple[tuple[str, ...], m.Order | None]] = []
        """Recipients, and the order; None: the facts must be durable before what follows."""
        self.notes: list[tuple[str, str]] = []  # a line for the operator, and its level

    def send(self, order: m.Order, *nodes: str) -> None:
        """Queue an order for these nodes."""
        self.orders.append((nodes, order))

    def record(self) -> None:
        """Queue a record of the facts. What is queued after it waits until they are durable."""
        self.orders.append(((), None))

    def log(self, text: str, level: str = "info") -> None:
        """Queue a line for the operator."""
        self.notes.append((text, level))
