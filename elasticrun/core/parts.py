"""The protocols of the core's components: how the job drives them, and what a new master
restores."""

from __future__ import annotations

from typing import Protocol, TypeVar

from elasticrun.core.wishes import Wish

PartReport = TypeVar("PartReport", contravariant=True)
PartFacts = TypeVar("PartFacts")


class Part(Protocol[PartReport]):
    """A component. After each event the job collects its wishes."""

    def on_report(self, node: str, report: PartReport) -> bool:
        """Process a report of a node. Return whether it may change a decision."""

    def pursue(self) -> tuple[Wish, ...]:
        """Do what is due. Return what other components must do."""

    def next_deadline(self) -> float | None:
        """When `pursue` is due at the latest."""


class FactsRecorder(Protocol):
    """FactsRecorder the facts of all components."""

    def record(self) -> None:
        """Record now. Later effects wait until the record is durable."""


class Recorded(Protocol[PartFacts]):
    """A component with facts that the next master needs. Only the component itself reads and writes
    its struct in `core/persisted.py`."""

    def facts(self, now: float) -> PartFacts:
        """The facts to record."""

    def restore(self, facts: PartFacts, at: float) -> None:
        """Restore the facts recorded by the previous master. `at`: when it recorded them, on this
        master's clock."""
