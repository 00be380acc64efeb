"""Harm at random, from a seed: what is done to whom and when is decided before it happens, so that
a seed that fails can be read and tried again.

The script trains all the while (tests/scripts/counts.py). Whatever was done is undone in time:
nodes that were killed are started again, those that were stopped are woken. At the end the job must
be whole, end with success, and leave nothing.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from elasticrun.testing import processes
from elasticrun.testing.steps import World
from tests.counting import let_pass
from tests.faults.team import Node, Team
from tests.harness import Launched

NODES = 4
FEWEST = 2
"""A job of 2:4; no more than NODES - FEWEST nodes are away at a time."""

BETWEEN = (0.3, 2.5)
"""Seconds between two harms, at random."""

STEPS_OF_REST = 100
"""A world that did so many steps after the storm (some seconds) is the one that stays."""

KINDS = {
    "kill-rank": 4,
    "kill-node": 3,
    "kill-agent": 2,
    "stop-node": 2,
    "stop-agent": 1,
    "kill-fork-server": 1,
    "kill-master": 3,
    "blink": 2,
}
"""What can happen, and how often beside the others."""


@dataclass(frozen=True)
class Act:
    """One harm: after how many seconds, what, to which node (by place), for how long."""

    after: float
    kind: str
    place: int
    length: float

    def __str__(self) -> str:
        return f"+{self.after:.2f} s {self.kind} n{self.place} {self.length:.1f} s"


def schedule(seed: int, seconds: float) -> list[Act]:
    """What a seed does in so many seconds."""
    chance = random.Random(seed)
    acts: list[Act] = []
    spent = 0.0
    while spent < seconds:
        after = chance.uniform(*BETWEEN)
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        acts.append(Act(after, kind, chance.randrange(NODES), chance.uniform(0.5, 8.0)))
        spent += after
    return acts


@dataclass
class Chaos:
    """Carries out a schedule on a team of NODES nodes."""

    team: Team
    start_master: Callable[[], Launched]
    master: Launched
    places: list[Node]
    waking: list[tuple[float, Node]] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    lost: list[Node] = field(default_factory=list)

    def run(self, acts: list[Act]) -> None:
        """All of it; then everybody is awake and every place is taken."""
        for act in acts:
            self._until(time.monotonic() + act.after)
            self._replace_the_dead()
            done = self._do(act)
            self.story.append(f"{act}{'' if done else ' (left out: too few nodes)'}")
        self._until(max([time.monotonic(), *(when for when, _ in self.waking)]))
        self._replace_the_dead()

    def _until(self, when: float) -> None:
        """Let the time of the schedule pass; wake on the way those whose time has come."""
        self.waking.sort(key=lambda each: each[0])
        while self.waking and self.waking[0][0] <= when:
            due, node = self.waking.pop(0)
            let_pass(due - time.monotonic())
            self.team.thaw(node)
        let_pass(when - time.monotonic())

    def _replace_the_dead(self) -> None:
        """A node whose agent has ended, however, is started again under its name."""
        for place, node in enumerate(self.places):
            if node.agent.ended():
                self.lost.append(node)
                self.waking = [each for each in self.waking if each[1] is not node]
                self.places[place] = self.team.add(number=node.number)

    def _do(self, act: Act) -> bool:
        node = self.places[act.place]
        if act.kind == "kill-master":
            self.master.process.kill()
            self.master.process.wait()
            let_pass(act.length / 8)  # up to a second, as an agent that looks after it needs
            self.master = self.start_master()
            return True
        away = {each.name for _, each in self.waking}
        if node.name in away or len(away) >= NODES - FEWEST:
            return False
        with contextlib.suppress(psutil.Error, ProcessLookupError, StopIteration):
            getattr(self, "_" + act.kind.replace("-", "_"))(node, act.length)
        return True

    def _kill_rank(self, node: Node, length: float) -> None:
        """The rank of this node in the youngest world; nothing if it has none."""
        os.kill(self.team.pid_of(self.team.worlds()[-1], node.number), signal.SIGKILL)

    def _kill_node(self, node: Node, length: float) -> None:
        node.kill()

    def _kill_agent(self, node: Node, length: float) -> None:
        node.agent.signal(signal.SIGKILL)
        node.agent.process.wait()

    def _kill_fork_server(self, node: Node, length: float) -> None:
        next(p for p in node.processes() if is_fork_server(p, node)).kill()

    def _stop_node(self, node: Node, length: float) -> None:
        self.team.freeze(node)
        self.waking.append((time.monotonic() + length, node))

    def _stop_agent(self, node: Node, length: float) -> None:
        self.team.freeze_agent(node)
        self.waking.append((time.monotonic() + length, node))

    def _blink(self, node: Node, length: float) -> None:
        """Stopped for a moment only: nobody may be given up for that."""
        self.team.freeze(node)
        self.waking.append((time.monotonic() + 0.3, node))

    # ------------------------------------------------------------ afterwards

    def whole(self) -> World:
        """Every place is in one world, which goes on; or it waits with a sentence (a node that
        fell silent or failed again and again stands at the door for minutes)."""
        return self.team.until(self._at_rest, f"whole job: {self.words()}")

    def _at_rest(self) -> World | None:
        world = self.team.worlds()[-1]
        there = {f"n{number}" for number in world.nodes.values()}
        if len(world.whole) < STEPS_OF_REST or len(there) < FEWEST:
            return None
        waiting = [] if len(there) == NODES else self.team.status()["nodes"]
        told = {n["node"] for n in waiting if n["reason"] and n["activity"] == "at-the-door"}
        return world if len(there | told) == NODES else None

    def words(self) -> str:
        """The schedule as it was carried out."""
        return "; ".join(self.story)


def is_fork_server(process: psutil.Process, node: Node) -> bool:
    """A child of the agent that runs our fork server; ranks are its children."""
    if not processes.is_fork_server(process.pid):
        return False
    return process.pid in {child.pid for child in node.agent.children()}
