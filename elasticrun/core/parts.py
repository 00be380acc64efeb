"""What the parts of the core have in common: how the job asks them, and what outlives a master."""

from __future__ import annotations

from typing import Protocol, TypeVar

from elasticrun.core.wishes import Wish

Told = TypeVar("Told", contravariant=True)
Kept = TypeVar("Kept")


class Part(Protocol[Told]):
    """A component that the job asks after each event what it wants done."""

    def heard(self, node: str, report: Told) -> bool:
        """Take in a report of a node; whether anything may have changed by which something is
        decided."""

    def pursue(self) -> tuple[Wish, ...]:
        """Do what is due, and return what others have to do."""

    def next_deadline(self) -> float | None:
        """When `pursue` is due at the latest."""


class Recorded(Protocol[Kept]):
    """A component with facts that the next master must know. Only the component itself reads and
    writes its struct of `core/persisted.py`."""

    def facts(self, now: float) -> Kept:
        """The facts, for the record."""

    def restore(self, facts: Kept, at: float) -> None:
        """Take over what the master before this one recorded. `at`: when it did, on the clock of
        this master."""
