"""Chaos with training on top: ranks take snapshots, want checkpoints, and go on from memory.

What must hold of them stands in `memory`. Ranks are killed in the middle of their copies, disks
fill up or hang, bytes flip, and nodes that have the only copy of something are told to go.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from elasticrun.wire.messages import JobSpec, SaveSpec
from elasticrun.wire.types import RoundName
from tests.simulator.chaos import Chaos, Findings

STEP = 0.7
"""Seconds between two snapshots."""

PERSIST_EVERY = 3
"""Snapshots to one that is to be written out."""


class TrainingChaos(Chaos):
    def __init__(self, seed: int, *, duration: float = 60.0) -> None:
        super().__init__(seed, duration=duration)
        self.world.shelves.state = self.rng.choice(["ddp", "sharded"])
        self.world.shelves.slots = self.rng.choice([2, 2, 3])
        self.world.shelves.replicas = self.rng.random() < 0.5
        self.steps: dict[RoundName, int] = {}  # the newest of each round

    def _draw_spec(self) -> JobSpec:
        saves = SaveSpec(self.rng.random() < 0.7, self.rng.choice([3.0, 15.0]))
        return structs.replace(super()._draw_spec(), saves=saves)

    def run(self) -> Findings:
        self.world.clock.after(STEP, self._train)
        findings = super().run()
        self.world.shelves.settle()
        return replace(findings, faults=findings.faults + tuple(self.world.shelves.faults))

    def _train(self) -> None:
        """All ranks of the round that steps take a snapshot; now and then they die meanwhile."""
        world = self.world
        if world.over is None:
            world.clock.after(STEP, self._train)
        for name in tuple(world.worlds.stepping):
            restored = world.shelves.restores.get(name)
            step = self.steps.get(name, restored[1] if restored else 0) + 1
            self.steps[name] = step
            ranks = world.worlds.live[name].values()
            nodes = [n for n in world.nodes.values() if any(r in ranks for r in n.ranks.values())]
            dying = world.clock.now < self.duration and self.rng.random() < 0.1
            for node in nodes:
                if not node.frozen and not (dying and self.rng.random() < 0.5):
                    node.memory.commit(step, persist=step % PERSIST_EVERY == 0)
            if dying and nodes:
                world.trace("*", f"a rank dies in the middle of step {step}")
                self._rank_fails(self.rng.choice(nodes))

    def _memory_survives(self) -> bool:
        return self.rng.random() < 0.85

    def _strike(self) -> None:
        if self.rng.random() > 0.2:
            super()._strike()
            return
        if self.rng.random() < 0.3:
            self._strike_all()
            return
        node = self.rng.choice(list(self.world.nodes.values()))
        disk = self.rng.choice(["full", "stuck", "", "", "spoil"])
        self.world.trace("*", f"disk of {node.name}: {disk or 'well'}")
        if disk == "spoil":
            self.world.shelves.spoilt = True
            for one in node.memory.kept[-1:]:
                one.bad = True
        else:
            self.world.shelves.disks[node.name] = disk

    def _strike_all(self) -> None:
        """Every agent is killed at one moment, and the master with them, whose record goes too: a
        job of one node, or one that a scheduler ends by SIGKILL and starts again."""
        world = self.world
        if world.over is not None or world.master is None or world.master.stalled:
            return
        world.trace("*", "all agents and the master are killed")
        for node in world.nodes.values():
            if node.alive:
                node.kill()
                self._schedule_start(node.name, self.rng.choice([0.1, 0.1, 2.0]))
        self.record = "none"
        world.kill_master()

    def _make_peace(self) -> None:
        self.world.shelves.disks.clear()
        super()._make_peace()
