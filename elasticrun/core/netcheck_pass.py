"""One pass of probes: which answers are awaited, and what became of each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elasticrun.config import PROBE_ANSWER_SLACK
from elasticrun.core.deadlines import Deadlines
from elasticrun.core.netcheck_terms import Group
from elasticrun.wire.messages import Probed, ProbePhase

HELD_UP_FOR = 2.0
"""Seconds that the partners of a node that failed by itself are still awaited. Mostly they say at
once that they cannot go on; where its probe died before it could tell them, they wait for it in
vain until their limit. Raise it and such a death costs more; their next probe ends that wait."""


@dataclass(slots=True)
class Run:
    """One group's probe."""

    group: Group
    said: dict[str, Probed] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)  # who has gone, and how


class Pass:
    """Groups that are probed at the same time."""

    def __init__(self, groups: Sequence[Group], now: float, limit: float) -> None:
        """`limit`: seconds that one probe may take; its answer may take a little longer."""
        self.runs = [Run(group) for group in groups]
        self._limit = limit
        self._end = now + limit + PROBE_ANSWER_SLACK
        self._awaited = {node: run for run in self.runs for node in run.group.nodes}
        self._by_first = {run.group.nodes[0]: run for run in self.runs}
        self._held_up: Deadlines[str] = Deadlines()  # by a group's first node

    @property
    def over(self) -> bool:
        """Whether no answer is awaited any more."""
        return not self._awaited

    def group_of(self, node: str) -> Group | None:
        """The group whose answer of this node is awaited."""
        run = self._awaited.get(node)
        return None if run is None else run.group

    def answered(self, node: str, said: Probed, now: float) -> None:
        """A node's answer; ignored if it is not the one that is awaited."""
        run = self._awaited.get(node)
        if run is not None and run.group.check == said.check:
            run.said[node] = said
            del self._awaited[node]
            first, *others = run.group.nodes
            if len(run.said) == len(run.group.nodes):
                self._held_up.disarm(first)
            elif said.own and others and not run.group.perf:
                self._held_up.arm(first, now + HELD_UP_FOR)

    def next_deadline(self) -> float:
        """When `overdue` is due."""
        held_up = self._held_up.next()
        return self._end if held_up is None else min(self._end, held_up)

    def lost(self, node: str, reason: str) -> None:
        """It will not answer. What its partners find now says nothing, so they are not awaited:
        their next probe takes the place of this one."""
        run = self._awaited.pop(node, None)
        if run is not None:
            run.lost[node] = reason
            for other in run.group.nodes:
                self._awaited.pop(other, None)

    def overdue(self, now: float) -> None:
        """Who has not answered in time has failed by itself; but not who was held up."""
        for first in self._held_up.pop_due(now):
            for node in self._by_first[first].group.nodes:
                self._awaited.pop(node, None)
        if now >= self._end:
            for node, run in self._awaited.items():
                run.said[node] = overdue(run.group.check, self._limit)
            self._awaited.clear()


def overdue(check: str, limit: float) -> Probed:
    """What stands for the answer of a node that gave none."""
    whole = limit + PROBE_ANSWER_SLACK
    return Probed(
        check=check,
        ok=False,
        phase=ProbePhase.START,
        own=True,
        excused=False,
        reason=f"did not answer within {whole:g} s (the probe's limit is {limit:g} s)",
        compute=0.0,
        flops=0.0,
        transfers=(),
        seconds=whole,
        timed=0.0,
    )
