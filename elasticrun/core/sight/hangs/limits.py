"""How long a verdict must hold before users see it, and before the round is ended because of it.

class     shown    acted on (--on-hang=auto)
certain   10 s     30 s
strong    60 s     never; with --on-hang=restart, as long as that place may wait (`stillness`)
weak      120 s    never, unless --hang-limit
still     300 s    never; with --on-hang=restart, 900 s
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from elasticrun.core.context import JobContext
from elasticrun.core.deadlines import earliest
from elasticrun.core.sight.hangs.schedule import FIRST_SAMPLE, SECOND_SAMPLE
from elasticrun.core.sight.hangs.states import ROUNDING, Opinion, Still
from elasticrun.core.sight.hangs.stillness import Place, Places, place_of
from elasticrun.core.sight.hangs.waiting import Impasse, Klass

SHOWN_AFTER: Final[Mapping[Klass, float]] = {
    Klass.CERTAIN: 10.0,
    Klass.STRONG: 60.0,
    Klass.WEAK: 120.0,
    Klass.STILL: 300.0,
}
"""Seconds without movement after which users see a verdict of this class."""

CERTAIN_ENDS: Final = 30.0
"""Seconds without movement after which a round that certainly cannot continue is ended."""

STILL_ENDS: Final = 900.0
"""Seconds without any activity after which --on-hang=restart ends a round in which no rank waits
for another."""


class HangLimits:
    """Decides when users see a verdict, and when the round is ended because of it."""

    def __init__(self, ctx: JobContext) -> None:
        self._ctx = ctx
        self._places = Places()
        self._places.restore(ctx.waits)

    def learn(self, still: Still, seconds: float) -> bool:
        """A wait ended well after `seconds`: remember it. Return whether to record that soon."""
        opinion = still.opinion
        if opinion is None or not self._places.learn(_place(opinion.impasse), seconds):
            return False
        self._ctx.waits = self._places.record()
        return True

    def is_shown(self, still: Still, opinion: Opinion, at: float) -> bool:
        """Whether a verdict has held long enough at time `at` for users to see it."""
        klass = Klass.STRONG if opinion.impasse.held else opinion.impasse.klass
        return at + ROUNDING >= _shown_since(still, opinion) + SHOWN_AFTER[klass]

    def needs_stacks(self, still: Still, opinion: Opinion) -> bool:
        """Whether a sample taken now must include stacks: users will see its verdict, and the
        message needs them."""
        klass = opinion.impasse.klass
        due = self._ctx.now + ROUNDING >= _shown_since(still, opinion) + SHOWN_AFTER[klass]
        return due and klass is not Klass.WEAK

    def ends_at(self, still: Still, opinion: Opinion, *, first: bool) -> float | None:
        """When the round is ended because of this verdict; None: never. --hang-limit counts from
        the last movement, no matter what ranks do meanwhile. `first`: no rank has moved since the
        round began."""
        watch, impasse = self._ctx.spec.watch, opinion.impasse
        if watch.on_hang not in ("auto", "restart") or impasse.held:
            return None
        limit, hard = None, watch.on_hang == "restart"
        if impasse.klass is Klass.CERTAIN:
            limit = CERTAIN_ENDS
        elif impasse.klass is Klass.STRONG and hard:
            limit = self._places.limit(_place(impasse), first=first)
        elif impasse.klass is Klass.STILL and hard:
            limit = STILL_ENDS
        ends = None if limit is None else counts_from(still, opinion) + limit
        if watch.hang_limit <= 0.0 or impasse.klass is Klass.STILL:
            return ends
        return earliest(ends, still.since + max(watch.hang_limit, FIRST_SAMPLE + SECOND_SAMPLE))


def counts_from(still: Still, opinion: Opinion) -> float:
    """The time from which a verdict's duration counts. A rank that works now and then is not idle,
    no matter how long nothing has moved; if no rank waits for another, any activity counts as a
    movement."""
    klass = opinion.impasse.klass
    if klass is Klass.STILL and still.idle_at > still.since:
        return still.idle_at
    by_activity = klass in (Klass.STRONG, Klass.STILL)
    return max(still.since, opinion.first_at - FIRST_SAMPLE) if by_activity else still.since


def _shown_since(still: Still, opinion: Opinion) -> float:
    return counts_from(still, opinion) if opinion.impasse.klass is Klass.STILL else still.since


def _place(impasse: Impasse) -> Place:
    return place_of(impasse.place, impasse.library)
