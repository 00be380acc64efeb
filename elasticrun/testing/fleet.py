"""What runs for a job under test: its agents, the master that a test may start by hand, the hosts
they are on; how they come, what is seen of them, and that nothing stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Final, Literal

from elasticrun.testing import page, processes
from elasticrun.testing.cgroups import Group
from elasticrun.testing.hosts import Lab
from elasticrun.testing.node import ELASTICRUN, Node, environment
from elasticrun.testing.plan import Plan
from elasticrun.testing.steps import STEP_LOG, STEP_NODE, Deadline, Step, StepLog, Watch, overlap
from elasticrun.wire.messages import JobStatus

TIMEOUT: Final = 60.0
"""Seconds that anything awaited may take: what a busy machine may need, not what it should."""

LEFTOVER_LIMIT: Final = 30.0
"""Seconds after the end of an agent in which all that it started must be gone."""

Where = int | Literal["master"]


class JobError(AssertionError):
    """The job did not do what a test waited for."""


mistake = methodcaller("errisinstance", (JobError, ValueError))
"""For pytest: whether an error is what a test has done or found, not a defect of these modules."""

__tracebackhide__ = mistake  # pytest shows the line of the test


def variables(env: Mapping[str, object] | None) -> dict[str, str]:
    """Variables as a process wants them."""
    return {name: str(value) for name, value in (env or {}).items()}


class Fleet:
    """The nodes of one job; `nodes` are those that were started so far, by their number."""

    def __init__(self, plan: Plan, scratch: Path, *, hosts: bool, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        """Seconds that anything awaited may take where no other limit is given."""
        self.nodes: list[Node] = []
        self.master_node: Node | None = None
        """The master that was started by hand."""
        self._plan = plan
        self._scratch = scratch
        self._consoles = scratch / "consoles"
        self._log_folder = scratch / "steps"
        for folder in (self._consoles, self._log_folder):
            folder.mkdir()
        self._log = StepLog(str(self._log_folder / "steps.jsonl"))
        self._said = Watch()  # what agents, ranks and masters say
        self._said.folder(str(self._consoles))
        self._stepped = Watch()
        self._stepped.folder(str(self._log_folder))
        self._runs: dict[Path, None] = {}
        self._closed = False
        self.lab: Lab | None = Lab(scratch) if hosts else None
        """The hosts and their switch, where there are some."""

    # ------------------------------------------------------------ nodes come

    def begin(
        self,
        count: int,
        *,
        master: bool,
        master_options: Sequence[str],
        together: bool,
    ) -> None:
        """Start the master, then `count` nodes; called once by `start`."""
        if master:
            self.master_node = self._made("master")
            self._plan.place(self.master_node.host)
            command = self._plan.master_command(master_options)
            self._start(self.master_node, command, {})
            self._await_master(self.master_node)
        for number in range(count):
            node = self.add_node()
            if not master and number == (count - 1 if together else 0):
                self._await_master(node)

    def add_node(
        self,
        *,
        options: Sequence[str] = (),
        env: Mapping[str, object] | None = None,
        nproc_per_node: str | int | None = None,
    ) -> Node:
        """Start one more agent, on a host of its own where nodes have hosts; the new node."""
        node = self._made(f"node{len(self.nodes)}")
        if not self.nodes and self.master_node is None:
            self._plan.place(node.host)
        self.nodes.append(node)
        command = self._plan.agent_command(
            node.name, options, None if nproc_per_node is None else str(nproc_per_node)
        )
        node.command = command
        node.env = variables(env)
        if self._plan.cpus is not None or self._plan.memory is not None:
            node.group = Group(node.name)
            node.group.cpus(self._plan.cpus)
            node.group.memory(self._plan.memory)
        self._start(node, command, node.env)
        return node

    def restart_node(self, number: int) -> Node:
        """Start the agent of a node that has ended again: the same node, a new life."""
        node = self._node(number)
        if node.exit_code is None:
            raise ValueError(f"node {number} still runs: kill it before it is started again")
        if node.off and self.lab is not None:
            self.lab.plug(node.name)
            node.off = False
        self._start(node, node.command, node.env)
        return node

    def _made(self, name: str) -> Node:
        console = self._consoles / f"{name}.txt"
        console.touch()
        host = self.lab.add(name) if self.lab else None
        return Node(name, f"{self._plan.job_id}.{name}", console, host)

    def _start(self, node: Node, command: Sequence[str], env: Mapping[str, str]) -> None:
        own = self._scratch / (node.name if self.lab else "host")
        told = {**self._plan.env, **env, STEP_LOG: self._log.path}
        if node in self.nodes:
            told[STEP_NODE] = str(self.nodes.index(node))
        environ = environment(own, node.mark, told)
        folder = page.run_folder(own / "run")
        if folder not in self._runs:
            self._runs[folder] = None
            self._said.folder(str(folder))
        prefix = self.lab.prefix(node.name) if self.lab else []
        node.start([*ELASTICRUN, *command], environ, prefix)
        self._said.process(node.pid)
        self._stepped.process(node.pid)

    def _await_master(self, node: Node) -> None:
        deadline = Deadline(self.timeout)
        while True:
            ended = node.exit_code
            if page.masters(self._runs):
                return
            if ended is not None or deadline.over():
                how = "no master serves" if ended is None else f"{node.name} {node.outcome()}"
                raise JobError(f"the job did not start: {how}; it said:\n{node.tail()}")
            self._said.wait(deadline.left())

    # ------------------------------------------------------------ what is seen

    def status(self) -> JobStatus:
        """The job as its master sees it. JobError where no master answers."""
        try:
            return page.status(self._runs)
        except page.NoAnswer as error:
            raise JobError(str(error)) from None

    def steps(self) -> list[Step]:
        """What the ranks have written with `elasticrun.testing.step` so far."""
        self._log.read()
        return list(self._log.steps)

    def output(self, number: Where) -> str:
        """What a node's agent and ranks have written to their standard streams so far."""
        return self._named(number).output()

    # ------------------------------------------------------------ for those who do things to it

    def _over(self) -> bool:
        return bool(self.nodes) and all(node.exit_code is not None for node in self.nodes)

    def _node(self, number: int) -> Node:
        if not 0 <= number < len(self.nodes):
            raise ValueError(f"there is no node {number}: {len(self.nodes)} were started, from 0")
        return self.nodes[number]

    def _named(self, where: Where) -> Node:
        if where != "master":
            return self._node(where)
        if self.master_node is None:
            raise ValueError("no master was started by hand: start the job with master=True")
        return self.master_node

    def _cable(self, where: Where) -> tuple[Lab, str]:
        if self.lab is None:
            raise ValueError("nodes on one host have no cables: start the job with hosts=True")
        return self.lab, self._named(where).name

    # ------------------------------------------------------------ the end

    def sections(self, title: str) -> list[tuple[str, str]]:
        """What a failing test shows: how each node stands, and what it said last."""
        everybody = [*self.nodes, *([self.master_node] if self.master_node else [])]
        shown = [
            (f"{title}: {n.name}, which {n.outcome()}", n.tail() or "(nothing yet)")
            for n in everybody
        ]
        steps = "\n".join(map(str, self.steps()[-10:]))
        return [*shown, (f"{title}: the last steps", steps)] if steps else shown

    def close(self) -> str:
        """End everything and remove it; what should have ended by itself before, in a sentence."""
        if self._closed:
            return ""
        self._closed = True
        try:
            complaints = [*self._leftovers(), overlap(self.steps())]
        finally:
            self._remove()
        return "; ".join(filter(None, complaints))

    def _leftovers(self) -> list[str]:
        """What has outlived agents that ended, by themselves or by `kill_agent`."""
        told = []
        masters = self._told_outcome()
        for node in self.nodes:
            if node.exit_code is None or node.frozen:
                continue
            left = node.pids(masters=masters)
            if left := sorted(processes.await_end(left, LEFTOVER_LIMIT)):
                words = ", ".join(f"{pid} ({processes.command(pid)[:120]})" for pid in left)
                told.append(f"{node.name} has ended, but left processes: {words}")
        return told

    def _told_outcome(self) -> bool:
        """Whether the job's master has no reason to live: it outlives its agent while it serves
        others, but here all agents ended by themselves, or those that the test had not killed with
        success, of which they tell the master."""
        own_ends = [node.exit_code for node in self.nodes if not node.killed]
        if not self._over() or not own_ends or any(node.frozen for node in self.nodes):
            return False
        return len(own_ends) == len(self.nodes) or set(own_ends) == {0}

    def _remove(self) -> None:
        try:
            for node in [*self.nodes, *([self.master_node] if self.master_node else [])]:
                node.kill(masters=True)
                if node.group is not None:
                    node.group.close()
        finally:
            if self.lab is not None:
                self.lab.close()
            self._log.close()
            self._said.close()
            self._stepped.close()
