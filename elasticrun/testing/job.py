"""A job under test: real agents on this host, and everything that a test may do to them.

Nodes are numbered from 0 in the order of their start; a master that the test starts separately is
"master". Each method that acts on the job returns the time of the action (CLOCK_MONOTONIC, seconds,
the clock of the step log), so that a test can wait for events `since` then and measure durations.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Final, Literal, overload

from elasticrun.testing import page, processes, steps
from elasticrun.testing.cgroups import Group
from elasticrun.testing.hosts import Lab
from elasticrun.testing.node import ELASTICRUN, JobNode, JobPlan, environment
from elasticrun.testing.processes import Deadline, Waiter
from elasticrun.testing.steps import STEP_LOG, STEP_NODE, Step, StepLog, World
from elasticrun.wire.env import SHM_DIR
from elasticrun.wire.messages import JobStatus

KILL: Final = int(signal.SIGKILL)

TIMEOUT: Final = 60.0
"""Default seconds for any wait: enough for a busy machine, not a performance target."""

LEFTOVER_LIMIT: Final = 30.0
"""Seconds after an agent's end within which all processes that it started must exit."""

SHARED_MEMORY: Final = "/dev/shm"

Where = int | Literal["master"]

ASK_AGAIN: Final = 1.0
"""Maximum seconds between two reads of the status. It is also read whenever an agent or a master
prints something, but not every change prints a line."""

ASK_SPACING: Final = 0.05
"""Minimum seconds between two reads of the status or of the step log, however much ranks print."""


class JobError(AssertionError):
    """The job did not do what a test waited for."""


is_test_error = methodcaller("errisinstance", (JobError, ValueError))
"""Whether an error is caused by the test or its job, not by a defect of this package."""

__tracebackhide__ = is_test_error  # for such an error, pytest shows the line of the test


def variables(env: Mapping[str, object] | None) -> dict[str, str]:
    """The variables, with their values as strings."""
    return {name: str(value) for name, value in (env or {}).items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """How a job ended; sequences are by node number."""

    exit_codes: tuple[int | None, ...]
    """Exit codes of the agents, as in subprocess."""
    outcomes: tuple[str, ...]
    """The same in words; distinguishes nodes that the test killed from nodes that failed."""
    ok: bool
    """Whether every node that the test did not kill exited with 0."""


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
    """Start `script` with its arguments under elasticrun; the fixture `elastic_job` calls this.

    `nnodes`: N or MIN:MAX. `nodes`: number of agents to start, default MIN. `options`: further
    flags of the command line. `env`: further variables of the agents and their ranks. `hosts`: each
    node gets its own host with a cable (needs root; else the test is skipped). `master`: start
    `elasticrun master` separately, with `master_options`, instead of a master that node 0 starts.
    `cpus`, `memory`: limits of each node from its start, in cores and bytes (needs root; else the
    test is skipped). `together`: start all nodes at the same moment; else the others start once the
    master of node 0 serves. `timeout`: default seconds for the waits of this job. Returns when the
    master serves; the other nodes may still be starting. Raises ValueError for a job that can never
    run, JobError if it does not start.
    """
    plan = JobPlan(
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
    least = plan.check()
    count = least if nodes is None else nodes
    if count < 0 or (count == 0 and not master):
        raise ValueError(f"nodes={nodes}: start at least one node, or give master=True")
    job = ElasticJob(plan, scratch, hosts=hosts, timeout=timeout)
    register(job)  # from here on the fixture ends it
    job.start(count, master_options if master else None, together=together)
    return job


class ElasticJob:
    """A job under test; see the module docstring, also for `since`. `nodes`: the nodes started so
    far, by number. The `timeout` of a method defaults to the job's. Waits raise JobError if the
    event does not occur in time, or if every agent has ended."""

    def __init__(
        self, plan: JobPlan, scratch: Path, *, hosts: bool, timeout: float = TIMEOUT
    ) -> None:
        self.timeout = timeout
        """Default seconds for any wait."""
        self.nodes: list[JobNode] = []
        self.master_node: JobNode | None = None
        """The master that the test started separately; None if node 0 starts one."""
        self._plan = plan
        self._scratch = scratch
        self._consoles = scratch / "consoles"
        self._log_folder = scratch / "steps"
        for folder in (self._consoles, self._log_folder):
            folder.mkdir()
        self._log = StepLog(str(self._log_folder / "steps.jsonl"))
        self._output_watch = Waiter()  # output of agents, ranks and masters
        self._output_watch.folder(str(self._consoles))
        self._step_watch = Waiter()
        self._step_watch.folder(str(self._log_folder))
        self._runs: dict[Path, None] = {}
        self._closed = False
        self.lab: Lab | None = Lab(scratch) if hosts else None
        """The hosts and their switch, if the job has hosts."""
        shared = os.environ.get(SHM_DIR) or SHARED_MEMORY
        self.memory = processes.new_folder(
            shared if os.access(shared, os.W_OK) else str(scratch), "memory"
        )
        """The folder of the snapshots, unless `env` names another: so that agents that were killed
        leave nothing behind."""

    # ------------------------------------------------------------ starting nodes

    def start(self, count: int, master: Sequence[str] | None, *, together: bool) -> None:
        """Start a separate master with the options `master`, unless None, then `count` nodes; wait
        until a master serves. Called by the function `start`."""
        if master is not None:
            node = self.master_node = self._make_node("master")
            self._plan.place(node.host)
            node.command = self._plan.master_command(master)
            self._start(node)
            self._await_master(node)
        for number in range(count):
            node = self.add_node()
            if master is None and number == (count - 1 if together else 0):
                self._await_master(node)

    def add_node(
        self,
        *,
        options: Sequence[str] = (),
        env: Mapping[str, object] | None = None,
        nproc_per_node: str | int | None = None,
    ) -> JobNode:
        """Start one more agent, on a host of its own if the job has hosts; returns the new node."""
        node = self._make_node(f"node{len(self.nodes)}")
        if not self.nodes and self.master_node is None:
            self._plan.place(node.host)
        self.nodes.append(node)
        node.command = self._plan.agent_command(node.name, options, nproc_per_node)
        node.env = variables(env)
        if self._plan.cpus is not None or self._plan.memory is not None:
            node.group = Group(node.name)
            node.group.cpus(self._plan.cpus)
            node.group.memory(self._plan.memory)
        self._start(node)
        return node

    def restart_node(self, number: int) -> JobNode:
        """Start the agent of an ended node again: the same node, a new incarnation. Plugs in its
        cable if it was powered off."""
        node = self._node(number)
        if node.exit_code is None:
            raise ValueError(f"node {number} still runs: kill it before it is started again")
        if node.off and self.lab is not None:
            self.lab.plug(node.name)
            node.off = False
        self._start(node)
        return node

    def _make_node(self, name: str) -> JobNode:
        console = self._consoles / f"{name}.txt"
        console.touch()
        host = self.lab.add(name) if self.lab else None
        return JobNode(name, f"{self._plan.job_id}.{name}", console, host)

    def _start(self, node: JobNode) -> None:
        own = self._scratch / (node.name if self.lab else "host")
        memory = {SHM_DIR: str(self.memory)}
        variables = {**memory, **self._plan.env, **node.env, STEP_LOG: self._log.path}
        if node in self.nodes:
            variables[STEP_NODE] = str(self.nodes.index(node))
        environ = environment(own, node.mark, variables)
        folder = page.user_folder(own / "run")
        if folder not in self._runs:
            self._runs[folder] = None
            self._output_watch.folder(str(folder))
        prefix = self.lab.prefix(node.name) if self.lab else []
        node.start([*ELASTICRUN, *node.command], environ, prefix)
        self._output_watch.process(node.pid)
        self._step_watch.process(node.pid)

    def _await_master(self, node: JobNode) -> None:
        deadline = Deadline(self.timeout)
        while True:
            ended = node.exit_code
            if page.masters(self._runs):
                return
            if ended is not None or deadline.over():
                how = "no master serves" if ended is None else f"{node.name} {node.outcome()}"
                raise JobError(f"the job did not start: {how}; it said:\n{node.tail()}")
            self._output_watch.wait(deadline.left())

    # ------------------------------------------------------------ observing

    def status(self) -> JobStatus:
        """The job's status from its master. Raises JobError if no master answers."""
        try:
            return page.status(self._runs)
        except page.NoPage as error:
            raise JobError(str(error)) from None

    @property
    def run_folders(self) -> list[Path]:
        """The run folders that the job's masters have made, newest last."""
        roots = (folder.parent.parent / "runs" for folder in self._runs)
        found = {path for root in roots for path in root.glob("*")}
        return sorted(found, key=lambda path: path.stat().st_mtime)

    def steps(self) -> list[Step]:
        """The steps that the ranks have reported with `elasticrun.testing.step` so far."""
        self._log.read()
        return list(self._log.steps)

    def output(self, number: Where) -> str:
        """The standard output and error of a node's agent and ranks so far."""
        return self._node_at(number).output()

    # ------------------------------------------------------------ finding nodes

    def _all_nodes(self) -> list[JobNode]:
        return [*self.nodes, *filter(None, [self.master_node])]

    def _over(self) -> bool:
        return bool(self.nodes) and all(node.exit_code is not None for node in self.nodes)

    def _node(self, number: int) -> JobNode:
        if not 0 <= number < len(self.nodes):
            raise ValueError(f"there is no node {number}: {len(self.nodes)} were started, from 0")
        return self.nodes[number]

    def _node_at(self, where: Where) -> JobNode:
        if where != "master":
            return self._node(where)
        if self.master_node is None:
            raise ValueError("no master was started by hand: start the job with master=True")
        return self.master_node

    def _cable(self, where: Where) -> tuple[Lab, str]:
        if self.lab is None:
            raise ValueError("nodes on one host have no cables: start the job with hosts=True")
        return self.lab, self._node_at(where).name

    # ------------------------------------------------------------ worlds

    def one_world(self) -> None:
        """Assert that no two worlds of this job completed steps at the same time. Raises
        JobError."""
        if wrong := steps.overlap(self.steps()):
            raise JobError(f"two worlds at a time: {wrong}")

    def no_gap(self) -> None:
        """Assert that every step, from the first to the one before the last, was completed by all
        ranks of a world: the script resumed from its saved state. Raises JobError."""
        if wrong := steps.gap(self.worlds()):
            raise JobError(f"steps are missing: {wrong}")

    def worlds(self) -> list[World]:
        """The worlds that have completed a step so far, ordered by the time of their first step."""
        return steps.worlds(self.steps())

    def wait_for_world(
        self,
        world_size: int | None = None,
        *,
        step: int | None = None,
        round: int | None = None,
        since: float | None = None,
        timeout: float | None = None,
    ) -> World:
        """Wait for a world in which every rank has completed a step (`step`: that or a later one).
        Raises JobError if there is none within `timeout` seconds, or if every agent has ended.

        `world_size`: its number of ranks. `round`: only the world with this `World.round`. `since`:
        the first such world that began after this moment. With neither: only the newest world.
        """
        deadline = self._deadline(timeout)
        while True:
            over = self._over()
            found = self.worlds()
            for world in steps.candidates(found, round, since):
                if world_size in (None, world.world_size) and world.has_done(step):
                    return world
            if over or deadline.over():
                size = "" if world_size is None else f" of {world_size} ranks"
                what = "a step" if step is None else f"step {step}"
                expected = f"a world{size} all of which completed {what}"
                raise self._failed(expected, over, deadline, steps.describe_worlds(found))
            self._step_watch.wait(deadline.left())
            time.sleep(min(ASK_SPACING, deadline.left()))

    # ------------------------------------------------------------ waiting for output, steps, status

    def wait_for_output(
        self, number: Where, text: str | re.Pattern[str], *, timeout: float | None = None
    ) -> str:
        """Wait until a node's agent or ranks have printed `text`, or text that matches the pattern;
        returns all their output. Raises JobError after `timeout` seconds, or if the agent has
        ended."""
        node = self._node_at(number)
        deadline = self._deadline(timeout)
        while True:
            over = node.exit_code is not None
            output = node.output()
            if text in output if isinstance(text, str) else text.search(output):
                return output
            if over or deadline.over():
                words = text if isinstance(text, str) else text.pattern
                tail = f"its last words:\n{node.tail()}"
                raise self._failed(f"{node.name} to print {words!r}", over, deadline, tail)
            self._output_watch.wait(deadline.left())

    @overload
    def wait_for(
        self, *, step: int, world_size: int | None = ..., since: float | None = ...,
        timeout: float | None = ...,
    ) -> Step: ...  # fmt: skip

    @overload
    def wait_for(
        self, condition: Callable[[JobStatus], object] | None = ..., *,
        world_size: int | None = ..., round: int | None = ..., phase: str | None = ...,
        reason: str | None = ..., timeout: float | None = ...,
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
        timeout: float | None = None,
    ) -> Step | JobStatus:
        """Wait until the job is in the described state. Raises JobError after `timeout` seconds, or
        if every agent has ended.

        With `step`: until a rank of the newest world, or with `since` of any world that began after
        that moment, has completed this step or a later one; returns the first such step. If given,
        the world must have `world_size` ranks. Without `step`: until the master's status shows this
        world size (running), this round or a later one, this phase, this text in the reason of the
        job or of a node, and satisfies `condition`; returns that status.
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
        self, step: int, world_size: int | None, since: float | None, timeout: float | None
    ) -> Step:
        deadline = self._deadline(timeout)
        while True:
            over = self._over()
            if found := steps.earliest(self.steps(), step, world_size, since):
                return found
            if over or deadline.over():
                size = "" if world_size is None else f" of a world of {world_size}"
                last = self._log.steps[-1] if self._log.steps else "none"
                raise self._failed(f"step {step}{size}", over, deadline, f"the last step: {last}")
            self._step_watch.wait(deadline.left())

    def _wait_status(
        self, fits: Callable[[JobStatus], bool], what: str, timeout: float | None
    ) -> JobStatus:
        deadline = self._deadline(timeout)
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
                raise self._failed(what, over, deadline, f"the last status: {last}")
            self._output_watch.wait(min(ASK_AGAIN, deadline.left()))
            time.sleep(ASK_SPACING)

    def result(self, timeout: float | None = None) -> Result:
        """Wait until every agent has ended; raises JobError after `timeout` seconds. Then also
        waits for a separate master, for the rest of that time at most."""
        deadline = self._deadline(timeout)
        while not self._over():
            if deadline.over():
                running = [n.name for n in self.nodes if n.exit_code is None]
                raise self._failed(f"the end of {', '.join(running)}", False, deadline, "")
            self._step_watch.wait(deadline.left())
        if self.master_node is not None and not self.master_node.killed:
            processes.await_end([self.master_node.pid], deadline.left())
        return Result(
            exit_codes=tuple(node.exit_code for node in self.nodes),
            outcomes=tuple(node.outcome() for node in self.nodes),
            ok=all(node.killed or node.exit_code == 0 for node in self.nodes),
        )

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.timeout if timeout is None else timeout)

    def _failed(self, what: str, over: bool, deadline: Deadline, seen: str) -> JobError:
        ends = ", ".join(f"{node.name} {node.outcome()}" for node in self.nodes)
        when = f"it did not come within {deadline.seconds:g} s"
        if over:
            when = "every agent ended" if self._over() else "it ended"
        return JobError(f"waited for {what}, but {when} ({ends}); {seen}")

    # ------------------------------------------------------------ faults of nodes

    def kill_node(self, number: int) -> float:
        """SIGKILL all processes of the node at once, as when a node is lost. If the job has hosts,
        that includes a master on this node's host; if not, a master that its agent started is
        spared (see `kill_master`)."""
        return self._node(number).kill(masters=self.lab is not None)

    def power_off(self, number: int) -> float:
        """Like `kill_node`, but the host's cable is pulled first, so that peers see no closed
        connection. `restart_node` plugs it in again. Needs `hosts=True`."""
        lab, name = self._cable(number)
        node = self._node(number)
        lab.cut(name)
        node.off = True
        return node.kill(masters=True)

    def limit_cpus(self, number: int, cores: float | None) -> float:
        """Limit the CPU time of all processes of a node (except a master if the job has no hosts)
        to this many cores; None: no limit. Needs root and cgroups, like `limit_memory`."""
        self._group(number).cpus(cores)
        return _now()

    def limit_memory(self, number: int, nbytes: int | None) -> float:
        """Limit the memory of all processes of a node to this many bytes, beyond which the kernel
        kills one of them. Only memory allocated from now on counts, unless `start` had `memory`."""
        self._group(number).memory(nbytes)
        return _now()

    def _group(self, number: int) -> Group:
        node = self._node(number)
        if node.group is None:
            node.group = Group(node.name)
            node.group.add(node.pids(masters=self.lab is not None))
        return node.group

    def kill_agent(self, number: int) -> float:
        """SIGKILL the agent's process only."""
        return self._node(number).signal(signal.SIGKILL)

    def signal(self, number: int, signum: int) -> float:
        """Send a signal to the agent's process, as a scheduler does."""
        return self._node(number).signal(signum)

    def kill_rank(self, rank: int, signum: int = KILL) -> float:
        """Send a signal, default SIGKILL, to the process of this rank of the current world."""
        pid = self.rank_pid(rank)
        at = _now()
        processes.signal_all(lambda: [pid], signum)
        return at

    def rank_pid(self, rank: int) -> int:
        """The pid of this rank, from the master's status. Waits for it, because a rank may report a
        step before its agent has reported the rank. Raises JobError if there is no such rank."""

        def known(status: JobStatus) -> bool:
            never = status.phase == "ended" or not 0 <= rank < status.world_size
            return never or bool(_pid(status, rank))

        status = self._wait_status(known, f"the process of rank {rank}", None)
        if pid := _pid(status, rank):
            return pid
        raise JobError(f"no rank {rank} runs; the job is {status.phase}: {status.reason}")

    def freeze_node(self, number: int, *, agent_only: bool = False) -> float:
        """SIGSTOP every process of a node (except a master if the job has no hosts), or only its
        agent."""
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
        """SIGKILL the job's master, whoever started it, and wait for its end."""
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

    # ------------------------------------------------------------ faults of cables (hosts=True)

    def cut(self, one: Where, other: Where | None = None) -> float:
        """Pull the cable of a host; with `other`, disconnect only these two from each other."""
        if other is None:
            return self._on_cable(one, Lab.cut)
        return self._on_cable(one, Lab.disconnect, self._cable(other)[1])

    def one_way(self, sender: Where, receiver: Where) -> float:
        """Drop what `sender` sends to `receiver`; the other direction works."""
        return self._on_cable(sender, Lab.one_way, self._cable(receiver)[1])

    def loss(self, where: Where, percent: float) -> float:
        """Drop this percentage of the packets to a host."""
        return self._on_cable(where, Lab.loss, percent / 100)

    def delay(self, where: Where, milliseconds: float) -> float:
        """Delay every packet to or from a host."""
        return self._on_cable(where, Lab.delay, milliseconds / 1000)

    def slow(self, where: Where, megabits: float) -> float:
        """Limit the cable of a host to this many Mbit per second, each way."""
        return self._on_cable(where, Lab.slow, megabits * 1e6 / 8)

    def flap(self, where: Where, *, down: float, up: float) -> float:
        """Toggle the link of a host again and again: down for `down` seconds, up for `up`
        seconds."""
        return self._on_cable(where, Lab.flap, down, up)

    def _on_cable(self, where: Where, apply_fault: Callable[..., None], *how: object) -> float:
        lab, name = self._cable(where)
        apply_fault(lab, name, *how)
        return _now()

    def mend(self) -> float:
        """Remove the faults of all cables."""
        self._cable(0 if self.nodes else "master")[0].mend()
        return _now()

    # ------------------------------------------------------------ the end

    def sections(self, title: str) -> list[tuple[str, str]]:
        """What the report of a failed test shows: each node's state and last output, and the last
        steps."""
        shown = [
            (f"{title}: {n.name}, which {n.outcome()}", n.tail() or "(nothing yet)")
            for n in self._all_nodes()
        ]
        steps = "\n".join(map(str, self.steps()[-10:]))
        return [*shown, (f"{title}: the last steps", steps)] if steps else shown

    def close(self) -> str:
        """Kill and remove everything. Returns "", or sentences about processes that should have
        ended by themselves, and about worlds that overlapped. Idempotent."""
        if self._closed:
            return ""
        self._closed = True
        try:
            complaints = [*self._leftovers(), steps.overlap(self.steps())]
        finally:
            self._remove()
        return "; ".join(filter(None, complaints))

    def _leftovers(self) -> list[str]:
        """Sentences about processes that outlived their agents, where these ended by themselves or
        by `kill_agent`. Waits LEFTOVER_LIMIT for them to end."""
        sentences = []
        masters = self._should_master_be_gone()
        for node in self.nodes:
            if node.exit_code is None or node.frozen:
                continue
            left = node.pids(masters=masters)
            if left := sorted(processes.await_end(left, LEFTOVER_LIMIT)):
                words = ", ".join(f"{pid} ({processes.command(pid)[:120]})" for pid in left)
                sentences.append(f"{node.name} has ended, but left processes: {words}")
        return sentences

    def _should_master_be_gone(self) -> bool:
        """Whether the job's master should have exited: all agents have ended, and either all of
        them by themselves, or those that the test did not kill with success. Otherwise the master
        may still wait for others."""
        own_ends = [node.exit_code for node in self.nodes if not node.killed]
        if not self._over() or not own_ends or any(node.frozen for node in self.nodes):
            return False
        return len(own_ends) == len(self.nodes) or set(own_ends) == {0}

    def _remove(self) -> None:
        try:
            for node in self._all_nodes():
                node.kill(masters=True)
                if node.group is not None:
                    node.group.close()
        finally:
            shutil.rmtree(self.memory, ignore_errors=True)
            if self.lab is not None:
                self.lab.close()
            self._log.close()
            self._output_watch.close()
            self._step_watch.close()


def _reasons(status: JobStatus) -> list[str]:
    return [status.reason, status.outcome, *(node.reason for node in status.nodes)]


def _pid(status: JobStatus, rank: int) -> int:
    """The pid of this rank; 0: unknown."""
    for node in status.nodes:
        if node.group_rank >= 0 and 0 <= rank - node.first_rank < len(node.pids):
            return node.pids[rank - node.first_rank]
    return 0


def _now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)
