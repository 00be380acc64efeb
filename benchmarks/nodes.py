"""Runs jobs of several nodes on one host: each agent is a node that can be killed or frozen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from stage import ELASTICRUN, Fact, Job, TookTooLong, free_port

from elasticrun.testing.processes import is_master

PAUSE = 0.01
"""Seconds between two steps of the script."""

FIRST_STEP_LIMIT = 90.0
"""Seconds within which a job must complete its first step: torchrun's last call is 30 s by
default."""


class Nodes:
    """The agents of one job, with one rank each and a common endpoint; node n is the n-th agent."""

    def __init__(
        self,
        run: Job,
        nnodes: str,
        *flags: str,
        host: str = "127.0.0.1",
        script: str = "step_log.py",
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.run = run
        self._script, self._more = script, more
        self.port = free_port()
        self._flags = (
            *(f"--nnodes={nnodes}", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=bench"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{self.port}"),
            *("--local-addr=127.0.0.1", *flags),
        )

    def add(self, count: int = 1) -> float:
        """Start more agents. Returns the time at which the first was started."""
        began = time.monotonic()
        for _ in range(count):
            words = (str(PAUSE),)
            self.run.start(*self._flags, script=self._script, arguments=words, more=self._more)
        return began

    def first_steps(self, world: int, after: float, limit: float) -> list[Fact]:
        """Wait until every rank of a world of this size has completed its first step, later than
        the time `after`. Raises TookTooLong, also if all agents have exited."""

        def found() -> list[Fact]:
            facts = [f for f in self.run.of("allreduce") if f.world == world and f.time > after]
            return facts if len(facts) >= world else []

        self.run.until(lambda: bool(found()), limit)
        if not found():
            raise TookTooLong("the job dies")
        return found()

    # ------------------------------------------------------------ who is where

    def processes(self, node: int) -> list[psutil.Process]:
        """All processes of a node except a hosted master: agent, fork server, ranks."""
        agent = psutil.Process(self.run.agents[node].pid)
        return [agent, *(p for p in agent.children(recursive=True) if not is_master(p.pid))]

    def master(self) -> psutil.Process:
        """The process of the hosted master. Raises TookTooLong if there is none."""
        for process in self.run.processes():
            if is_master(process.pid):
                return process
        raise TookTooLong("there is no master")

    def host(self) -> int:
        """The number of the node that hosts the master, or torchrun's store."""
        for node, agent in enumerate(self.run.agents):
            process = psutil.Process(agent.pid)
            for one in (process, *process.children(recursive=True)):
                if listens(one, self.port):
                    return node
        raise TookTooLong(f"nobody listens on {self.port}")

    # ------------------------------------------------------------ faults

    def kill(self, node: int, *, master: bool = False) -> float:
        """SIGKILL all processes of a node, with `master` also the master that it hosts. Returns the
        time."""
        victims = self.processes(node)
        if master:
            victims.append(self.master())
        return signal_all(victims, signal.SIGKILL)

    def freeze(self, node: int) -> float:
        """SIGSTOP all processes of a node. Returns the time."""
        return signal_all(self.processes(node), signal.SIGSTOP)

    def hold(self, process: psutil.Process, seconds: float) -> None:
        """Stop a process for some seconds: SIGSTOP, then SIGCONT."""
        process.suspend()
        time.sleep(seconds)
        process.resume()

    # ------------------------------------------------------------ the logs of the scripts

    def steps(self) -> dict[int, list[float]]:
        """The times of all steps so far, by the rank's pid."""
        found = {}
        for path in self.run.folder.glob("steps-*"):
            lines = path.read_text().splitlines()
            found[int(path.name.rpartition("-")[2])] = [float(line.split()[0]) for line in lines]
        return found

    def settle(self, seconds: float = 1.0) -> None:
        """Let the job train for a while."""
        time.sleep(seconds)


def listens(process: psutil.Process, port: int) -> bool:
    """Whether this process listens on a TCP port."""
    with contextlib.suppress(psutil.Error):
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return True
    return False


def signal_all(victims: Sequence[psutil.Process], number: int) -> float:
    """Send a signal to all of these processes. Returns the time before the first."""
    began = time.monotonic()
    for process in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
    return began


def await_answer(port: int, limit: float) -> float:
    """Query the status of the master at this port every 10 ms. Returns the time of its first
    answer. Raises TookTooLong after `limit` seconds."""
    from elasticrun.wire.rpc.channel import LinkError, get_status
    from elasticrun.wire.types import Endpoint

    async def ask() -> float:
        end = time.monotonic() + limit
        while time.monotonic() < end:
            with contextlib.suppress(LinkError):
                await get_status(Endpoint("127.0.0.1", port), 1.0)
                return time.monotonic()
            await asyncio.sleep(0.01)
        raise TookTooLong(f"no master answers within {limit:g} s")

    return asyncio.run(ask())


@contextlib.contextmanager
def etcd(folder: Path) -> Iterator[str]:
    """A real etcd for this run; yields the value of --master-store. Raises TookTooLong if etcd is
    not installed."""
    program = shutil.which("etcd")
    if program is None:
        raise TookTooLong("etcd is not installed")
    clients, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    words = (
        *(program, "--data-dir", str(folder / "etcd"), "--listen-client-urls", clients),
        *("--advertise-client-urls", clients, "--listen-peer-urls", peers, "--log-level", "error"),
        *("--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"),
    )
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield clients.replace("http://", "etcd://")
    finally:
        process.kill()
        process.wait()


def only_elasticrun(launcher: str, *flags: str) -> tuple[str, ...]:
    """These flags for elasticrun; none for torchrun, which does not have them."""
    return flags if launcher == ELASTICRUN else ()
