"""A job of several agents on this host, each a node of its own, to which a test does harm.

Every agent gets `--node-id=n0`, `n1` ... in the order of their starts. What a fault did is read
from the step log (`steps.py`), never from the words of agents or master alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from elasticrun.testing.processes import is_master, kill_all
from tests.counting import times
from tests.faults.steps import Life, StepLog
from tests.harness import (
    COMMANDS,
    ELASTICRUN,
    LIMIT,
    SCRIPTS,
    Launched,
    Peer,
    World,
    await_true,
    free_port,
)

STEPPER = str(SCRIPTS / "stepper.py")
STALLING = str(SCRIPTS / "stalling.py")


@dataclass
class Node:
    """One agent and all that it started."""

    name: str
    agent: Launched

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

    def __init__(
        self,
        world: World,
        nnodes: str,
        *flags: str,
        port: int | None = None,
        script: str = STEPPER,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.world = world
        self.port = free_port() if port is None else port
        self.log = StepLog(world.scratch / "steps")
        self.nodes: list[Node] = []
        self._nnodes = nnodes
        self._flags = (times(), *flags)
        self._script = script
        self._env = {"STEPS_FOLDER": str(self.log.folder), "LOGLEVEL": "INFO", **(env or {})}
        self._first: Life | None = None

    # ------------------------------------------------------------ nodes come

    def add(
        self,
        *flags: str,
        name: str = "",
        port: int | None = None,
        stalling: bool = False,
        env: Mapping[str, str] | None = None,
        console: int | None = None,
    ) -> Node:
        """Start one more agent. `port`: of the endpoint it dials, where that is not the master's
        own (a relay). `stalling`: a real agent whose loop the test can block. `console`: a
        descriptor in the place of its stdout and stderr."""
        name = name or f"n{len(self.nodes)}"
        words = (
            f"--nnodes={self._nnodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port or self.port}",
            "--rdzv-id=faults",
            "--local-addr=127.0.0.1",
            f"--node-id={name}",
        )
        command = (sys.executable, STALLING) if stalling else COMMANDS[ELASTICRUN]
        agent = self.world.command(
            (*command, *words, *self._flags, *flags, self._script),
            env={**self._env, "STEPS_NODE": name, "STALLING_NAME": name, **(env or {})},
            stdout=console,
            stderr=console,
        )
        node = Node(name, agent)
        self.nodes.append(node)
        return node

    def start(self, count: int, *flags: str) -> Life:
        """Start so many nodes, the first of which hosts the master; their first world. On a busy
        machine some of them may have begun without the others: that is not this world, and
        `finish` leaves it out."""
        first = self.add(*flags)
        first.agent.until_text("the job's page")  # its master serves
        for _ in range(count - 1):
            self.add(*flags)
        return self.all_there(count)

    def all_there(self, count: int) -> Life:
        """Wait for the world of so many nodes with which the test begins."""
        self._first = self.log.world_of(count * self._ranks_each)
        return self._first

    @property
    def _ranks_each(self) -> int:
        words = [flag for flag in self._flags if flag.startswith("--nproc-per-node=")]
        return int(words[-1].partition("=")[2]) if words else 1

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

    def rank(self, life: Life, rank: int) -> Peer:
        """The one who takes orders as this rank of this world."""
        (peer,) = self.world.hub.ranks(1, pid=life.pids[rank])
        return peer

    def node_of(self, life: Life, group_rank: int) -> Node:
        """The node with this group rank."""
        name = life.nodes[group_rank]
        return next(node for node in reversed(self.nodes) if node.name == name)

    def status(self) -> dict[str, Any]:
        """`elasticrun status` of this job as JSON, as soon as its master answers: it gives one that
        stands still no more than five seconds."""
        page: dict[str, Any] = {}

        def answered() -> bool:
            done = subprocess.run(
                [*COMMANDS[ELASTICRUN], "status", f"127.0.0.1:{self.port}", "--json"],
                env=self.world.environment(),
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            if done.returncode == 0:
                page.update(json.loads(done.stdout))
            return done.returncode == 0

        await_true(answered, "answer to `elasticrun status`")
        return page

    def finish(self, *, but: tuple[Node, ...] = ()) -> list[Life]:
        """Let the script end; every node that is left ends with 0, and the step logs are good. The
        worlds from the one with which the test began to the last."""
        self.log.stop()
        ends = {
            node.name: node.agent.wait()
            for node in self.nodes
            if node not in but and node.agent.process.returncode != -signal.SIGKILL
        }
        assert set(ends.values()) <= {0}, f"{ends}; {self.words()}"
        return self.check()

    def check(self) -> list[Life]:
        """The invariants of every fault; the worlds, as `finish` has them. Any rank may have stood
        still, on a busy machine as by a SIGSTOP, before it wrote a line."""
        lives = self.log.check(stopped=None)
        began = 0.0 if self._first is None else self._first.first
        return [life for life in lives if life.first >= began]

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
