"""When the ranks are sampled, and which samples are kept.

The first two samples after everything stops moving are early and close together; later ones are
further apart. Only one sample runs at a time, whether for the watch or for users.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from elasticrun.core.context import JobContext
from elasticrun.core.rounds.rendezvous import Phase
from elasticrun.core.sight.hangs.sample import Sample
from elasticrun.core.sight.hangs.waiting import Sighting
from elasticrun.wire import messages as m

FIRST_SAMPLE: Final = 5.5
"""Seconds without movement before the first sample: agents report after 5 s. Agents notice the last
movement up to 2.5 s late, so users learn of a certain hang 10 to 13 s after it."""

SECOND_SAMPLE: Final = 4.5
"""Seconds between the first sample and the one that must confirm it."""

EARLY_EVERY: Final = 60.0
"""Minimum seconds between two early pairs, because a job with slow steps is quiet in each step. If
every rank is in a collective, this limit does not apply."""

LATER: Final = (30.0, 60.0, 65.0)
"""Seconds without movement at the next samples; then there is one every LATER_EVERY seconds."""

LATER_EVERY: Final = 30.0

FRESH: Final = 1.0
"""Seconds for which users get an existing sample instead of a new one: many may watch one job."""


def next_sample(samples: tuple[float, ...], *, early: bool, hang_limit: float) -> float:
    """Seconds without movement at which the next sample is due, after those at `samples`.
    `early`: an early first sample is allowed. Otherwise the first one is in time to be confirmed
    before `hang_limit` (0: none), and at LATER[0] at the latest."""
    if not samples:
        late = min(LATER[0], max(FIRST_SAMPLE, (hang_limit or math.inf) - SECOND_SAMPLE))
        return FIRST_SAMPLE if early else late
    last = samples[-1]
    if len(samples) == 1:
        return last + SECOND_SAMPLE
    for when in LATER:
        if when > last + 1.0:
            return when
    return (last + 1.0) // LATER_EVERY * LATER_EVERY + LATER_EVERY


class Samples:
    """The running sample, the last one, and the last ones with stacks and with lines."""

    def __init__(self, ctx: JobContext) -> None:
        self._ctx = ctx
        self._number = 0  # of the last sample
        self.under_way: Sample | None = None
        self.last: Sample | None = None
        self.with_stacks: Sample | None = None
        self.with_lines: Sample | None = None

    def request(
        self, nodes: Iterable[str], *, stacks: bool, dump: int, lines: bool, final: bool = False
    ) -> int:
        """Start a sample: ask these nodes about all their ranks. Return its number. `final`: the
        round ends if this sample confirms the verdict."""
        round_, nodes = self._ctx.round, tuple(nodes)
        assert round_ is not None
        self._number += 1
        order = m.Inspect(round_.name, self._number, stacks, dump, lines)
        self.under_way = Sample(order, nodes, self._ctx.now, self._ended(), final=final)
        self._ctx.broadcast(nodes, order)
        return self._number

    def request_for_user(self, nodes: Iterable[str], *, stacks: bool) -> int:
        """The number of a sample for a user: the running one, a recent one, or a new one that this
        starts; 0 if no round runs."""
        found, last = self.under_way, self.last
        if (
            found is None
            and last is not None
            and last.is_complete
            and self._ctx.now - last.at < FRESH
        ):
            found = last
        if found is not None and (found.order.stacks or not stacks):
            return found.order.number
        nodes = [node for node in nodes if self._ctx.nodes[node].session is not None]
        if not nodes or self._ctx.rdzv.phase is not Phase.RUNNING:
            return 0
        return self.request(nodes, stacks=stacks, dump=0, lines=True)

    def take(self, node: str, report: m.Inspected | m.Stacks) -> bool:
        """Process a node's answer; return whether no answer is missing any more (`is_done`)."""
        sample = self.under_way
        if sample is None or report.number != sample.order.number:
            return False
        sample.take(node, report)
        return sample.is_done

    def take_finished(self) -> Sample | None:
        """End and return the running sample if it is done or its time is over; else None."""
        sample = self.under_way
        if sample is None or not (sample.is_done or self._ctx.now >= sample.until):
            return None
        self.under_way, self.last = None, sample
        if sample.order.stacks:
            self.with_stacks = sample
        if sample.order.lines:
            self.with_lines = sample
        return sample

    def forget(self) -> None:
        """The round is over: drop its samples, except the last ones with stacks or lines."""
        self.under_way = self.last = None

    def lines_of(self, rank: int, since: float) -> Mapping[str, str]:
        """Where the threads of a rank are, from stacks taken at `since` or later; {} without
        any."""
        sample = self.with_stacks
        return sample.lines_of(rank) if sample is not None and sample.at >= since else {}

    def _ended(self) -> list[Sighting]:
        """The ranks of members whose ranks have all exited with 0."""
        round_ = self._ctx.round
        seats = round_.members if round_ is not None else {}
        found = []
        for node in self._ctx.rdzv.last.completed:
            if (seat := seats.get(node)) is not None:
                for rank in range(seat.first_rank, seat.first_rank + seat.ranks):
                    seen = m.RankSeen(rank, 1, m.Being.ENDED, True, False, 0.0, 0.0)
                    found.append(Sighting(node, seen))
        return found
