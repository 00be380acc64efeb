"""The states of the hang watch, and what moves it from one to the next.

    Moving -> Still    every node of the round is quiet
    Still -> Moving    a rank moves, or the round ends

`Still` has two states of its own. One is what the samples of the ranks say:

    Unjudged -> Suspected    a sample finds an impasse
    Suspected -> Agreed      the next one finds the same, and no counter has moved in between
    any -> Unjudged          a sample finds none, or a node cannot be judged

The other is what users have been shown:

    Unreported -> Reported    the agreed verdict has been true for long enough
    Reported -> Acted         the round is ended for it

They are separate because a verdict stays on display when a later sample does not confirm it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from elasticrun.core.sight.hangs.sample import Sample
from elasticrun.core.sight.hangs.waiting import Impasse, Scene, Sighting, fingerprint, judge

MIN_APART: Final = 4.0
"""Seconds between two samples below which they count as one."""

ROUNDING: Final = 0.001
"""Seconds by which a sample may be early because of rounding."""

TORCH_FRACTION: Final = 0.8
"""Stacks are taken when this fraction of torch's own limit for a collective has passed: at its end
torch kills the ranks, and their stacks are lost."""


@dataclass(frozen=True, slots=True)
class Moving:
    """Some rank moves, or not every node is known to be quiet."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """The impasse that a sample shows."""

    impasse: Impasse
    counters: tuple[object, ...]  # of the ranks; equal if nothing has moved
    at: float  # time of the sample
    first_at: float  # time of the first in a row of samples that show the same
    away: float  # `JobContext.away` at that time


@dataclass(frozen=True, slots=True)
class Unjudged:
    """No sample yet, or the last one shows no impasse."""


@dataclass(frozen=True, slots=True)
class Suspected:
    """One sample shows this impasse."""

    opinion: Opinion


@dataclass(frozen=True, slots=True)
class Agreed:
    """Two successive samples show this impasse."""

    opinion: Opinion


Belief = Unjudged | Suspected | Agreed


@dataclass(frozen=True, slots=True)
class Unreported:
    """Users have been shown no verdict."""


@dataclass(frozen=True, slots=True)
class Reported:
    """Users are shown a verdict."""

    verdict: Opinion
    noted: Impasse  # the last one that a line was written about
    first_at: float  # when the first line was written


@dataclass(frozen=True, slots=True)
class Acted:
    """The round is being ended for the reported verdict."""

    reported: Reported


Notice = Unreported | Reported | Acted


@dataclass(slots=True)
class Dump:
    """The stacks that are written to files, once while nothing moves."""

    taken: bool = False
    written: Sample | None = None  # the sample they belong to
    torch_ends: float | None = None  # when torch itself ends the job
    due: float | None = None  # when stacks must be taken, before that


@dataclass(slots=True)
class Still:
    """Nothing has moved since `since`."""

    since: float  # when the last node became quiet
    members: tuple[str, ...] = ()  # nodes to sample; () while one of them cannot be judged
    samples_at: tuple[float, ...] = ()  # seconds of stillness at the last two scheduled samples
    idle_at: float = -math.inf  # until when any rank did anything, as of the last sample
    belief: Belief = Unjudged()
    notice: Notice = Unreported()
    dump: Dump = field(default_factory=Dump)

    def seconds(self, at: float) -> float:
        """For how many seconds nothing has moved at time `at`."""
        return at - self.since + ROUNDING

    @property
    def opinion(self) -> Opinion | None:
        """The impasse that the last sample shows; None: it shows none."""
        return None if isinstance(self.belief, Unjudged) else self.belief.opinion

    @property
    def reported(self) -> Reported | None:
        """What users have been shown; None: nothing."""
        match self.notice:
            case Reported() as reported:
                return reported
            case Acted(reported):
                return reported
        return None

    def judge(self, sample: Sample, sightings: list[Sighting], away: float) -> None:
        """Process a complete sample of every rank: update `belief`."""
        seconds = self.seconds(sample.at)
        scene = Scene(sightings, seconds)
        impasse, before = judge(scene), self.opinion
        self.idle_at = sample.at - scene.idle if scene.idle < seconds else -math.inf
        self._note_torch_limits(sample, sightings)
        if impasse is None:
            self.belief = Unjudged()
            return
        counters = fingerprint(sightings)
        if before is None or before.counters != counters or not before.impasse.is_like(impasse):
            self.belief = Suspected(Opinion(impasse, counters, sample.at, sample.at, away))
        elif sample.at - before.at >= MIN_APART:
            self.belief = Agreed(Opinion(impasse, counters, sample.at, before.first_at, away))

    def _note_torch_limits(self, sample: Sample, sightings: list[Sighting]) -> None:
        """Record when torch will end an open collective, and by when stacks must be taken."""
        ends = []
        for one in sightings:
            for at in one.seen.at:
                if at.limit > 0.0 and at.entered > at.done:
                    ends.append(
                        (
                            sample.at + at.limit - at.age,
                            sample.at + TORCH_FRACTION * at.limit - at.age,
                        )
                    )
        self.dump.torch_ends, self.dump.due = min(ends, default=(None, None))


State = Moving | Still
