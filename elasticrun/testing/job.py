"""A job under test: real agents on this host, and everything a test may do to them.

Nodes are named by their number, from 0 in the order of their start; the master that a test started
by hand is "master". Whatever does something to the job returns when it did it (CLOCK_MONOTONIC,
seconds, the clock of the step log), so that a test can wait for what came `since` and measure how
long it took.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from elasticrun.testing import page, processes
from elasticrun.testing.cgroups import Group
from elasticrun.testing.fleet import (
    LEFTOVER_LIMIT,
    TIMEOUT,
    JobError,
    Where,
    mistake,
    variables,
)
from elasticrun.testing.plan import Plan
from elasticrun.testing.waits import Result, Watched
from elasticrun.wire.messages import JobStatus

__all__ = ["ElasticJob", "JobError", "Result", "start"]

KILL: Final = int(signal.SIGKILL)

__tracebackhide__ = mistake  # of the test: its own line is what is shown


def start(
    script: str | Path,
    *args: str,
    scratch: Path,
    register: Callable[[ElasticJob], None] = lambda job: None,
    nnodes: str | int = 1,
    nproc_per_node: str | int = 1,
    nodes: int | None = None,
    max_restarts: int = 0,
    options: Sequence[str] = (),
    env: Mapping[str, object] | None = None,
    hosts: bool = False,
    master: bool = False,
    master_options: Sequence[str] = (),
    together: bool = False,
    cpus: float | None = None,
    memory: int | None = None,
    timeout: float = TIMEOUT,
) -> ElasticJob:
    """Start `script` with its arguments under elasticrun; what the fixture `elastic_job` calls.

    `nnodes`: N or MIN:MAX. `nodes`: how many agents are started, MIN if not given. `options`:
    further flags of the command line. `env`: further variables of the agents and their ranks.
    `hosts`: each node is a host of its own, with a cable (needs root; else the test is skipped).
    `master`: run `elasticrun master` by hand, with `master_options`, in the place of a master that
    node 0 starts. `cpus`, `memory`: what each node may use from its start, in cores' worth of time
    and bytes (needs root; else the test is skipped). `together`: start all nodes at the same
    moment; else the others follow when the master of node 0 serves. `timeout`: seconds that a wait
    for this job may take, where it has no `timeout` of its own. Returns when the master serves: the
    other nodes may be on their way. ValueError for what can never run, JobError when it does not
    start.
    """
    plan = Plan(
        script=str(script),
        args=tuple(map(str, args)),
        nnodes=str(nnodes),
        nproc_per_node=str(nproc_per_node),
        max_restarts=max_restarts,
        options=options,
        env=variables(env),
        cpus=cpus,
        memory=memory,
    )
    plan.check()
    count = plan.min_nodes if nodes is None else nodes
    if count < 0 or (count == 0 and not master):
        raise ValueError(f"nodes={nodes}: a job without a master of its own begins with a node")
    job = ElasticJob(plan, scratch, hosts=hosts, timeout=timeout)
    register(job)  # from here on the fixture ends it, whatever comes
    job.begin(count, master=master, master_options=master_options, together=together)
    return job


class ElasticJob(Watched):
    """See the module's head."""

    # ------------------------------------------------------------ what befalls nodes

    def kill_node(self, number: int) -> float:
        """SIGKILL the agent, its fork server and its ranks at once, as when a node is lost.

        On a host of its own all that runs there goes, a master too; where nodes share this host the
        master that the agent had started is spared (see `kill_master`)."""
        return self._node(number).kill(masters=self.lab is not None)

    def power_off(self, number: int) -> float:
        """The same without a word to anybody: the cable of its host is pulled first, so that no
        connection is seen to end. `restart_node` plugs it in again. Needs `hosts=True`."""
        lab, name = self._cable(number)
        node = self._node(number)
        lab.cut(name)
        node.off = True
        return node.kill(masters=True)

    def limit_cpus(self, number: int, cores: float | None) -> float:
        """From now on all processes of a node (but a master on a host that it shares) have so many
        cores' worth of time; None: as much as there is. Needs root and cgroups, as `memory`."""
        self._group(number).cpus(cores)
        return _now()

    def limit_memory(self, number: int, nbytes: int | None) -> float:
        """What all processes of a node take from now on (from the first, where `start` was given
        `memory`) is so many bytes at most: the kernel kills one of them when it is more."""
        self._group(number).memory(nbytes)
        return _now()

    def _group(self, number: int) -> Group:
        node = self._node(number)
        if node.group is None:
            node.group = Group(node.name)
            node.group.add(node.pids(masters=self.lab is not None))
        return node.group

    def kill_agent(self, number: int) -> float:
        """SIGKILL the agent's process alone."""
        return self._node(number).signal(signal.SIGKILL)

    def signal(self, number: int, signum: int) -> float:
        """Send a signal to the agent's process, as a scheduler does."""
        return self._node(number).signal(signum)

    def kill_rank(self, rank: int, signum: int = KILL) -> float:
        """SIGKILL the process of this rank of the present world, or send it another signal."""
        pid = self.rank_pid(rank)
        at = _now()
        processes.signal_all(lambda: [pid], signum)
        return at

    def rank_pid(self, rank: int) -> int:
        """The process of this rank, as the master's status has it. A rank may be in a step before
        its agent has told the master of it: that is waited for."""

        def known(status: JobStatus) -> bool:
            never = status.phase == "ended" or not 0 <= rank < status.world_size
            return never or bool(_pid(status, rank))

        status = self._wait_status(known, f"the process of rank {rank}", None)
        if pid := _pid(status, rank):
            return pid
        raise JobError(f"no rank {rank} runs; the job is {status.phase}: {status.reason}")

    def freeze_node(self, number: int, *, agent_only: bool = False) -> float:
        """SIGSTOP every process of a node (a master on a host that it shares is spared), or its
        agent alone."""
        node = self._node(number)
        node.frozen = True
        if agent_only:
            return node.signal(signal.SIGSTOP)
        return node.signal_everything(signal.SIGSTOP, masters=self.lab is not None)

    def thaw_node(self, number: int) -> float:
        """SIGCONT every process of a node."""
        node = self._node(number)
        node.frozen = False
        return node.signal_everything(signal.SIGCONT, masters=True)

    def kill_master(self) -> float:
        """SIGKILL the job's master, whoever has started it."""
        if self.master_node is not None:
            self.master_node.killed = True
        return self._signal_master(signal.SIGKILL)

    def freeze_master(self) -> float:
        """SIGSTOP the job's master."""
        return self._signal_master(signal.SIGSTOP)

    def thaw_master(self) -> float:
        """SIGCONT the job's master."""
        return self._signal_master(signal.SIGCONT)

    def _signal_master(self, number: int) -> float:
        pids = [master.pid for master in page.masters(self._runs)]
        if not pids:
            raise JobError("no master of this job runs")
        at = _now()
        processes.signal_all(lambda: pids, number)
        if number == signal.SIGKILL:
            processes.await_end(pids, LEFTOVER_LIMIT)
        return at

    # ------------------------------------------------------------ what befalls cables (hosts=True)

    def cut(self, one: Where, other: Where | None = None) -> float:
        """Pull the cable of a host, or let two hosts not reach each other."""
        lab, name = self._cable(one)
        if other is None:
            lab.cut(name)
        else:
            lab.part(name, self._cable(other)[1])
        return _now()

    def one_way(self, sender: Where, receiver: Where) -> float:
        """What `sender` sends does not reach `receiver`; the other way is open."""
        lab, name = self._cable(sender)
        lab.one_way(name, self._cable(receiver)[1])
        return _now()

    def loss(self, where: Where, percent: float) -> float:
        """So much of what a host receives is lost."""
        lab, name = self._cable(where)
        lab.loss(name, percent / 100)
        return _now()

    def delay(self, where: Where, milliseconds: float) -> float:
        """Every packet to or from a host arrives so much later."""
        lab, name = self._cable(where)
        lab.delay(name, milliseconds / 1000)
        return _now()

    def slow(self, where: Where, megabits: float) -> float:
        """So many Mbit per second pass the cable of a host, each way."""
        lab, name = self._cable(where)
        lab.slow(name, megabits * 1e6 / 8)
        return _now()

    def flap(self, where: Where, *, down: float, up: float) -> float:
        """The link of a host is down for `down` seconds, up for `up` seconds, and so on."""
        lab, name = self._cable(where)
        lab.flap(name, down, up)
        return _now()

    def mend(self) -> float:
        """End all of these."""
        self._cable(0 if self.nodes else "master")[0].mend()
        return _now()


def _pid(status: JobStatus, rank: int) -> int:
    """The process of this rank; 0: none is known."""
    for node in status.nodes:
        if node.group_rank >= 0 and 0 <= rank - node.first_rank < len(node.pids):
            return node.pids[rank - node.first_rank]
    return 0


def _now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)
