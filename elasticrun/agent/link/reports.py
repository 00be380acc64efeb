"""Sends the state machine's reports to the master, with the newest step and the failed ranks' last
output."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from msgspec import structs

from elasticrun.agent.logs.last_lines import LIMIT
from elasticrun.agent.runtime import Tasks, in_thread
from elasticrun.core.rounds.failures import ECHOES, root_cause
from elasticrun.host.system.sandbox import NoThread
from elasticrun.wire import messages as m

if TYPE_CHECKING:
    from elasticrun.agent.context import NodeContext
    from elasticrun.agent.logs.output import RankOutput
    from elasticrun.agent.snapshots.snapshots import LocalSnapshots
    from elasticrun.agent.workers.progress import Progress


class Reporter:
    """Sends reports through the link, after adding what the state machine does not know."""

    def __init__(
        self,
        node: NodeContext,
        progress: Progress,
        snapshots: LocalSnapshots,
        output: RankOutput,
    ) -> None:
        self._link = node.link
        self._progress = progress
        self._snapshots = snapshots
        self._output = output
        self._tasks = Tasks(node.fatal)

    def send(self, report: m.Report) -> None:
        """Send a report if there is a session. One about failed or stopped ranks gets the newest
        step; the last output of the rank that failed first follows in a message of its own."""
        if isinstance(report, m.RanksFailed | m.Stopped):
            report = structs.replace(report, newest=self._newest())
        self._link.send(report)
        if isinstance(report, m.RanksFailed):
            self._tasks.start(self._send_last_lines(report), "reading what a rank wrote last")

    def close(self) -> None:
        self._tasks.close()

    def _newest(self) -> int:
        """The newest step that a local rank of this round is known to have reached. Sends pending
        progress reports first."""
        self._progress.flush()
        return max(self._progress.newest, self._snapshots.drain.generation.newest())

    async def _send_last_lines(self, report: m.RanksFailed) -> None:
        """Send the last output of the rank that is the root cause, for the master's record. Nothing
        waits for it."""
        cause = root_cause(report.failures)
        if cause is None or cause.kind in ECHOES:
            return
        with contextlib.suppress(TimeoutError, NoThread):
            text = await in_thread(
                lambda: self._output.last_lines(cause.local_rank), limit=LIMIT, name="last-lines"
            )
            if text:
                self._link.send(m.LastLines(report.round, cause.rank, text))
