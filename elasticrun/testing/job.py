"""A job under test: real agents on this host, and everything a test may do to them.

Nodes are named by their number, from 0 in the order of their start; the master that a test started
by hand is "master". Whatever does something to the job returns when it did it (CLOCK_MONOTONIC,
seconds, the clock of the step log), so that a test can wait for what came `since` and measure how
long it took.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, overload

from elasticrun.testing import page, processes
from elasticrun.testing.fleet import LEFTOVER_LIMIT, Fleet, JobError, Where
from elasticrun.testing.plan import Plan
from elasticrun.testing.steps import Step, overlap
from elasticrun.testing.watch import Deadline
from elasticrun.wire.messages import JobStatus

TIMEOUT: Final = 60.0
"""Seconds that anything awaited may take: what a busy machine may need, not what it should."""

ASK_AGAIN: Final = 1.0
"""The status is asked for when an agent or a master has said something, and at the latest after so
many seconds, since not every change has a line."""

ASK_SPACING: Final = 0.05
"""And no more often than this, however much ranks print."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """How a job ended, by node."""

    exit_codes: tuple[int | None, ...]
    """Of the agents, as subprocess has them."""
    outcomes: tuple[str, ...]
    """The same in words; a node that the test had killed is told from one that failed."""
    ok: bool
    """Every node that the test had not killed ended with 0."""


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
    env: Mapping[str, str] | None = None,
    hosts: bool = False,
    master: bool = False,
    master_options: Sequence[str] = (),
    timeout: float = TIMEOUT,
) -> ElasticJob:
    """Start `script` with its arguments under elasticrun; what the fixture `elastic_job` calls.

    `nnodes`: N or MIN:MAX. `nodes`: how many agents are started, MIN if not given. `options`:
    further flags of the command line. `env`: further variables of the agents and their ranks.
    `hosts`: each node is a host of its own, with a cable (needs root; else the test is skipped).
    `master`: run `elasticrun master` by hand, with `master_options`, in the place of a master that
    node 0 starts. Returns when the master serves, `timeout` seconds at most: the other nodes may be
    on their way. ValueError for what can never run, JobError when it does not start.
    """
    plan = Plan(
        script=str(script),
        args=tuple(map(str, args)),
        nnodes=str(nnodes),
        nproc_per_node=str(nproc_per_node),
        max_restarts=max_restarts,
        options=tuple(options),
        env=dict(env or {}),
    )
    plan.check()
    count = plan.min_nodes if nodes is None else nodes
    if count < 0 or (count == 0 and not master):
        raise ValueError(f"nodes={nodes}: a job without a master of its own begins with a node")
    job = ElasticJob(plan, scratch, hosts=hosts)
    register(job)  # from here on the fixture ends it, whatever comes
    job.begin(count, master=master, master_options=master_options, timeout=timeout)
    return job


class ElasticJob(Fleet):
    """See the module's head."""

    # ------------------------------------------------------------ what befalls nodes

    def kill_node(self, number: int) -> float:
        """SIGKILL the agent, its fork server and its ranks at once, as when a node is lost.

        On a host of its own all that runs there goes, a master too; where nodes share this host the
        master that the agent had started is spared (see `kill_master`)."""
        return self._node(number).kill(masters=self.lab is not None)

    def kill_agent(self, number: int) -> float:
        """SIGKILL the agent's process alone."""
        return self._node(number).signal(signal.SIGKILL)

    def signal(self, number: int, signum: int) -> float:
        """Send a signal to the agent's process, as a scheduler does."""
        return self._node(number).signal(signum)

    def kill_rank(self, rank: int) -> float:
        """SIGKILL the process of this rank of the present world."""
        pid = self.rank_pid(rank)
        at = _now()
        processes.signal_all(lambda: [pid], signal.SIGKILL)
        return at

    def rank_pid(self, rank: int) -> int:
        """The process of this rank, as the master's status has it."""
        status = self.status()
        for node in status.nodes:
            if node.group_rank >= 0 and 0 <= rank - node.first_rank < len(node.pids):
                return node.pids[rank - node.first_rank]
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

    def flap(self, where: Where, *, down: float, up: float) -> float:
        """The link of a host is down for `down` seconds, up for `up` seconds, and so on."""
        lab, name = self._cable(where)
        lab.flap(name, down, up)
        return _now()

    def mend(self) -> float:
        """End all of these."""
        self._cable(0 if self.nodes else "master")[0].mend()
        return _now()

    # ------------------------------------------------------------ what is awaited

    def one_world(self) -> None:
        """Assert that no two worlds of this job have completed steps at a time."""
        if wrong := overlap(self.steps()):
            raise JobError(f"two worlds at a time: {wrong}")

    @overload
    def wait_for(
        self, *, step: int, world_size: int | None = ..., since: float | None = ...,
        timeout: float = ...,
    ) -> Step: ...  # fmt: skip

    @overload
    def wait_for(
        self, condition: Callable[[JobStatus], object] | None = ..., *,
        world_size: int | None = ..., round: int | None = ..., phase: str | None = ...,
        reason: str | None = ..., timeout: float = ...,
    ) -> JobStatus: ...  # fmt: skip

    def wait_for(
        self,
        condition: Callable[[JobStatus], object] | None = None,
        *,
        step: int | None = None,
        world_size: int | None = None,
        round: int | None = None,
        phase: str | None = None,
        reason: str | None = None,
        since: float | None = None,
        timeout: float = TIMEOUT,
    ) -> Step | JobStatus:
        """Wait until the job is as described; JobError when it is not within `timeout` seconds, or
        when every agent has ended.

        With `step`: until a rank of the newest world has completed that step or a later one, in a
        world of `world_size` ranks where that is given, in a world that began `since` some moment
        where that is given; returns the first such step. Else: until the master's status shows
        this world size (running), this round or a later one, this phase, this text in the reason of
        the job or of a node, and satisfies `condition`; returns that status.
        """
        if step is not None:
            if condition or round or phase or reason:
                raise ValueError("wait for a step or for a state of the job: not for both at once")
            return self._wait_step(step, world_size, since, timeout)
        if since is not None:
            raise ValueError("since= needs step=: a status has no time")

        def fits(status: JobStatus) -> bool:
            return (
                (world_size is None or (status.world_size, status.phase) == (world_size, "running"))
                and (round is None or (status.round is not None and status.round.number >= round))
                and (phase is None or status.phase == phase)
                and (reason is None or any(reason in text for text in _reasons(status)))
                and (condition is None or bool(condition(status)))
            )

        wanted = {"world_size": world_size, "round": round, "phase": phase, "reason": reason}
        words = [f"{name}={value!r}" for name, value in wanted.items() if value is not None]
        return self._wait_status(fits, ", ".join(words) or "the condition", timeout)

    def _wait_step(
        self, step: int, world_size: int | None, since: float | None, timeout: float
    ) -> Step:
        deadline = Deadline(timeout)
        while True:
            over = self._over()
            if found := _first(self.steps(), step, world_size, since):
                return found
            if over or deadline.over():
                size = "" if world_size is None else f" of a world of {world_size}"
                last = self._log.steps[-1] if self._log.steps else "none"
                raise self._failed(f"step {step}{size}", over, timeout, f"the last step: {last}")
            self._stepped.wait(deadline.left())

    def _wait_status(
        self, fits: Callable[[JobStatus], bool], what: str, timeout: float
    ) -> JobStatus:
        deadline = Deadline(timeout)
        last: JobStatus | str = "never asked"
        while True:
            over = self._over()
            try:
                last = self.status()
                if fits(last):
                    return last
            except JobError as error:
                last = str(error)
            if over or deadline.over():
                raise self._failed(what, over, timeout, f"the last status: {last}")
            self._said.wait(min(ASK_AGAIN, deadline.left()))
            time.sleep(ASK_SPACING)

    def result(self, timeout: float = TIMEOUT) -> Result:
        """Wait until every agent has ended. JobError when one has not within `timeout` seconds."""
        deadline = Deadline(timeout)
        while not self._over():
            if deadline.over():
                running = [n.name for n in self.nodes if n.exit_code is None]
                raise self._failed(f"the end of {', '.join(running)}", False, timeout, "")
            self._stepped.wait(deadline.left())
        if self.master_node is not None and not self.master_node.killed:
            processes.await_end([self.master_node.pid], deadline.left())
        return Result(
            exit_codes=tuple(node.exit_code for node in self.nodes),
            outcomes=tuple(node.outcome() for node in self.nodes),
            ok=all(node.killed or node.exit_code == 0 for node in self.nodes),
        )

    def _failed(self, what: str, over: bool, timeout: float, seen: str) -> JobError:
        ends = ", ".join(f"{node.name} {node.outcome()}" for node in self.nodes)
        when = "every agent ended" if over else f"it did not come within {timeout:g} s"
        return JobError(f"waited for {what}, but {when} ({ends}); {seen}")


def _first(
    steps: Sequence[Step], step: int, world_size: int | None, since: float | None
) -> Step | None:
    """The earliest step that fits, of the newest world or of those that began `since`."""
    began: dict[int, float] = {}
    for record in steps:
        began[record.round] = min(record.time, began.get(record.round, record.time))
    newest = max(began, default=0)
    fitting = [
        record
        for record in steps
        if (record.round == newest if since is None else began[record.round] > since)
        and record.step >= step
        and world_size in (None, record.world_size)
    ]
    return min(fitting, key=lambda record: record.time, default=None)


def _reasons(status: JobStatus) -> list[str]:
    return [status.reason, status.outcome, *(node.reason for node in status.nodes)]


def _now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)
