"""A world in which everything goes wrong, drawn from a seed, and what must hold nevertheless.

After every event:
* at most one round steps at a time, and never an earlier one again (`ranks`);
* no rank lives twice in a round; the ranks of a round are 0 .. world size - 1, all there;
* of the restart budget no more is spent than there was, at most one restart a round, and none for
  anything but a rank or a fork server that failed by itself: the loss of a node is free;
* every node that waits has a reason, and the master a deadline by which the wait ends;
* with the network check: no node that is excluded is taken in;
* a record says what it was made of when it is read, and a master that has it forgets no charge.
Masters die between any two of their acts, and are followed by others with their record, with an
older one, or without.
At the end, when the faults are over, the job must be running or over: nobody may hang.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from msgspec.structs import replace

from elasticrun.config import RECALL_LIMIT
from elasticrun.core.events import Attached, Heard, JobEvent
from elasticrun.core.persisted import Facts
from elasticrun.wire.messages import Beat, CheckSpec, JobSpec, Start
from elasticrun.wire.types import RoundName, dumps, loads
from tests.simulator.master import Master
from tests.simulator.node import Node, NodeSetup
from tests.simulator.script import DEFAULT_SPEC
from tests.simulator.world import Doom, World

EXCLUDED_FOR = 10.0
"""Seconds for which a node is excluded here."""

PEACE = 120.0
"""Seconds without faults at the end, in which the job must come to rest: longer than every
deadline of the jobs drawn here."""


@dataclass(frozen=True, slots=True)
class Findings:
    seed: int
    faults: tuple[str, ...]
    rounds: int
    outcome: str
    events: int
    lines: tuple[str, ...]


class Chaos:
    def __init__(self, seed: int, *, duration: float = 60.0, checks: bool = False) -> None:
        """`checks`: nodes are probed, report their steps, and turn bad, slow and well again."""
        self.seed = seed
        self.checks = checks
        self.rng = random.Random(seed)
        self.duration = duration
        self.recovers = seed % 3 == 0
        self.peace = PEACE + (4 * RECALL_LIMIT if self.recovers else 0.0)
        self.spec = self._draw_spec()
        self.world = World(
            delay=self._delay,
            peer_delay=self.rng.choice([None, 0.003, 0.05, 2.0]),
            ping_timeout=self.rng.choice([2.0, 4.0]),
            record_delay=self._record_delay,
            tells_silence=seed % 2 == 0,  # a real master may not know it
            beats=True,
            steps=checks,
        )
        self.slow_disk = self.rng.choice([0.0, 0.005, 0.5])
        self.world.says_twice = lambda: self.rng.random() < 0.05
        self.world.on_record = self._check_record
        self.world.on_master_death = lambda: self._later(self._new_master)
        self.world.check = self._check_master
        self.world.records = []
        self.terms = 1
        self.record = "newest"  # what the next master is given
        self.remembers = True  # the present one was given the newest
        self.known = True  # an agent of an earlier master has found the present one, or its record
        self.faults: list[str] = []
        self.events = 0
        self.starts: dict[RoundName, dict[str, Start]] = {}
        self.counts: dict[int, int] = {}
        self.recorded = 0  # restarts charged, in the newest record
        self.own_failures = 0  # ranks and fork servers that were made to fail
        self.world.on_order = self._check_order

    def _draw_spec(self) -> JobSpec:
        rng = self.rng
        checks = CheckSpec()
        if self.checks:
            stragglers = rng.random() < 0.5
            checks = CheckSpec(
                network=True,
                perf=rng.random() < 0.3,
                exclude_stragglers=stragglers,
                slow_for=2.0,
                probe_limit=rng.choice([1.0, 5.0]),
                exclude_for=EXCLUDED_FOR,
            )
        unit = rng.choice([1, 1, 1, 2])
        low = rng.randint(1, 3) * unit
        high = low + rng.randint(0, 3) * unit
        return replace(
            DEFAULT_SPEC,
            min_nodes=low,
            max_nodes=high,
            node_unit=unit,
            max_restarts=rng.choice([0, 2, 1000]),
            restart_backoff=rng.choice([0.0, 2.0]),
            join_timeout=60.0,
            last_call_timeout=rng.choice([0.0, 1.0, 5.0]),
            grow=rng.choice(["auto", "now"]),
            grow_cooldown=20.0,
            restart_grace=rng.choice([0.0, 1.0, 5.0]),
            master_lost_timeout=20.0,
            checks=checks,
        )

    def _delay(self) -> float:
        return self.rng.choice([0.0005, 0.001, 0.005, 0.05])

    def _record_delay(self) -> float:
        return self.rng.random() * self.slow_disk

    # ------------------------------------------------------------ running

    def run(self) -> Findings:
        world, rng = self.world, self.rng
        world.start_master(self.spec, self.terms)
        for index in range(self.spec.max_nodes + rng.randint(0, 2)):
            self._schedule_start(f"n{index}", rng.choice([0.0, rng.uniform(0, 5)]))
        when = 3.0
        while when < self.duration:
            when += rng.expovariate(0.4)
            world.clock.at(when, self._strike)
        world.run_until(self.duration)
        self._make_peace()
        world.run_until(self.duration + self.peace)
        if not world.worlds.stepping:  # a node whose bar has ended may be let in just now
            world.run_until(world.clock.now + 10.0)
        self._check_rest()
        self.faults.extend(world.worlds.faults)
        outcome = "" if world.over is None else world.over.reason
        rounds = len(world.worlds.began)
        return Findings(
            self.seed, tuple(self.faults), rounds, outcome, self.events, tuple(world.lines)
        )

    def _schedule_start(self, name: str, delay: float) -> None:
        setup = NodeSetup(
            name,
            self.spec,
            nproc=1 + sum(map(ord, name)) % 3,
            first_store=self.rng.choice([0.1, 1.0, 3.0]),
            term=self.rng.choice([0.0, 0.0, 0.0, 3.0]),
            shutdown_timeout=2.0,
            leaves=self._leaves(name),
        )

        def start() -> None:
            if not self.newcomers_may_come():
                self.world.clock.after(0.5, start)
                return
            old = self.world.nodes.get(name)
            if old is None or not old.alive:
                self.world.start_node(setup, memory=self._memory_survives())

        self.world.clock.after(delay, start)

    def _leaves(self, name: str) -> float | None:
        """Whether the ranks of a node are recoverable, and how long they take to leave a round: at
        once, as others die, as long as they may, or longer. Not drawn, so the other seeds stay."""
        if not self.recovers:
            return None
        return (0.003, 0.5, 10.0, 29.9, 100.0)[(self.seed // 3 + sum(map(ord, name))) % 5]

    def _memory_survives(self) -> bool:
        """Whether the next agent of a node finds what a killed one had in memory."""
        return False

    def _strike(self) -> None:
        world, rng = self.world, self.rng
        nodes = [node for node in world.nodes.values() if node.alive]
        if not nodes or world.over is not None:
            return
        node = rng.choice(nodes)
        kind = rng.choice(STRIKES + BLIGHTS if self.checks else STRIKES)
        world.trace("*", f"{kind} {node.name}")
        if kind in ("kill", "vanish"):
            node.kill() if kind == "kill" else node.vanish()
            self._schedule_start(node.name, rng.choice([0.1, 2.0, 15.0]))
        elif kind == "rank":
            self._rank_fails(node)
        elif kind == "cut":
            world.cut(node)
            self._later(lambda: setattr(node, "cut", False))
        elif kind == "break":
            world.break_stream(node)
        elif kind == "fuse" and node.stream is not None:
            node.stream.fuse = rng.randint(1, 6)
        elif kind == "repeat":
            node.repeat()
        elif kind == "freeze" and not node.frozen:
            node.freeze()
            self._later(node.thaw)
        elif kind == "spawner" and not node.frozen:
            self.own_failures += 1
            node.lose_spawner()
        elif kind == "store":
            node.lose_store()
        elif kind == "signal":
            node.signal(15, "SIGTERM", death=True)
            self._schedule_start(node.name, rng.choice([5.0, 15.0]))
        elif kind == "stall":
            world.stall_master(rng.choice([0.5, 3.0, 8.0]))
        elif kind == "master" and world.master is not None and not world.master.stalled:
            self.record = rng.choice(["newest", "newest", "newest", "none", "older"])
            if rng.random() < 0.5:
                world.kill_master()
            else:
                world.doom = Doom(number=world.acts + rng.randint(1, 12), after=rng.random() < 0.5)
        elif kind in BLIGHTS:
            self._blight(kind, node)
        elif kind == "newcomer":
            self._schedule_start(f"x{rng.randint(0, 3)}", 0.0)

    def _blight(self, kind: str, node: Node) -> None:
        bench = self.world.bench
        if kind == "slow":
            bench.slow[node.name] = 3.0
        else:
            other = self.rng.choice(list(self.world.nodes))
            bench.plant(node.name, kind, other if kind == "link" and other != node.name else "")

    def _rank_fails(self, node: Node) -> None:
        living = [rank for rank in node.ranks.values() if rank.alive]
        if living:
            self.own_failures += 1
            rank = self.rng.choice(living)
            code, text = self.rng.choice(
                [(1, "ValueError"), (-11, ""), (1, "connection reset by peer")]
            )
            node.end_rank(rank, code, text)

    def _later(self, what: object) -> None:
        assert callable(what)
        self.world.clock.after(self.rng.choice([0.3, 4.0, 12.0]), what)

    def _new_master(self) -> None:
        world = self.world
        if world.master is not None or world.over is not None:
            return
        facts = None
        if self.record == "newest":
            facts = world.durable
        elif self.record == "older" and world.records:
            # of the same round: one that knows of no later round is believed, and a node that runs
            # that one and cannot be heard is as unknown as without a record
            last = world.records[-1].number
            facts = self.rng.choice([one for one in world.records[-5:] if one.number == last])
            self.own_failures += 1  # it may not know why a round was ended, and blame an echo
        self.terms += 1
        self.known = self.remembers = self.record == "newest"
        if not self.known:
            for node in self._old_and_new()[1]:
                node.kill()
                self._schedule_start(node.name, 3.0)
        world.start_master(self.spec, self.terms, facts)

    def newcomers_may_come(self) -> bool:
        """A successor without its record that only new agents have found cannot know that a round
        runs (`rendezvous`): here they come when an old one has found it, or none is left."""
        return self.known or not self._old_and_new()[0]

    def _old_and_new(self) -> tuple[list[Node], list[Node]]:
        """The living agents: those that have obeyed a master, and the others."""
        alive = [node for node in self.world.nodes.values() if node.alive]
        old = [node for node in alive if node.group.term]
        return old, [node for node in alive if not node.group.term]

    def _make_peace(self) -> None:
        """No fault any more; whoever is missing comes back."""
        self.world.trace("*", "peace")
        self.world.doom = None
        self.world.bench.heal()
        for node in list(self.world.nodes.values()):
            node.cut = False
            if node.frozen:
                node.thaw()
        self._new_master()
        for index in range(self.spec.max_nodes):
            self._schedule_start(f"n{index}", 1.0)
            if self.checks:  # who was excluded may come back then
                self._schedule_start(f"n{index}", EXCLUDED_FOR + 5.0)

    # ------------------------------------------------------------ what must hold

    def _fault(self, text: str) -> None:
        self.faults.append(f"{self.world.clock.now:.3f}: {text}")

    def _check_order(self, node: Node, order: object) -> None:
        """Places that were given out are one world."""
        if not isinstance(order, Start):
            return
        places = self.starts.setdefault(order.round, {})
        known = places.setdefault(node.incarnation, order)
        if known != order:
            self._fault(f"{node.name} was given two places in round {order.round}")
        taken: dict[int, str] = {}
        for life, start in places.items():
            size = next(n.setup.nproc for n in self.world.lives if n.incarnation == life)
            for rank in range(start.first_rank, start.first_rank + size):
                if rank in taken or not 0 <= rank < start.info.world_size:
                    self._fault(f"rank {rank} of round {order.round} is given out wrongly")
                taken[rank] = life
        if len(places) == order.group_world_size and len(taken) != order.info.world_size:
            self._fault(f"round {order.round} has {len(taken)} of {order.info.world_size} ranks")

    def _check_master(self, master: Master, event: JobEvent) -> None:
        """The master's own picture, after every event but beats."""
        self.events += 1
        if isinstance(event, Attached) and event.hello.last_term:
            self.known = True
        if isinstance(event, Heard) and isinstance(event.report, Beat):
            return
        status = master.job.status()
        if status.round is not None and status.round.term == master.job.term:
            self._check_budget(status.round.number, status.restart_count)
        if status.phase == "ended" or isinstance(event, Attached):
            return
        for node in status.nodes:
            waits = (
                node.activity in ("joining", "at-the-door", "stopping") and node.state == "alive"
            )
            if waits and not node.reason and not status.reason:
                self._fault(f"{node.node} waits without a reason")
        refused = {one.node for one in status.excluded}
        for node in status.nodes:
            if node.node in refused and node.state == "alive":
                self._fault(f"{node.node} is excluded and was taken in")
        if status.nodes and status.phase != "running" and master.job.next_deadline() is None:
            self._fault(f"no deadline while {status.phase}: {status.reason}")

    def _check_record(self, facts: Facts) -> None:
        """What is written is what will be read."""
        if loads(dumps(facts), Facts) != facts:
            self._fault(f"a record that changes when it is read: {facts}")
        if self.remembers and facts.restarts.count < self.recorded:
            self._fault(f"{self.recorded} charges were recorded, now {facts.restarts.count}")
        self.recorded = facts.restarts.count
        self._check_budget(facts.number, facts.restarts.count)

    def _check_budget(self, number: int, count: int) -> None:
        if self.spec.max_restarts < count:
            self._fault(f"{count} restarts of {self.spec.max_restarts}")
        if count > self.own_failures:
            self._fault(f"{count} restarts charged for {self.own_failures} failures")
        before = [spent for known, spent in self.counts.items() if known < number]
        if before and count > max(before) + 1:
            self._fault(f"round {number} cost more than one restart: {max(before)} -> {count}")
        self.counts[number] = max(count, self.counts.get(number, 0))

    def _check_rest(self) -> None:
        """Nobody hangs: the job is over, or it runs, or too few nodes are left and it says so."""
        world = self.world
        if world.over is not None:
            if "no restarts left" in world.over.reason and not self.own_failures:
                self._fault(f"nothing failed and yet: {world.over.reason}")
            return
        if world.master is None:
            self._fault("there is no master")
            return
        status = world.master.job.status()
        if status.phase == "ended":
            return  # by a master that died before it could say so; every agent was told, or is gone
        if status.phase != "running":
            self._fault(f"at rest the job is {status.phase}: {status.reason}")
        elif len(world.worlds.stepping) != 1:
            self._fault(f"at rest {len(world.worlds.stepping)} rounds step")


BLIGHTS = ("compute", "comm", "hang", "link", "slow", "none", "none", "none")
STRIKES = (
    "kill", "kill", "vanish", "rank", "rank", "rank", "cut", "break", "fuse", "fuse", "freeze",
    "spawner", "store", "signal", "stall", "master", "master", "newcomer", "repeat",
)  # fmt: skip
