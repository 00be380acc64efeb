"""Newcomers while a round runs: each is probed by itself, so that a bad one stops nobody."""

from __future__ import annotations

from dataclasses import dataclass

from elasticrun.config import PROBE_ANSWER_SLACK
from elasticrun.core.deadlines import Deadlines
from elasticrun.core.netcheck_pass import overdue
from elasticrun.core.netcheck_terms import Group, quoted
from elasticrun.wire.messages import Probed

TRIES = 2
"""A node is convicted when its own probes have failed this often."""


@dataclass(slots=True)
class _Visit:
    """A node that is probed alone."""

    group: Group
    failures: list[str]
    again: bool = False  # its next probe is to be ordered


class Doors:
    """The nodes at the door whose probes are under way."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._visits: dict[str, _Visit] = {}
        self._due: Deadlines[str] = Deadlines()
        self._again: list[str] = []  # in order of their answers

    def group_of(self, node: str) -> Group | None:
        """The probe of this node whose answer is awaited."""
        visit = self._visits.get(node)
        return None if visit is None or visit.again else visit.group

    def probe(self, group: Group, now: float) -> None:
        """This group of one is probed, for the first time or again."""
        node = group.nodes[0]
        visit = self._visits.get(node)
        self._visits[node] = _Visit(group, [] if visit is None else visit.failures)
        self._due.arm(node, now + self._limit + PROBE_ANSWER_SLACK)

    def answered(self, node: str, said: Probed) -> bool | str:
        """Its answer: True if it passed, why it is convicted, or False: nothing yet."""
        visit = self._visits.get(node)
        if visit is None or visit.again or visit.group.check != said.check:
            return False
        self._due.disarm(node)
        if said.ok:
            del self._visits[node]
            return True
        visit.failures.append(f"in {said.phase} ({quoted(said.reason)})")
        if len(visit.failures) < TRIES:
            visit.again = True
            self._again.append(node)
            return False
        del self._visits[node]
        return f"{node} failed its own probes twice: {', and '.join(visit.failures)}"

    def gone(self, node: str) -> None:
        """It is not probed here any more."""
        if self._visits.pop(node, None) is not None:
            self._due.disarm(node)

    def next_deadline(self) -> float | None:
        """When an answer is overdue."""
        return self._due.next()

    def overdue(self, now: float) -> list[tuple[str, Probed]]:
        """What stands for the answers that did not come."""
        late = self._due.pop_due(now)
        return [(node, overdue(self._visits[node].group.check, self._limit)) for node in late]

    def take_again(self) -> list[str]:
        """Who is to be probed once more; each is told once."""
        nodes = [node for node in self._again if node in self._visits and self._visits[node].again]
        self._again.clear()
        return nodes
