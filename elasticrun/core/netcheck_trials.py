"""What a check has seen of each node, and what that proves.

Failures are of two sorts. A node fails by *itself* when its own part went wrong, with no other node
in it (its matmul, its process; anything where it was probed alone). Otherwise the *group* fails,
and any of its nodes may be at fault, or a link between two of them.

A node is convicted when its failures have no innocent explanation left. Innocent is whatever one
bad link of this node and one bad link between others explain together:

* it has failed twice at least, counting only what its partners do not explain: failures by itself,
  and failures with partners who all work with somebody else;
* no one partner had a part in all of those (its link to this node would explain them), not even
  when a group of three is put aside whose other two have never worked with each other.

So a node with one bad link is never convicted, nor is a good node that had the bad luck to be
probed with a bad one. A node two of whose links are bad counts as a bad node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elasticrun.core.netcheck_terms import Rate
from elasticrun.wire.messages import ProbePhase


@dataclass(frozen=True, slots=True)
class Failure:
    """One probe of a node that failed."""

    partners: tuple[str, ...]  # none: it failed by itself
    phase: ProbePhase
    reason: str


@dataclass(frozen=True, slots=True)
class FailedGroup:
    """A group that failed as one; until something is proved of its nodes each may be at fault."""

    nodes: tuple[str, ...]
    failure: Failure  # the first that one of them told


@dataclass(slots=True)
class Trial:
    """One node in one check."""

    node: str
    place: int  # in the order of placement
    good: bool  # it works with other nodes, by this check or from before
    fresh: bool = False  # by this check
    alone: bool = False  # its own probes passed, in a group of one
    broken: bool = False  # the last that was seen of it is that it failed by itself
    out: bool = False  # it has gone, or was convicted
    told_slow: bool = False
    held_up: str = ""  # why its last probe could not be finished, where another failed
    failures: list[Failure] = field(default_factory=list)
    met: set[str] = field(default_factory=set)  # with whom it was a pair that came to something
    seen: set[str] = field(default_factory=set)  # with whom it was in a group that did
    compute: list[float] = field(default_factory=list)  # seconds of a matmul, one a pass
    rates: list[Rate] = field(default_factory=list)  # one a pass with others

    @property
    def suspect(self) -> bool:
        """Whether it failed, by itself or in a group, and has not been cleared since."""
        return not self.good and (self.broken or any(one.partners for one in self.failures))

    @property
    def pace(self) -> float:
        """Its best matmul in seconds; infinite if none was timed."""
        return min(self.compute, default=float("inf"))

    @property
    def rate(self) -> Rate | None:
        """Its best all_reduce."""
        return min(self.rates, key=lambda one: one.cost, default=None)

    def passed(self, partners: Sequence[str]) -> None:
        """It has worked, with these, or alone where there are none."""
        self.broken = False
        if not partners:
            self.alone = True
            return
        self.good = self.fresh = True
        self.failures = [one for one in self.failures if not one.partners]
        self._met(partners)

    def failed(self, failure: Failure) -> None:
        """A failure of its own, or of a group of which it was part."""
        self.failures.append(failure)
        if not failure.partners:
            self.good = self.fresh = self.alone = False
            self.broken = True
        self._met(failure.partners)

    def _met(self, partners: Sequence[str]) -> None:
        self.seen.update(partners)
        if len(partners) == 1:
            self.met.add(partners[0])


def telling(trial: Trial, trials: Mapping[str, Trial]) -> list[Failure]:
    """Its failures that no partner explains, because all of them work with others."""
    return [one for one in trial.failures if all(trials[it].good for it in one.partners)]


def convicted(failures: Sequence[Failure], proved: Collection[frozenset[str]]) -> bool:
    """Whether these failures, all of them telling, leave no innocent explanation; `proved`: pairs
    of nodes that have worked with each other."""
    return len(failures) > 1 and not _explained([frozenset(f.partners) for f in failures], proved)


def strongly_suspect(trial: Trial, trials: Mapping[str, Trial]) -> bool:
    """Where nothing more can be tried: it failed with two sets of partners that have nobody in
    common, and one of the sets works with others."""
    sets = [frozenset(one.partners) for one in trial.failures]
    works = any(one.partners for one in telling(trial, trials))
    return works and len(sets) > 1 and not frozenset.intersection(*sets)


def _explained(sets: list[frozenset[str]], proved: Collection[frozenset[str]]) -> bool:
    """Whether one bad link of the node and one between two others explain all these failures."""
    for partner in (None, *frozenset().union(*sets)):
        rest = {one for one in sets if partner is None or partner not in one}
        if not rest or (
            len(rest) == 1 and all(len(one) == 2 and one not in proved for one in rest)
        ):
            return True
    return False


def doubt(groups: Iterable[FailedGroup], trials: Mapping[str, Trial]) -> None:
    """Take back the good name of nodes that have it from before this check, and failed in it with
    others who have now been shown to work."""
    for group in groups:
        for node in group.nodes:
            trial = trials[node]
            if trial.good and not trial.fresh:
                trial.good = not all(trials[other].fresh for other in group.nodes if other != node)
