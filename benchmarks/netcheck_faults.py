"""Counts which injected faults the network check finds: all single and double faults, or a sample.

    python benchmarks/netcheck_faults.py [--quick]

The real decisions (core/health/netcheck.py) on simulated probes; no process runs. Tables are
Markdown.

Faults: `compute`: the node's own part fails; `silent`: its agent never answers; `comm` and `hang`:
it fails with any partner, at once or at the probe's time limit; `link`: two good nodes fail with
each other; `slow-compute` and `slow-comm`: that part takes three times as long.

A fault counts as found if the node was convicted ("failed", or "slow"). A bad link is not a node's
fault, and no node may be convicted for it; a node with two bad links counts as bad. Cases that no
rule can distinguish are excluded from "decidable" (see `decidable`) and must convict no node.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from elasticrun.core.health.netcheck import NetCheck, ProbeGroup
from elasticrun.core.health.speed import outliers
from elasticrun.wire.messages import CheckSpec, Probed, ProbePhase, Transfer

OWN = ("compute", "silent")
TOGETHER = ("comm", "hang")
SLOW = ("slow-compute", "slow-comm")
KINDS = (*OWN, *TOGETHER, "link", *SLOW)

MATMUL = 0.010
"""Seconds of one matmul on a healthy node."""

SIZE = 1 << 20
"""Bytes of the all_reduce."""

BANDWIDTH = 2.5e9
"""Bytes per second of a healthy link."""

SLOWER = 3.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault injected into a node; for a bad link also the other node."""

    kind: str
    node: str
    other: str = ""


@dataclass(slots=True)
class Outcome:
    """The result of a whole check."""

    failed: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)
    unresolved: set[str] = field(default_factory=set)
    passes: int = 0
    groups: list[list[ProbeGroup]] = field(default_factory=list)  # by pass
    reasons: dict[str, str] = field(default_factory=dict)
    summary: str = ""


class Machines:
    """Nodes with faults, and the measurements of their probes."""

    def __init__(self, faults: Iterable[Fault], noise: float = 0.0, seed: int = 0) -> None:
        """`noise`: the maximum fraction by which each time differs, in either direction."""
        self._of: dict[str, set[str]] = {}
        self._links: set[frozenset[str]] = set()
        for fault in faults:
            if fault.kind == "link":
                self._links.add(frozenset((fault.node, fault.other)))
            else:
                self._of.setdefault(fault.node, set()).add(fault.kind)
        self._noise = noise
        self._chance = random.Random(seed)

    def has(self, node: str, *kinds: str) -> bool:
        """Whether the node has one of these faults."""
        return not self._of.get(node, set()).isdisjoint(kinds)

    def probe(self, group: ProbeGroup) -> dict[str, Probed]:
        """The answers of the group's nodes, without silent ones."""
        nodes = group.nodes
        own = [node for node in nodes if self.has(node, *OWN)]
        pairs = {frozenset(pair) for pair in itertools.combinations(nodes, 2)}
        links = bool(self._links) and not self._links.isdisjoint(pairs)
        bad = len(nodes) > 1 and (links or any(self.has(node, *TOGETHER) for node in nodes))
        slow = any(self.has(node, "slow-comm") for node in nodes)
        took = SIZE / BANDWIDTH * 2 * (len(nodes) - 1) / len(nodes) * (SLOWER if slow else 1.0)
        took *= self._jitter()
        answers = {}
        for node in nodes:
            if self.has(node, "silent"):
                continue
            phase, reason = ProbePhase.DONE, ""
            if node in own:
                phase, reason = ProbePhase.COMPUTE, "computed a wrong result"
            elif own:
                phase, reason = ProbePhase.MEET, f"{own[0]} said that it had failed"
            elif bad:
                phase, reason = ProbePhase.COMM, "no end after 60 s (limit 60 s)"
            done = phase is ProbePhase.DONE and len(nodes) > 1
            answers[node] = Probed(
                check=group.check,
                ok=not reason,
                phase=phase,
                own=node in own,
                excused=bool(own) and node not in own,
                reason=reason,
                compute=0.0 if node in own else self._compute(node),
                flops=2.0 * 512**3,
                transfers=(Transfer(SIZE, took),) if done else (),
                seconds=1.0,
                timed=0.5,
            )
        return answers

    def _compute(self, node: str) -> float:
        return MATMUL * (SLOWER if self.has(node, "slow-compute") else 1.0) * self._jitter()

    def _jitter(self) -> float:
        return 1.0 + self._chance.uniform(-self._noise, self._noise) if self._noise else 1.0

    def begin_pass(self) -> None:
        """Called before the probes of each pass."""


class Restless(Machines):
    """Nodes whose matmuls vary from one to the next by 30 %, from node to node by 10 %, and for all
    nodes together from pass to pass by a factor of two (each as the standard deviation of the
    logarithm)."""

    def __init__(self, count: int, faults: Iterable[Fault], slower: float, seed: int) -> None:
        super().__init__(faults, seed=seed)
        self._slower = slower
        self._node = {node: self._around(0.1) for node in names(count)}
        self._all = 1.0

    def begin_pass(self) -> None:
        self._all = self._around(0.7)

    def _compute(self, node: str) -> float:
        took = MATMUL * self._node[node] * self._all * self._around(0.3)
        return took * (self._slower if self.has(node, "slow-compute") else 1.0)

    def _around(self, spread: float) -> float:
        return math.exp(self._chance.gauss(0.0, spread))


def names(count: int) -> list[str]:
    """The names of this many nodes."""
    return [f"n{at}" for at in range(count)]


def new() -> NetCheck:
    """The network check of a job that knows no nodes yet."""
    serial = itertools.count()
    return NetCheck(CheckSpec(network=True), lambda: f"check-{next(serial)}")


def check(count: int, machines: Machines) -> Outcome:
    """The outcome of one whole check of this many new nodes."""
    return drive(new(), names(count), machines, 0.0)


def drive(
    netcheck: NetCheck,
    ready: Sequence[str],
    machines: Machines,
    now: float,
    outcome: Outcome | None = None,
) -> Outcome:
    """Run a check to its end with simulated answers. Adds to `outcome`, if given, and returns
    it."""
    outcome = outcome or Outcome()
    groups = list(netcheck.start(ready, now))
    while groups:
        outcome.passes += 1
        outcome.groups.append(groups)
        machines.begin_pass()
        now += 1.0
        said = [answer for group in groups for answer in machines.probe(group).items()]
        groups = []
        for node, answer in said:
            netcheck.answered(node, answer, now)
            groups += netcheck.proceed(now)
        while not groups and netcheck.is_busy:
            now = max(now, netcheck.next_deadline() or now)
            groups += netcheck.proceed(now)
        for verdict in netcheck.take_verdicts():
            getattr(outcome, verdict.kind).add(verdict.node)
            outcome.reasons[verdict.node] = verdict.reason
    outcome.summary = netcheck.summary()
    return outcome


# ---------------------------------------------------------------- what is decidable


def guilty(faults: Sequence[Fault]) -> set[str]:
    """The nodes that may be convicted as failed: those with such a fault, or with two bad links."""
    nodes = {one.node for one in faults if one.kind in (*OWN, *TOGETHER)}
    ends = [end for one in faults if one.kind == "link" for end in (one.node, one.other)]
    return nodes | {node for node in ends if ends.count(node) > 1}


def decidable(count: int, fault: Fault, faults: Sequence[Fault]) -> bool:
    """Whether the probes can distinguish this fault from others.

    `comm`, `hang`: only if two good nodes with a good link between them remain for comparison (so
    never with two nodes). `slow-compute`: only if it stands out from the ideal figures of all
    others, and has a partner with which it works. `slow-comm`: never with fewer than four nodes,
    which are one group; with another fault only from six nodes on, and two such nodes only from
    eight on, where fewer than half of the groups are slow. A link: never, because there is no node
    to convict."""
    broken = {one.node for one in faults if one.kind in (*OWN, *TOGETHER)}
    sound = [node for node in names(count) if node not in broken]
    links = {frozenset((one.node, one.other)) for one in faults if one.kind == "link"}
    if fault.kind in OWN:
        return True
    if fault.kind in TOGETHER:
        return any(frozenset(pair) not in links for pair in itertools.combinations(sound, 2))
    if fault.kind == "link" or fault.node in broken:
        return False
    if not any(other != fault.node and {other, fault.node} not in links for other in sound):
        return False
    if fault.kind == "slow-comm":
        slow = sum(one.kind == "slow-comm" for one in faults)
        return count >= (8 if slow > 1 else 6 if len(faults) > 1 else 4)
    slow_ones = {one.node for one in faults if one.kind == "slow-compute"}
    untimed = {one.node for one in faults if one.kind in OWN}
    timed = [node for node in names(count) if node not in untimed]
    values = [SLOWER if node in slow_ones else 1.0 for node in timed]
    return timed.index(fault.node) in outliers(values, CheckSpec().slow_ratio)


# ---------------------------------------------------------------- tables


def single(count: int, kind: str) -> Iterator[tuple[Fault]]:
    """Every single fault of this kind; none on a lone node that needs a partner."""
    nodes = names(count)
    if kind == "link":
        yield from ((Fault(kind, *ends),) for ends in itertools.combinations(nodes, 2))
    elif count > 1 or kind in OWN:
        yield from ((Fault(kind, node),) for node in nodes)


def double(count: int, kinds: Sequence[str] = KINDS) -> Iterator[tuple[Fault, Fault]]:
    """Every pair of faults, except two of the same node."""
    singles = [fault for kind in kinds for (fault,) in single(count, kind)]
    for one, other in itertools.combinations(singles, 2):
        if one.node != other.node or "link" in (one.kind, other.kind):
            yield one, other


@dataclass(slots=True)
class Tally:
    """Counts over many checks of one size."""

    injected: int = 0
    decidable: int = 0
    found: int = 0
    misjudged: int = 0  # good nodes that were convicted
    # checks in which a decidable fault was not found, or a good node was convicted
    missed: list[tuple[int, tuple[Fault, ...]]] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)

    def add(self, count: int, faults: tuple[Fault, ...]) -> None:
        """Inject these faults, run the check, and count the result."""
        outcome = check(count, Machines(faults))
        reported = outcome.failed | outcome.slow
        must_be = {one.node for one in faults if decidable(count, one, faults)}
        slow = {one.node for one in faults if one.kind in SLOW}
        misjudged = (outcome.failed - guilty(faults)) | (outcome.slow - slow)
        self.injected += len(faults)
        self.decidable += len(must_be)
        self.found += len(must_be & reported)
        self.misjudged += len(misjudged)
        self.passes.append(outcome.passes)
        if misjudged or must_be - reported:
            self.missed.append((count, faults))

    def row(self, *head: object) -> str:
        """The line of the table; `head`: its first cells."""
        cells = [*head, self.injected, self.decidable, self.found, self.misjudged]
        median = statistics.median_low(self.passes) if self.passes else "-"
        cells.append(f"{median}, {max(self.passes, default='-')}")
        return "| " + " | ".join(str(cell) for cell in cells) + " |"


def sampled(
    everything: Iterable[tuple[Fault, ...]], most: int, chance: random.Random
) -> list[tuple[Fault, ...]]:
    """All of these, or if there are more than `most`, a random sample of that size."""
    listed = list(everything)
    return listed if len(listed) <= most else chance.sample(listed, most)


SIZES = (1, 2, 3, 4, 5, 8, 16, 32, 64, 1000)

MAX_SINGLE = 1500
"""Maximum number of checks per row of the table of single faults; beyond it, a random sample."""

NODES_OF_DOUBLES = 40_000
"""Total number of nodes in the checks of one row of the table of double faults, which determines
the number of checks."""

HEAD = """
| nodes | checks | planted | decidable | found | good ones convicted | passes (median, worst) |
|---|---|---|---|---|---|---|"""

LINKS = """
| nodes | bad links | tried | named | convicted | passes (median, worst) |
|---|---|---|---|---|---|"""


def table(
    count: int, everything: Iterable[tuple[Fault, ...]], most: int, chance: random.Random
) -> tuple[str, Tally]:
    """Check these faults, or a sample of `most`. Returns the row, and its tally."""
    tally = Tally()
    listed = sampled(everything, most, chance)
    for faults in listed:
        tally.add(count, faults)
    return tally.row(count, len(listed)), tally


def links(count: int, most: int, chance: random.Random) -> tuple[str, int]:
    """Check single bad links. Returns the row, and how often a node was convicted or a probed bad
    link was not named."""
    tried, named, misjudged, passes = 0, 0, 0, []
    listed = sampled(single(count, "link"), most, chance)
    for (fault,) in listed:
        outcome = check(count, Machines((fault,)))
        ends = {fault.node, fault.other}
        groups = [group for one in outcome.groups for group in one]
        reported = [outcome.summary, *outcome.reasons.values()]
        tried += any(ends <= set(group.nodes) for group in groups)
        named += any(fault.node in one and fault.other in one for one in reported)
        misjudged += len(outcome.failed | outcome.slow)
        passes.append(outcome.passes)
    cells = [count, len(listed), tried, named, misjudged]
    worst = f"{statistics.median_low(passes)}, {max(passes)}"
    row = "| " + " | ".join(str(cell) for cell in [*cells, worst]) + " |"
    return row, misjudged + tried - named


def noisy(seeds: int) -> tuple[int, int]:
    """Run checks of two to eight healthy nodes whose times differ by up to 20 % in either
    direction. Returns their number, and how many nodes they found slow."""
    slow = 0
    for seed in range(seeds):
        slow += len(check(2 + seed % 7, Machines((), noise=0.2, seed=seed)).slow)
    return seeds, slow


def restless(count: int, seeds: int) -> tuple[int, int]:
    """Run checks of this many `Restless` nodes. Returns in how many a node that takes ten times as
    long is found, and in how many a node is found slow although none is."""
    found = misjudged = 0
    for seed in range(seeds):
        faults = (Fault("slow-compute", "n1"),)
        found += "n1" in check(count, Restless(count, faults, 10.0, seed)).slow
        misjudged += bool(check(count, Restless(count, (), 1.0, seed)).slow)
    return found, misjudged


def random_pairs(count: int, most: int, chance: random.Random) -> Iterator[tuple[Fault, ...]]:
    """Random double faults, for sizes at which listing all would take too long."""
    for _ in range(most):
        one, other, *ends = chance.sample(names(count), 4)
        first, second = chance.choice(KINDS), chance.choice(KINDS)
        yield (
            Fault(first, one, ends[0] if first == "link" else ""),
            Fault(second, other, ends[1] if second == "link" else ""),
        )


def cost(count: int) -> tuple[float, int]:
    """CPU seconds of a check of this many nodes, two bad ones in one pair, without the time of the
    simulated probes; and its number of passes."""
    machines = Machines((Fault("comm", "n0"), Fault("comm", "n1")))
    netcheck = new()
    spent, passes = 0.0, 0
    began = time.process_time()
    groups = netcheck.start(names(count), 0.0)
    spent += time.process_time() - began
    while groups:
        passes += 1
        said = [answer for group in groups for answer in machines.probe(group).items()]
        began = time.process_time()
        groups = ()
        for node, answer in said:
            netcheck.answered(node, answer, 1.0)
            groups += netcheck.proceed(1.0)
        spent += time.process_time() - began
    return spent, passes


def main() -> int:
    """Print the tables. Returns 1 if a decidable fault was not found, or a good node was
    convicted."""
    parser = argparse.ArgumentParser(description="Planted faults and what the check finds.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the checks")
    part = 10 if parser.parse_args().quick else 1
    chance = random.Random(4)
    bad = 0
    print("One bad or slow node: each fault on every one (a sample where there are more).")
    print(HEAD)
    for count in SIZES:
        kinds = [single(count, kind) for kind in KINDS if kind != "link"]
        most = (MAX_SINGLE if count < 1000 else 60) // part
        row, tally = table(count, itertools.chain(*kinds), most, chance)
        print(row, flush=True)
        bad += len(tally.missed)
    print("\nOne bad link: every one (a sample where there are more); most are never tried.")
    print(LINKS)
    for count in SIZES[1:]:
        row, wrong = links(count, (600 if count < 1000 else 60) // part, chance)
        print(row, flush=True)
        bad += wrong
    print("\nTwo faults of any kind: every two (a sample where there are more).")
    print(HEAD)
    for count in SIZES[1:]:
        most = NODES_OF_DOUBLES // count // part
        pairs = double(count) if count <= 16 else random_pairs(count, most, chance)
        row, tally = table(count, pairs, most, chance)
        print(row, flush=True)
        bad += len(tally.missed)
    seeds, slow = noisy(1000 // part)
    spent, passes = cost(10_000)
    print(
        f"\nNoise of +-20 %: {seeds} checks of 2 to 8 healthy nodes called {slow} nodes slow.\n"
        f"10,000 nodes, two bad ones in one pair: {passes} passes, {spent:.2f} s of CPU."
    )
    print("Matmuls that vary by 30 %, and from pass to pass by a factor of two, for all nodes:")
    for count in (2, 3, 4, 8, 64):
        seeds = (4000 if count < 10 else 1000) // part
        found, misjudged = restless(count, seeds)
        print(
            f"{count} nodes: one that is ten times as slow found in {found / seeds:.1%} of "
            f"{seeds} checks; one called slow where none is in {misjudged / seeds:.1%}"
        )
    return int(bad + slow > 0)


if __name__ == "__main__":
    raise SystemExit(main())
