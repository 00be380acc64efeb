"""Runs the user's health command (--health-cmd) again and again.

Each run is a child process of its own (`host/doctor/command_child.py`), which ends with this agent.
The first run decides whether the node joins. Later ones start every --health-cmd-interval seconds,
and at once when a rank fails, so that the verdict comes while the failure is still being handled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from typing import TYPE_CHECKING, Final

from elasticrun.agent.runtime import Tasks, in_thread
from elasticrun.core.health.verdicts import CommandJudge, CommandRun, CommandVerdict
from elasticrun.host.accelerators.child_output import NoAnswer, json_of
from elasticrun.host.doctor import command_child
from elasticrun.host.system.processes import start_time
from elasticrun.host.system.sandbox import NoThread

if TYPE_CHECKING:
    from elasticrun.agent.context import NodeContext
    from elasticrun.agent.health.reports import HealthReporter
    from elasticrun.wire.messages import Start

EXTRA: Final = command_child.KILL_LIMIT + 5.0
"""Seconds beyond the time limit of a run for the start and the end of its child."""

_SOURCE: Final = "command"


class HealthCommand:
    """The health command of one agent; no-op without one."""

    def __init__(self, node: NodeContext, reporter: HealthReporter) -> None:
        self._plan = node.launch.health_command
        self._reporter = reporter
        self._judge = CommandJudge(self._plan.timeout)
        self._tasks = Tasks(node.fatal)
        self._first: asyncio.Future[CommandVerdict] | None = None
        self._due = asyncio.Event()
        self._left: dict[int, int | None] = {}  # processes that survived SIGKILL: start times

    def start(self) -> None:
        """Start the first run."""
        if self._plan.command:
            self._first = asyncio.get_running_loop().create_future()
            self._tasks.start(self._run_repeatedly(self._first), "the health command")

    async def why_unfit(self) -> str:
        """Wait for the first run; why no rank may start on this node, "" if ranks may."""
        if self._first is None:
            return ""
        verdict = await self._first
        return verdict.why if verdict.state == "unhealthy" else ""

    def round_began(self, start: Start) -> None:
        """No-op: a run takes longer than the start of ranks."""

    def ranks_stopping(self) -> None:
        """Examine the node now: a rank may have failed because of it."""
        self._due.set()

    def ranks_gone(self, *, done: bool) -> None:
        """No-op."""

    def close(self) -> None:
        """Stop. A run in progress ends with this process, or with the sweep before."""
        self._tasks.close()

    async def _run_repeatedly(self, first: asyncio.Future[CommandVerdict]) -> None:
        pause = random.uniform(0.0, self._plan.interval)  # nodes that start together spread
        while True:
            self._due.clear()
            verdict = self._judge.judge(await self._run())
            if not first.done():
                first.set_result(verdict)
            fault = verdict.why if verdict.state == "unhealthy" else ""
            notices = (verdict.why,) if verdict.state == "unknown" else ()
            self._reporter.found(_SOURCE, fault=fault, notices=notices)
            if fault:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), pause)
            pause = self._plan.interval

    async def _run(self) -> CommandRun:
        """Run the command once, to its end or its time limit."""
        if any(began is not None and start_time(pid) == began for pid, began in self._left.items()):
            return CommandRun(None, "", late=True)  # the last run is still stuck in the kernel
        limit = self._plan.timeout
        command = command_child.command(limit, self._plan.command)
        try:
            answer = await in_thread(
                lambda: json_of(command, os.environ, limit + EXTRA, lifeline=True),
                name="health-command",
            )
        except (NoAnswer, NoThread) as why:
            return CommandRun(None, str(why))
        code, line, left = answer.get("code"), answer.get("line"), answer.get("left")
        pids = [pid for pid in left if isinstance(pid, int)] if isinstance(left, list) else []
        self._left = {pid: start_time(pid) for pid in pids}
        if code is None:
            return CommandRun(None, "", late=True)
        return CommandRun(code if isinstance(code, int) else None, str(line or ""))
