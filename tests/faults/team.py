"""A job of several agents on this host, each a node of its own, to which a test does harm.

Every agent gets `--node-id=n0`, `n1` ... in the order of their starts. What a fault did is read
from the steps that ranks have done, never from the words of agents or master alone. (Jobs that need
no relay, no blocked loop and no orders to ranks are those of `tests/counting.py`.)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

from elasticrun.testing.processes import Deadline, Waiter, is_master, kill_all
from elasticrun.testing.steps import (
    STEP_LOG,
    STEP_NODE,
    Step,
    StepLog,
    World,
    gap,
    overlap,
    story,
    worlds,
)
from tests.counting import times
from tests.harness import (
    COMMANDS,
    ELASTICRUN,
    LIMIT,
    SCRIPTS,
    Launched,
    Peer,
    World as Processes,
    free_port,
    status_of,
)

STALLING = str(SCRIPTS / "stalling.py")

T = TypeVar("T")


@dataclass
class Node:
    """One agent and all that it started."""

    number: int
    agent: Launched

    @property
    def name(self) -> str:
        return f"n{self.number}"

    def processes(self) -> list[psutil.Process]:
        """The agent and everything below it but the job's master, which is in a session of its
        own and need not die with its node."""
        everything = [psutil.Process(self.agent.pid), *self.agent.below()]
        return [process for process in everything if not is_master(process.pid)]

    def kill(self) -> float:
        """kill -9 of the agent and its ranks at one moment; that moment."""
        victims = [process.pid for process in self.processes()]
        began = time.monotonic()
        assert not kill_all(lambda: victims, LIMIT)
        self.agent.process.wait()
        return began


class Team:
    """The agents of one job. `flags` go to all of them; its times are those of `times` where no
    flag gives others."""

    def __init__(self, world: Processes, nnodes: str, *flags: str) -> None:
        self.world = world
        self.port = free_port()
        self.nodes: list[Node] = []
        self._nnodes = nnodes
        self._flags = (times(), *flags)
        self._folder = world.scratch / "steps"
        self._folder.mkdir()
        self._log = StepLog(str(self._folder / "steps.jsonl"))
        self._first: World | None = None

    # ------------------------------------------------------------ nodes come

    def add(
        self,
        *flags: str,
        number: int | None = None,
        port: int | None = None,
        stalling: bool = False,
        console: int | None = None,
    ) -> Node:
        """Start one more agent, or that of a node anew. `port`: of the endpoint it dials, where
        that is not the master's own (a relay). `stalling`: a real agent whose loop the test can
        block. `console`: a descriptor in the place of its stdout and stderr."""
        number = len(self.nodes) if number is None else number
        words = (
            f"--nnodes={self._nnodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port or self.port}",
            "--rdzv-id=faults",
            "--local-addr=127.0.0.1",
            f"--node-id=n{number}",
        )
        command = (sys.executable, STALLING) if stalling else COMMANDS[ELASTICRUN]
        script = (str(SCRIPTS / "counts.py"), str(self._folder))
        env = {STEP_LOG: self._log.path, STEP_NODE: str(number), "LOGLEVEL": "INFO"}
        agent = self.world.command(
            (*command, *words, *self._flags, *flags, *script),
            env={**env, "STALLING_NAME": f"n{number}"},
            stdout=console,
            stderr=console,
        )
        self.nodes.append(Node(number, agent))
        return self.nodes[-1]

    def start(self, count: int) -> World:
        """Start so many nodes, the first of which hosts the master; their first world. On a busy
        machine some of them may have begun without the others: that is not this world, and
        `finish` leaves it out."""
        self.add().agent.until_text("the job's page")  # its master serves
        for _ in range(count - 1):
            self.add()
        return self.all_there(count)

    def all_there(self, count: int) -> World:
        """Wait for the world of so many nodes with which the test begins."""
        self._first = self.world_of(count)
        return self._first

    def master(self, *flags: str, stalling: bool = False) -> Launched:
        """Start a master by hand; agents need `--rdzv-conf=is_host=0` then."""
        command = (sys.executable, STALLING) if stalling else COMMANDS[ELASTICRUN]
        words = ("master", f"--port={self.port}", f"--nnodes={self._nnodes}", "--rdzv-id=faults")
        launched = self.world.command(
            (*command, *words, times(), *flags),
            env={"LOGLEVEL": "INFO", "STALLING_NAME": "master"},
        )
        launched.until_text(str(self.port))
        return launched

    # ------------------------------------------------------------ harm

    def master_process(self) -> psutil.Process:
        """The hosted master; nobody's child any more if its agent has gone."""
        (found,) = (process for process in self.world.survivors() if is_master(process.pid))
        return found

    def freeze(self, node: Node) -> float:
        """SIGSTOP of all processes of a node but the master, as if its cable were out: no FIN and
        no answer. The moment of the first."""
        began = time.monotonic()
        for process in node.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        return began

    def thaw(self, node: Node) -> None:
        """SIGCONT of all of them."""
        for process in node.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def freeze_agent(self, node: Node) -> float:
        """SIGSTOP of the agent alone: fork server and ranks go on."""
        began = time.monotonic()
        node.agent.signal(signal.SIGSTOP)
        return began

    def stall(self, name: str, how: str, seconds: float) -> None:
        """Block the loop (`loop`) or every thread (`gil`) of an agent or master that was started
        with `stalling`, and wait until that is over."""
        (peer,) = self.world.hub.ranks(1, name=name)
        before = len(peer.said)
        peer.order(how, seconds=seconds)
        self.world.hub.until(
            lambda: [said for said in peer.said[before:] if said["event"] == "over"],
            f"end of the stall of {name}",
            seconds + LIMIT,
        )

    # ------------------------------------------------------------ what is seen

    def steps(self, of: World | None = None) -> list[Step]:
        """All steps so far, or those of one world."""
        self._log.read()
        return [step for step in self._log.steps if of is None or step.round == of.round]

    def worlds(self) -> list[World]:
        """Every world that has done a step, in the order of their first."""
        return worlds(self.steps())

    def until(self, found: Callable[[], T | None], what: str) -> T:
        """Wait, while ranks do steps, until `found()` gives something, and return it."""
        deadline = Deadline(LIMIT)
        with contextlib.closing(Waiter()) as watch:
            watch.folder(str(self._folder))
            while not (result := found()):
                assert not deadline.over(), f"no {what} within {LIMIT:g} s; {story(self.worlds())}"
                watch.wait(deadline.left())
                threading.Event().wait(0.05)  # ranks write all the time
        return result

    def world_of(self, size: int | None, *, after: World | None = None) -> World:
        """Wait for a world of `size` ranks (None: of any), younger than `after`, that has done a
        whole step."""

        def fits(world: World) -> bool:
            younger = after is None or world.began > after.began
            return younger and size in (None, world.world_size) and world.has_done(None)

        what = f"world of {size} ranks" if size else "next world"
        return self.until(lambda: next(filter(fits, reversed(self.worlds())), None), what)

    def goes_on(self, world: World, steps: int = 5) -> None:
        """Wait until this very world has done `steps` whole steps more than now."""

        def now() -> World:
            return next(one for one in self.worlds() if one.round == world.round)

        wanted = max(now().whole, default=0) + steps
        self.until(lambda: now().has_done(wanted), f"further {steps} steps of {world}")

    def rank(self, world: World, rank: int) -> Peer:
        """The one who takes orders as this rank of this world."""
        (peer,) = self.world.hub.ranks(1, pid=world.pids[rank])
        return peer

    def rank_on(self, number: int) -> Peer:
        """The same of the newest world, by its node."""
        (peer,) = self.world.hub.ranks(1, pid=self.pid_of(self.worlds()[-1], number))
        return peer

    def store(self, world: World) -> str:
        """Where its store is."""
        return self.steps(world)[0].world.partition("/")[0]

    @staticmethod
    def pid_of(world: World, number: int) -> int:
        """The rank on this node, one each."""
        return next(world.pids[rank] for rank, node in world.nodes.items() if node == number)

    def node_of(self, world: World, rank: int) -> Node:
        """The other way round."""
        return next(node for node in reversed(self.nodes) if node.number == world.nodes[rank])

    def status(self) -> dict[str, Any]:
        """`elasticrun status` of this job as JSON."""
        env = self.world.environment()
        page: dict[str, Any] = json.loads(status_of(f"127.0.0.1:{self.port}", "--json", env=env))
        return page

    def finish(self, *, but: tuple[Node, ...] = ()) -> list[World]:
        """Let the script end; every node that is left ends with 0, and the step log is good. The
        worlds from the one with which the test began to the last."""
        (self._folder / "stop").touch()
        ends = {
            node.name: node.agent.wait()
            for node in self.nodes
            if node not in but and node.agent.process.returncode != -signal.SIGKILL
        }
        assert set(ends.values()) <= {0}, f"{ends}; {self.words()}"
        return self.check()

    def check(self) -> list[World]:
        """The invariants of every fault; the worlds, as `finish` has them. Any rank may have stood
        still, on a busy machine as by a SIGSTOP, before it wrote a line."""
        found = self.worlds()
        wrong = overlap(self.steps()) or gap(found)
        assert not wrong, f"{wrong}; {story(found)}"
        return [world for world in found if self._first is None or world.began >= self._first.began]

    def words(self) -> str:
        """What the agents said last, for a failing assertion."""
        return "\n".join(f"{node.name}: {node.agent.stderr[-1500:]}" for node in self.nodes)


@contextlib.contextmanager
def frozen(team: Team, node: Node) -> Iterator[float]:
    """A node that is silent for the length of the block; gives the moment it fell silent."""
    began = team.freeze(node)
    try:
        yield began
    finally:
        team.thaw(node)


def descriptors(pid: int) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))
