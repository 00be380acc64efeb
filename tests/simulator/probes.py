"""Probes and steps that are only numbers: what a machine with planted faults would measure.

A group of probes works out as the real one does: each does its own part first; when all have said
how that went they meet, if all are well, and reduce together. A fault of a machine shows in its own
part ("compute") or in whatever it does with others ("comm"; "hang": it takes until the limit), that
of a link where both its ends are in one group. A slow machine takes a multiple of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticrun.core.events import CallOffProbe, ProbeEnded, RunProbe
from elasticrun.wire.messages import Probe, Probed, ProbePhase, Steps, Transfer

if TYPE_CHECKING:
    from tests.simulator.node import Node
    from tests.simulator.world import World

OWN_PART = 0.15
"""Seconds from the order until a probe has done what it does alone."""

TOGETHER = 0.1
"""Seconds that meeting and reducing take."""

MATMUL = 0.01
FLOPS = 2.0 * 512**3
REDUCE = 0.002
SIZES = (1 << 20,)
PERF_SIZES = (1 << 20, 1 << 22, 1 << 24)

STEP = 0.1
"""Seconds of a training step on a machine that is well."""

SAVED = 0.002
"""Seconds of every step that saves take."""

REPORT_EVERY = 1.0
"""Seconds between two reports of steps."""

FAULTS = ("compute", "comm", "hang")


@dataclass(slots=True)
class Bench:
    """All probes of a world, and the faults that were planted in it."""

    faults: dict[str, str] = field(default_factory=dict)  # node -> one of FAULTS
    links: set[frozenset[str]] = field(default_factory=set)  # pairs that cannot talk
    slow: dict[str, float] = field(default_factory=dict)  # node -> times as long
    met: dict[str, dict[str, ProbeShell]] = field(default_factory=dict)  # check -> who is there
    over: dict[str, str] = field(default_factory=dict)  # check -> who said that it had failed

    def plant(self, node: str, what: str, other: str = "") -> None:
        """A fault of this machine, or of its link to the `other` one; "none" takes them away."""
        if what == "none":
            self.faults.pop(node, None)
            self.slow.pop(node, None)
            self.links = {pair for pair in self.links if node not in pair}
        elif what == "link":
            self.links.add(frozenset((node, other)))
        elif what in FAULTS:
            self.faults[node] = what
        else:
            raise ValueError(f"there is no fault {what}")

    def heal(self) -> None:
        self.faults.clear()
        self.links.clear()
        self.slow.clear()

    def factor(self, nodes: list[str]) -> float:
        """How many times as long the slowest of these takes."""
        return max((self.slow.get(node, 1.0) for node in nodes), default=1.0)

    def broken(self, nodes: list[str]) -> bool:
        """Whether these cannot reduce together."""
        pairs = (frozenset((a, b)) for a in nodes for b in nodes if a < b)
        return any(self.faults.get(n) == "comm" for n in nodes) or any(
            pair in self.links for pair in pairs
        )


class ProbeShell:
    """What the shell of one node does about RunProbe and CallOffProbe."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node
        self._order: Probe | None = None
        self._began = 0.0

    def perform(self, effect: RunProbe | CallOffProbe) -> None:
        if isinstance(effect, CallOffProbe):
            self._order = None
            return
        order = self._order = effect.order
        clock = self._world.clock
        self._began = clock.now
        factor = self._world.bench.factor([self._node.name])
        clock.after(OWN_PART * factor, lambda: self._own_part_done(order))
        late = f"it did not end within {order.limit:g} s"
        clock.after(order.limit, lambda: self._fail(order, ProbePhase.MEET, late))

    def lose_spawner(self) -> None:
        """Its processes are gone; the brain knows what to say."""
        self._order = None

    def _own_part_done(self, order: Probe) -> None:
        if order is not self._order or not self._node.alive:
            return
        if self._world.bench.faults.get(self._node.name) == "compute" and not order.perf:
            self._fail(order, ProbePhase.COMPUTE, "its matmul is wrong", own=True)
            self._end_group(order.check, f"{self._node.name} failed")
            return
        if order.check in self._world.bench.over:
            self._excuse(order.check, self._world.bench.over[order.check])
            return
        there = self._world.bench.met.setdefault(order.check, {})
        there[self._node.name] = self
        if len(there) == order.group_world_size:
            self._world.clock.after(TOGETHER, lambda: self._meet(order))

    def _end_group(self, check: str, reason: str) -> None:
        """This one has failed by itself: the others, now and later, need not try."""
        bench = self._world.bench
        bench.over[check] = reason
        for shell in tuple(bench.met.pop(check, {}).values()):
            shell._excuse(check, reason)

    def _excuse(self, check: str, reason: str) -> None:
        if self._order is not None and self._order.check == check:
            self._fail(self._order, ProbePhase.MEET, reason, excused=True)

    def _meet(self, order: Probe) -> None:
        """All have done their own part."""
        bench = self._world.bench
        there = bench.met.pop(order.check)
        names = sorted(there)
        if any(bench.faults.get(name) == "hang" for name in names):
            return  # until each one's limit
        gone = [name for name, shell in there.items() if not shell._is_in(order.check)]
        for shell in there.values():
            if not shell._is_in(order.check):
                continue
            assert shell._order is not None
            if gone or bench.broken(names):
                shell._fail(shell._order, ProbePhase.COMM, "its all_reduce failed")
            else:
                shell._pass(shell._order, bench.factor(names))

    def _is_in(self, check: str) -> bool:
        here = self._node.alive and not self._node.frozen
        return here and self._order is not None and self._order.check == check

    def _pass(self, order: Probe, slowest: float) -> None:
        sizes = PERF_SIZES if order.perf else SIZES
        alone = order.world_size == 1
        transfers = (Transfer(size, REDUCE * slowest * size / SIZES[0]) for size in sizes)
        self._end(order, ProbePhase.DONE, transfers=() if alone else tuple(transfers))

    def _fail(
        self,
        order: Probe,
        phase: ProbePhase,
        reason: str,
        *,
        own: bool = False,
        excused: bool = False,
    ) -> None:
        if order is self._order:
            self._end(order, phase, reason=reason, own=own, excused=excused)

    def _end(
        self,
        order: Probe,
        phase: ProbePhase,
        *,
        reason: str = "",
        own: bool = False,
        excused: bool = False,
        transfers: tuple[Transfer, ...] = (),
    ) -> None:
        self._order = None
        measured = phase is not ProbePhase.COMPUTE and not order.perf
        slow = self._world.bench.factor([self._node.name])
        seconds = self._world.clock.now - self._began
        result = Probed(
            check=order.check,
            ok=phase is ProbePhase.DONE,
            phase=phase,
            own=own,
            excused=excused,
            reason=reason,
            compute=MATMUL * slow if measured else 0.0,
            flops=FLOPS if measured else 0.0,
            transfers=transfers,
            seconds=seconds,
            timed=min(seconds, OWN_PART + TOGETHER),
        )
        self._node.feed(ProbeEnded(result))


def report_steps(world: World, node: Node) -> None:
    """Once a second, from now on: how long a step takes here, and how long it waits for others."""
    status = node.group.status()
    live = [rank for rank in node.ranks.values() if rank.alive]
    name = status.round
    if node.alive and not node.frozen and node.stream is not None and live and name is not None:
        others = [
            one.name
            for one in world.nodes.values()
            if any(rank.alive and rank.round == name for rank in one.ranks.values())
        ]
        own = STEP * world.bench.factor([node.name])
        seconds = STEP * world.bench.factor(others)
        steps = max(1, round(REPORT_EVERY / seconds))
        newest = round(world.clock.now / seconds)
        sums = (newest // 50, SAVED * newest * len(live), 0.1 * len(live))
        node.stream.report(Steps(name, newest, steps, seconds, own, seconds - own, *sums))
    if node.alive:
        world.clock.after(REPORT_EVERY, lambda: report_steps(world, node))
