"""Slurm jobs: a batch script, as `elasticrun render slurm` prints it, in a run folder on a disk
that the nodes share.

A running job's state comes from its master, a pending job's from squeue.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace

from elasticrun.core.words import plural
from elasticrun.host.runs.layout import ENDED, RunFolder, RunResult, replace_file
from elasticrun.jobs.backend import RequestFailed, Submission, submission, write_submission
from elasticrun.jobs.rows import JobRow
from elasticrun.wire.messages import Reply, Request

SCRIPT: Final = "batch.sh"

CALL_LIMIT: Final = 60.0
"""Seconds allowed for one Slurm command; a busy controller is slow."""

LEAVE_LIMIT: Final = 600.0
"""Seconds that a job may take to save and exit; Slurm's KillWait may end it sooner."""

POLL_EVERY: Final = 0.5
"""Seconds between two polls of the queue; Slurm sends no notifications."""

SQUEUE_FORMAT: Final = "%i|%T|%D|%S|%r"
"""Format of squeue's lines, valid in all its versions: number, state, nodes, start time, reason."""


class QueueEntry(NamedTuple):
    """A pending or running job, as squeue lists it."""

    state: str
    nodes: int
    began: str  # actual or expected start in local time, as in 2026-11-26T02:34:05
    reason: str

    @property
    def is_held(self) -> bool:
        """Whether it stays pending until somebody releases it."""
        # JobHeldUser, JobHeldAdmin, "job requeued in held state"
        return self.state == "PENDING" and "held" in self.reason.lower()


class SlurmJobs:
    """The Slurm cluster whose commands are installed here."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def submit(self, run: RunFolder, submission: Submission) -> str:
        """Pass the script to sbatch, with --requeue, because suspend requeues the job."""
        path = run.path / SCRIPT
        try:
            replace_file(path, submission.script.encode())
            path.chmod(0o700)
        except OSError as wrong:
            raise RequestFailed(f"the run folder cannot be written: {wrong}") from None
        words = ("--parsable", "--requeue", f"--comment=elasticrun:{submission.name}", str(path))
        number = self._call("sbatch", *words, cwd=submission.workdir).split(";")[0]
        write_submission(run, replace(submission, number=number))
        return f"job {submission.name} is submitted as Slurm job {number}"

    def resume(self, run: RunFolder) -> str:
        """Release the job, or submit the same script again if Slurm no longer has it."""
        known = submission(run)
        queued = self._queue().get(known.number)
        if queued is None:
            result = run.result()
            if result is not None and result.state == "succeeded":
                raise RequestFailed(f"job {known.name} has succeeded: submit it again to rerun it")
            run.prepare_restart()
            return self.submit(run, known)
        if not queued.is_held:
            raise RequestFailed(
                f"job {known.name} is not suspended: its state in Slurm is {queued.state}"
            )
        self._call("scontrol", "release", known.number)
        return f"job {known.name} is released (Slurm job {known.number})"

    def scale(self, run: RunFolder, request: Request, send: Callable[[Request], Reply]) -> str:
        """Only the master's maximum changes: Slurm adds no nodes to a running job."""
        answer = send(request).reason
        known = submission(run)
        has = queued.nodes if (queued := self._queue().get(known.number)) else 0
        if 0 < has < request.number:
            answer += f"; its allocation has {plural(has, 'node')}, and Slurm adds no more"
        return answer

    def suspend(self, run: RunFolder) -> str:
        """Requeue and hold the job: Slurm sends SIGTERM, and the nodes save and leave. A pending
        job is only held."""
        known = submission(run)
        queued = self._queue().get(known.number)
        if queued is None:
            raise RequestFailed(f"Slurm no longer has job {known.number} ({known.name})")
        again = f"continue with `elasticrun resume {known.name}`"
        if queued.state == "PENDING":
            self._call("scontrol", "hold", known.number)
            return f"job {known.name} is held before its start; {again}"
        if (state := run.state()) in ("succeeded", "failed", "interrupted", "stopped"):
            raise RequestFailed(f"job {known.name} has ended: {state}")
        self._call("scontrol", "requeuehold", known.number)
        if not self._wait_until(known.number, lambda now: now is None or now.is_held, LEAVE_LIMIT):
            raise RequestFailed(f"job {known.name} is still leaving: see `elasticrun list`")
        result = run.result()
        step = result.saved if result and result.state == "saved" else -1
        return f"job {known.name} is suspended{f' at step {step}' if step >= 0 else ''}; {again}"

    def stop(self, run: RunFolder) -> str:
        """Run scancel, for a job whose master does not answer or does not exist yet."""
        known = submission(run)
        if known.number not in self._queue():
            raise RequestFailed(f"Slurm no longer has job {known.number} ({known.name})")
        self._call("scancel", known.number)
        self._record_cancellation(run, known)
        return f"job {known.name} is cancelled (Slurm job {known.number})"

    def terminate(self, run: RunFolder) -> None:
        """Run scancel; Slurm kills the remaining processes after its KillWait."""
        known = submission(run)
        if known.number in self._queue():
            self._call("scancel", known.number)
            if not self._wait_until(known.number, lambda now: now is None, LEAVE_LIMIT):
                raise RequestFailed(
                    f"Slurm job {known.number} does not end: use scancel --signal=KILL"
                )
        self._record_cancellation(run, known)

    def execute(self, run: RunFolder, node: str, command: Sequence[str]) -> int:
        """Run the command as a job step that overlaps the job's own."""
        known = submission(run)
        where = f"--nodelist={node}" if node else "--relative=0"
        words = ["srun", f"--jobid={known.number}", "--overlap", "-N1", "-n1", where, *command]
        try:
            done = subprocess.run(words, cwd=known.workdir, env=self._environ, check=False)
        except OSError as wrong:
            raise RequestFailed(f"srun cannot be run: {wrong.strerror}") from None
        return done.returncode

    def jobs(self, rows: Sequence[JobRow]) -> list[JobRow]:
        """Update the rows from squeue; unchanged if squeue fails."""
        # Slurm may have requeued a job in any other state.
        if all(row.state in ("succeeded", "stopped") for row in rows):
            return list(rows)
        try:
            queue = self._queue()
        except RequestFailed:
            return list(rows)
        return [_update_row(row, queue) for row in rows]

    # ------------------------------------------------------------ Slurm's commands

    def _queue(self) -> dict[str, QueueEntry]:
        """This user's pending and running jobs, by job number."""
        found = {}
        for line in self._call("squeue", "--me", "-h", "-o", SQUEUE_FORMAT).splitlines():
            number, state, nodes, began, reason = (line.split("|", 4) + [""] * 4)[:5]
            count = int(nodes) if nodes.isdecimal() else 0
            found[number] = QueueEntry(state, count, began, reason)
        return found

    def _wait_until(
        self, number: str, good: Callable[[QueueEntry | None], bool], limit: float
    ) -> bool:
        end = time.monotonic() + limit
        while not good(self._queue().get(number)):
            if time.monotonic() > end:
                return False
            time.sleep(POLL_EVERY)
        return True

    def _call(self, *words: str, cwd: str | None = None) -> str:
        """Run a Slurm command and return its output. Raises RequestFailed with the command's error
        message."""
        try:
            done = subprocess.run(
                words,
                cwd=cwd or None,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CALL_LIMIT,
                check=False,
            )
        except FileNotFoundError:
            raise RequestFailed(
                f"there is no {words[0]} here: is this a login node of Slurm?"
            ) from None
        except (OSError, subprocess.TimeoutExpired) as wrong:
            raise RequestFailed(f"{words[0]} cannot be run: {wrong}") from None
        if done.returncode:
            why = " ".join(done.stderr.split())[:500]
            raise RequestFailed(f"{words[0]} refuses: {why or f'exit code {done.returncode}'}")
        return done.stdout.strip()

    def _record_cancellation(self, run: RunFolder, known: Submission) -> None:
        """Record a job without a result, or one that had saved, as stopped: if it was cancelled in
        the queue, no master reports its end. Raises OSError."""
        result = run.result() or RunResult(job=known.name, state="saved", ended=time.time())
        if result.state == "saved":
            run.write_result(replace(result, state="stopped", reason="cancelled in Slurm"))


def _update_row(row: JobRow, queue: Mapping[str, QueueEntry]) -> JobRow:
    try:
        number = submission(RunFolder(Path(row.run))).number
    except RequestFailed:
        return row
    queued = queue.get(number)
    if queued is None:
        is_lost = row.state not in ENDED
        return replace(row, state="lost", reason="Slurm no longer has it") if is_lost else row
    if queued.is_held:
        return replace(row, state="suspended", reason=f"held in Slurm as job {number}")
    if queued.state == "PENDING":
        return replace(row, state="submitted", reason=f"waits in Slurm: {queued.reason}")
    begins = row.state in ("saved", "lost", "submitted")  # requeued, or started the first time
    if row.state in ("failed", "interrupted") and (result := RunFolder(Path(row.run)).result()):
        begins = queued.began > time.strftime("%FT%T", time.localtime(result.ended))
    return replace(row, state="waiting", reason="") if begins else row
