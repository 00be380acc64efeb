"""One network check: passes of groups, from the first to the last verdict."""

from __future__ import annotations

from collections.abc import Mapping

from elasticrun.core import netcheck_words as words
from elasticrun.core.netcheck_pairs import Nodes, first_pass, later_pass
from elasticrun.core.netcheck_pass import Pass, Run
from elasticrun.core.netcheck_slow import Paces
from elasticrun.core.netcheck_terms import Rate, Verdict, others
from elasticrun.core.netcheck_trials import (
    FailedGroup,
    Failure,
    Trial,
    convicted,
    doubt,
    strongly_suspect,
    telling,
)
from elasticrun.wire.messages import Probed

MAX_PASSES = 8
"""Passes of one check. Two decide nearly every case and five the worst of two faults at once; more
help only where most of the nodes are bad, and each may last as long as a hung probe's limit."""


class Check:
    """What is found out about the nodes that are ready, some of which must be probed."""

    def __init__(
        self, ready: Mapping[str, bool], ranks: Mapping[str, int], paces: Paces, now: float
    ) -> None:
        """`ready`: in order of placement, and whether it is good already. `ranks`: on each node,
        one where it is not told."""
        self.trials = {
            node: Trial(node, place, good) for place, (node, good) in enumerate(ready.items())
        }
        self.passes = 0
        self.verdicts: list[Verdict] = []
        self.rates: dict[str, Rate] = {}  # of the last all_reduce of each node
        self._ranks = ranks
        self.paces = paces
        self._began = now
        self._failed: list[FailedGroup] = []  # in all passes
        self._just_failed: list[FailedGroup] = []  # in the last one
        self._proved: set[frozenset[str]] = set()  # pairs that have worked with each other
        self._found: dict[str, list[str]] = {}  # nodes, by kind of verdict

    def plan(self) -> list[Nodes]:
        """The groups of the next pass; none if the check is over."""
        if self.passes == MAX_PASSES:
            return []
        if self.passes == 0:
            groups = first_pass(self.trials)
        else:
            groups = later_pass(self.trials, self._just_failed, self.paces.again)
        self.passes += bool(groups)
        return groups

    def took(self, passed: Pass) -> None:
        """A pass is over: what it proves."""
        self._just_failed = []
        worked = [run.group.nodes for run in passed.runs if self._took(run)]
        self._failed += self._just_failed
        doubt(self._failed, self.trials)
        for trial in self._open():
            if convicted(telling(trial, self.trials), self._proved):
                self._convict(trial)
        said = [answer for run in passed.runs for answer in run.said.items()]
        computed = {node: answer.compute for node, answer in said if answer.compute > 0}
        self.paces.judge(self.trials, worked, computed)
        for node, evidence in self.paces.slow.items():
            self.trials[node].told_slow = True
            self._tell("slow", node, words.cut(f"{node} is slow, measured twice: {evidence}"))

    def end(self) -> list[str]:
        """Nothing more can be tried: who is to blame, or cannot be told from who is. The nodes that
        have not passed."""
        doubtful = [it for it in self._open() if strongly_suspect(it, self.trials)]
        for trial in doubtful:
            self._convict(trial)
        present = [it for it in self.trials.values() if not it.out]
        left = self._open()
        if len(present) == 1 and present[0].alone:
            return []
        for trial in left:
            self._tell("unresolved", trial.node, words.unresolved(trial, self.trials))
        return [trial.node for trial in left]

    def lost(self, node: str) -> None:
        """The node has gone: it is no partner any more, and nothing is said of it."""
        trial = self.trials.get(node)
        if trial is not None and not trial.out:
            trial.out = True
            self._found.setdefault("lost", []).append(node)

    def forget(self, node: str) -> None:
        """It is suspected for some other reason: it must pass once more."""
        trial = self.trials.get(node)
        if trial is not None:
            trial.good = trial.fresh = trial.alone = False

    def summary(self, now: float) -> str:
        """What it found, in a sentence."""
        took = now - self._began
        return words.outcome(self.trials, self._found, self._failed, self.passes, took)

    # ------------------------------------------------------------ small change

    def _open(self) -> list[Trial]:
        return [one for one in self.trials.values() if not one.good and not one.out]

    def _took(self, run: Run) -> bool:
        """One group's answers; whether all of it worked."""
        nodes = run.group.nodes
        own: dict[str, Probed] = {}
        joint: dict[str, Probed] = {}
        for node, said in run.said.items():
            if said.compute > 0:
                self.trials[node].compute.append(said.compute)
            if not said.ok and (said.own or len(nodes) == 1):
                own[node] = said
            elif not said.ok and not said.excused:
                joint[node] = said
            self.trials[node].held_up = said.reason if said.excused else ""
        self._time(run)
        for node, said in own.items():
            self.trials[node].failed(Failure((), said.phase, said.reason))
        if own:
            return False
        if joint and not run.lost:
            self._failed_together(nodes, joint)
            return False
        fine = [node for node, said in run.said.items() if said.ok]
        for node in fine if run.lost or len(fine) == len(nodes) else ():
            self.trials[node].passed(others(nodes, node))
        if len(fine) < len(nodes):
            return False
        self._proved.update(frozenset((a, b)) for a in nodes for b in nodes if a < b)
        return True

    def _failed_together(self, nodes: Nodes, joint: Mapping[str, Probed]) -> None:
        first = next(iter(joint.values()))
        for node in nodes:
            said = joint.get(node, first)
            self.trials[node].failed(Failure(others(nodes, node), said.phase, said.reason))
        told = Failure(nodes, first.phase, first.reason)
        self._just_failed.append(FailedGroup(nodes, told))

    def _time(self, run: Run) -> None:
        """The largest all_reduce of this group, by whoever timed it the shortest: the others have
        waited for that one before it began."""
        nodes = run.group.nodes
        ranks = sum(self._ranks.get(one, 1) for one in nodes)
        timed = {
            node: max(said.transfers, key=lambda one: one.size)
            for node, said in run.said.items()
            if said.ok and any(one.size > 0 for one in said.transfers)
        }
        least = min((one.seconds for one in timed.values()), default=0.0)
        if ranks < 2 or least <= 0:
            return
        for node, one in timed.items():
            rate = Rate(one.size, least, ranks, others(nodes, node))
            self.rates[node] = rate
            if rate.partners:
                self.trials[node].rates.append(rate)

    def _convict(self, trial: Trial) -> None:
        trial.out = True
        self._tell("failed", trial.node, words.failed(trial, self.trials))

    def _tell(self, kind: str, node: str, reason: str) -> None:
        self._found.setdefault(kind, []).append(node)
        self.verdicts.append(Verdict(node, kind, reason))
