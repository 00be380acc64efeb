"""The master's files in the job's run folder (`host.runs`): the job's record, events, metrics,
incidents, the last failure, and the result.

Each incident is `0007.json` and, for people, `0007.md`. A thread writes, so a disk that hangs or is
full costs only these files. The first failed write is logged as a warning.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from elasticrun.core.events import Note
from elasticrun.core.sight.causes import FAILURES
from elasticrun.core.sight.picture import IncidentRow
from elasticrun.host.log import NOTICE
from elasticrun.host.runs import layout
from elasticrun.host.runs.index import mark_continued, runs_root
from elasticrun.host.runs.layout import KeptEvent, RunResult, replace_file
from elasticrun.host.runs.opening import OpenRun
from elasticrun.master.outward.appended import NUMBER, Appended, ProgressFile, ProgressRow
from elasticrun.master.outward.record import git_commit, versions
from elasticrun.master.outward.report import error_page, line, page
from elasticrun.wire.messages import MAX_METRIC_ROWS, MAX_METRICS, Metrics

MAX_QUEUED: Final = 1024
"""Maximum number of queued writes; further ones are dropped."""

MAX_EVENTS_BYTES: Final = 16 * 1024 * 1024
"""Size in bytes of `events.jsonl` beyond which its older half is removed."""

logger = logging.getLogger("elasticrun")


class RunFiles:
    """Writes into the run folder, in a thread."""

    def __init__(self, opens: Callable[[], OpenRun], log_dir: str, *, logs: bool = False) -> None:
        """`opens`: opens the folder, or raises OSError; called in the thread at each write until it
        succeeds. `log_dir`: the folder of the logs, "" for none; incidents are written below it if
        it is outside the run folder. `logs`: log a line about each incident, when ranks run again
        or it is over."""
        self._opens = opens
        self._logs = logs
        self._logged = 0  # number of the last incident that was logged
        self._log_dir = log_dir
        self._run: OpenRun | None = None
        self._events: Appended | None = None
        self._progress: ProgressFile | None = None
        self._held: ProgressRow | None = None  # dropped if rank 0's metrics follow
        self._metrics_round = -1  # the last round in which rank 0 reported metrics
        self._has_warned_of_drops = self._has_warned_of_columns = False
        self._has_failed = False
        self._closed = False
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_QUEUED)
        self._thread: threading.Thread | None = None

    @property
    def folder(self) -> str:
        """The run folder; "" before it is open."""
        return "" if self._run is None else str(self._run.folder.path)

    # ------------------------------------------------------------ the loop's side: returns at once

    def create(self) -> None:
        """Make sure that the thread runs; the first write opens the folder."""
        self._enqueue(lambda: None)

    def formed(self, endpoint: str) -> None:
        """Add to `job.json` what is known at the first round."""
        self._enqueue(partial(self._write_formed, endpoint, time.time()))

    def tensorboard(self, url: str) -> None:
        """Write TensorBoard's URL to `job.json`; "": it exited. May be called from any thread."""
        self._enqueue(partial(self._write_tensorboard, url))

    def noted(self, note: Note) -> None:
        """Write a note to `events.jsonl`."""
        self._enqueue(partial(self._write_note, note, time.time()))

    def metrics(self, report: Metrics) -> None:
        """Write rank 0's metrics to `progress.csv`."""
        self._metrics_round, self._held = report.round.number, None
        self._enqueue(partial(self._write_metrics, report, time.time()))

    def stepped(self, number: int, step: int) -> None:
        """Training has reached this step in round `number`: written as a row at the next step,
        unless rank 0 reports metrics in this round."""
        if number != self._metrics_round:
            self._write_held_row()
            self._held = ProgressRow(time.time(), number, step, {})

    def began(self, step: int) -> None:
        """The job's first step shows which runs it continues: their results say so from now on."""
        self._enqueue(partial(self._mark_continued, step))

    def _write_held_row(self) -> None:
        if self._held is not None:
            self._enqueue(partial(self._write_progress, [self._held]))
            self._held = None

    def filed(self, row: IncidentRow) -> None:
        """Write an incident, replacing its older version."""
        self._enqueue(partial(self._write_incident, row))

    def over(self, result: RunResult) -> None:
        """Write the job's result."""
        self._write_held_row()
        self._enqueue(partial(self._write_result, result))

    def close(self, limit: float) -> None:
        """Accept no more writes, and wait `limit` seconds at most for the queued ones."""
        self._closed = True
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(limit)

    def _enqueue(self, write: Callable[[], None]) -> None:
        if self._closed:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="elasticrun-run-folder", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can start
                return
            self._thread = thread
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(write)

    # ------------------------------------------------------------ in the thread

    def _work(self) -> None:
        while (write := self._queue.get()) is not None:
            try:
                write()
            except (OSError, ValueError) as wrong:  # ValueError: text that cannot be encoded
                if not self._has_failed:
                    logger.warning("cannot write to the run folder of this job: %s", wrong)
                self._has_failed = True

    def _open(self) -> OpenRun:
        if self._run is None:
            self._run = self._opens()
        return self._run

    def _write_formed(self, endpoint: str, now: float) -> None:
        run = self._open()
        job = replace(
            run.job,
            endpoint=endpoint,
            formed=run.job.formed or now,
            git_commit=run.job.git_commit or git_commit(run.job.workdir),
            versions=versions(),
        )
        run.update_record(job)

    def _write_tensorboard(self, url: str) -> None:
        run = self._open()
        run.update_record(replace(run.job, tensorboard=url))

    def _write_note(self, note: Note, now: float) -> None:
        if self._events is None:
            self._events = Appended(self._open().folder.path / layout.EVENTS, MAX_EVENTS_BYTES)
        row = KeptEvent(note.number, now, note.level, note.text)
        self._events.add(msgspec.json.encode(row) + b"\n")

    def _mark_continued(self, step: int) -> None:
        with contextlib.suppress(OSError):  # without a home directory
            mark_continued(runs_root(os.environ), self._open().folder, step)

    def _write_metrics(self, report: Metrics, now: float) -> None:
        rows = []
        for row in report.rows:
            pairs = zip(report.names, row.values, strict=False)
            values = {name: value for name, value in pairs if NUMBER.fullmatch(value)}
            rows.append(ProgressRow(now - row.age, report.round.number, row.step, values))
        self._write_progress(rows)
        if report.dropped and not self._has_warned_of_drops:
            self._has_warned_of_drops = True
            logger.warning(
                "progress.csv is incomplete: the script reports more than %d rows per second",
                MAX_METRIC_ROWS,
            )

    def _write_progress(self, rows: list[ProgressRow]) -> None:
        if self._progress is None:
            self._progress = ProgressFile(self._open().folder.path / layout.PROGRESS)
        if (over := self._progress.add(rows)) and not self._has_warned_of_columns:
            self._has_warned_of_columns = True
            logger.warning("progress.csv has %d columns, and no column for %s", MAX_METRICS, over)

    def _write_incident(self, row: IncidentRow) -> None:
        folder = self._incidents(self._open())
        replace_file(folder / f"{row.number:04}.json", msgspec.json.encode(row))
        replace_file(folder / f"{row.number:04}.md", page(row).encode(errors="replace"))
        if text := error_page(row, time.time() - row.age):
            replace_file(self._open().folder.path / layout.ERROR, text.encode(errors="replace"))
        by_request = row.ended and row.cause not in FAILURES
        runs = row.over or row.restarted >= 0.0  # log it at the restart, not after the next failure
        if self._logs and runs and row.number > self._logged and not by_request:
            self._logged = row.number
            logger.log(NOTICE, "%s: %s", line(row), _relative(folder / f"{row.number:04}.md"))

    def _incidents(self, run: OpenRun) -> Path:
        """The incidents' folder, created if missing; if it is beside the logs, the run folder gets
        a link to it."""
        own = run.folder.path / layout.INCIDENTS
        logs = Path(self._log_dir)
        if self._log_dir and not logs.is_relative_to(run.folder.path):
            place = logs / layout.INCIDENTS / run.folder.path.name
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                own.symlink_to(place, target_is_directory=True)
            return place
        own.mkdir(mode=0o700, exist_ok=True)
        return own

    def _write_result(self, result: RunResult) -> None:
        self._open().folder.write_result(result)


def _relative(path: Path) -> Path:
    """The path relative to the working directory, if possible."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def read(folder: Path, now: float) -> list[IncidentRow]:
    """Read all incidents in this folder, oldest first; unreadable ones are left out. `now`: seconds
    since 1970, for their ages."""
    rows = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("[0-9]*.json")):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                row = msgspec.json.decode(path.read_bytes(), type=IncidentRow)
                since = max(0.0, now - path.stat().st_mtime)
                rows.append(replace(row, age=row.age + since))
    return sorted(rows, key=lambda row: -row.age)
