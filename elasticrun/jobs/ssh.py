"""Jobs on hosts that ssh reaches.

One process on this host, `elasticrun --hosts`, starts the agents and follows them. It outlives the
terminal and forwards signals to its agents.
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
from elasticrun.jobs.backend import RequestFailed, Submission, submission
from elasticrun.jobs.local import LocalJobs, living_agents
from elasticrun.jobs.rows import JobRow
from elasticrun.wire.messages import Reply, Request


class SshJobs:
    """The backend of named hosts. `LocalJobs` manages the process on this host."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._here = LocalJobs(environ)

    def submit(self, run: RunFolder, submission: Submission) -> str:
        """Start the process that starts the agents."""
        return self._here.submit(run, submission)

    def resume(self, run: RunFolder) -> str:
        """Start the same command on the same hosts again."""
        return self._here.resume(run)

    def scale(self, run: RunFolder, request: Request, send: Callable[[Request], Reply]) -> str:
        """Only the master's maximum changes: no agent is started on further hosts."""
        return send(request).reason

    def suspend(self, run: RunFolder) -> str:
        """Send SIGTERM, which the process forwards: agents save a step and leave."""
        return self._here.suspend(run)

    def stop(self, run: RunFolder) -> str:
        """Send SIGTERM to a job whose master does not answer."""
        return self._here.stop(run)

    def terminate(self, run: RunFolder) -> None:
        """As `LocalJobs.terminate`, for the process on this host. Agents that its signal does not
        reach end with their job."""
        self._here.terminate(run)

    def execute(self, run: RunFolder, node: str, command: Sequence[str]) -> int:
        """Run it over ssh in the job's working directory, on the first host if none is named. If
        that host is this one, run it as a child process instead."""
        known = submission(run)
        found = [host for host in known.hosts if node in ("", host, host.rpartition("@")[2])]
        if not found:
            raise RequestFailed(f"job {known.name} has no host {node}: it has {names(known.hosts)}")
        if is_this_host(found[0]):
            return self._here.execute(run, "", command)
        terminal = ("-t",) if sys.stdin.isatty() else ()
        there = f"cd {shlex.quote(known.workdir)} && exec {shlex.join(command)}"
        words = [*known.ssh, *terminal, found[0], there]
        try:
            return subprocess.run(words, check=False).returncode
        except OSError as wrong:
            raise RequestFailed(f"{words[0]} cannot be run: {wrong.strerror}") from None

    def jobs(self, rows: Sequence[JobRow]) -> list[JobRow]:
        """The rows of these jobs. If the hosts do not share the run folder, all that is known here
        is whether the process on this host runs."""
        return [_with_process_state(replace(row, where="ssh")) for row in self._here.jobs(rows)]


def _with_process_state(row: JobRow) -> JobRow:
    if row.state != "submitted":
        return row
    try:
        run = RunFolder(Path(row.run))
        runs = living_agents(run)
    except RequestFailed:
        return row
    # Until the job begins, only launchers write to the console, such as which host is unreachable.
    return replace(row, state="running", reason=run.last_line()) if runs else row
