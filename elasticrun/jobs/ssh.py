"""Jobs on hosts that ssh reaches: `elasticrun --hosts`, which starts the agents there and follows
them, is a process of this host that outlives the terminal. What it is told by a signal it tells its
agents.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from elasticrun.core.words import names
from elasticrun.host.runs.layout import RunFolder
from elasticrun.host.system.network import is_this_host
from elasticrun.jobs.backend import NotDone, Submission, submission
from elasticrun.jobs.local import LocalJobs, living
from elasticrun.jobs.rows import JobRow
from elasticrun.wire.messages import Reply, Request


class SshJobs:
    """Hosts that were named. What is done to the process here is what `LocalJobs` does."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._here = LocalJobs(environ)

    def submit(self, run: RunFolder, wanted: Submission) -> str:
        """Start the process that starts the agents."""
        return self._here.submit(run, wanted)

    def resume(self, run: RunFolder) -> str:
        """The same hosts and command again."""
        return self._here.resume(run)

    def scale(self, run: RunFolder, wanted: Request, ask: Callable[[Request], Reply]) -> str:
        """The master sets the number, of the hosts that have an agent."""
        return ask(wanted).reason

    def suspend(self, run: RunFolder) -> str:
        """SIGTERM, which is passed on: agents save a step and leave."""
        return self._here.suspend(run)

    def stop(self, run: RunFolder) -> str:
        """SIGTERM, for one whose master does not answer."""
        return self._here.stop(run)

    def end(self, run: RunFolder) -> None:
        """SIGTERM; agents that are not reached end with their job."""
        self._here.end(run)

    def execute(self, run: RunFolder, node: str, command: Sequence[str]) -> int:
        """By ssh, in the job's working directory; on the first host where none is named. On this
        very host as a child, as its agent is."""
        known = submission(run)
        found = [host for host in known.hosts if node in ("", host, host.rpartition("@")[2])]
        if not found:
            raise NotDone(f"job {known.name} has no host {node}: it has {names(known.hosts)}")
        if is_this_host(found[0]):
            return self._here.execute(run, "", command)
        terminal = ("-t",) if sys.stdin.isatty() else ()
        there = f"cd {shlex.quote(known.workdir)} && exec {shlex.join(command)}"
        words = [*known.ssh, *terminal, found[0], there]
        try:
            return subprocess.run(words, check=False).returncode
        except OSError as wrong:
            raise NotDone(f"{words[0]} cannot be run: {wrong.strerror}") from None

    def jobs(self, rows: Sequence[JobRow]) -> list[JobRow]:
        """Where the hosts do not share the run folder, all that is known is whether the process
        here runs."""
        return [_by_process(replace(row, where="ssh")) for row in self._here.jobs(rows)]


def _by_process(row: JobRow) -> JobRow:
    if row.state != "submitted":
        return row
    try:
        run = RunFolder(Path(row.run))
        runs = living(run)
    except NotDone:
        return row
    # Before the job has begun only launchers write to the console: which host is not reached, say.
    return replace(row, state="running", reason=run.last_line()) if runs else row
