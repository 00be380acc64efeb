"""Records of incidents as files: `0007.json`, and `0007.md` for people; and at the job's end
`result.json`.

The folder is made with the first record. Each file is replaced in one piece, so that a reader sees
a whole one; a disk that hangs or is full costs files and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import threading
from pathlib import Path
from typing import Final

import msgspec

from elasticrun.core.sight.picture import IncidentRow
from elasticrun.master.outward.report import line, page
from elasticrun.master.outward.result import JobResult
from elasticrun.operator_log import NOTICE
from elasticrun.wire import user_folder

FOLDER: Final = "incidents"

RESULT: Final = "result.json"

MAX_QUEUED: Final = 64
"""Records that wait for the disk; one more is dropped."""

MOST_FOLDERS: Final = 50
"""Folders of jobs that are kept beside this one, where they are in the user's folder."""

logger = logging.getLogger("elasticrun")


class IncidentFiles:
    """Writes what it is given, in a thread."""

    def __init__(self, name: str, log_dir: str, *, tells: bool = False) -> None:
        """Into the folder `name` beside the logs, or, where there are none (""), in the user's run
        folder: of those the newest MOST_FOLDERS are kept. `tells`: people are told of each in a
        line, once, when it is over."""
        self._tells = tells
        self._told = 0  # the number of the last one
        self._name = name
        self._log_dir = log_dir
        self.folder: Path | None = None
        """None before the first record is there."""
        self._queue: queue.Queue[IncidentRow | JobResult | None] = queue.Queue(MAX_QUEUED)
        self._thread: threading.Thread | None = None

    def put(self, row: IncidentRow | JobResult) -> None:
        """Write it, in place of an older state of the same incident; returns at once."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="elasticrun-incidents", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be had
                return
            self._thread = thread
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(row)

    def close(self, limit: float) -> None:
        """Wait `limit` seconds at most for what is to be written yet."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(limit)

    def _run(self) -> None:
        told = False
        while (row := self._queue.get()) is not None:
            try:
                self._write(row)
            except OSError as wrong:
                if not told:
                    logger.warning("the incidents of this job cannot be written: %s", wrong)
                told = True
            if (
                self._tells
                and isinstance(row, IncidentRow)
                and row.over
                and row.number > self._told
            ):
                self._told = row.number
                logger.log(NOTICE, "%s%s", line(row), self._where(row))

    def _where(self, row: IncidentRow) -> str:
        """Where people find it, as they would type it."""
        if self.folder is None:
            return ""
        path = self.folder / f"{row.number:04}.md"
        here = Path.cwd()
        return f": {path.relative_to(here) if path.is_relative_to(here) else path}"

    def _write(self, row: IncidentRow | JobResult) -> None:
        # where nothing has stopped a job, its logs are what torchrun leaves there, and no more
        folder = Path(self._log_dir) / FOLDER / self._name
        if not self._log_dir or (isinstance(row, JobResult) and not folder.is_dir()):
            folder = user_folder.user_folder(os.environ) / FOLDER / self._name
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._log_dir or isinstance(row, JobResult):
                _keep_newest(folder.parent)
        if isinstance(row, JobResult):
            _replace(folder / RESULT, msgspec.json.encode(row))
        else:
            _replace(folder / f"{row.number:04}.json", msgspec.json.encode(row))
            _replace(folder / f"{row.number:04}.md", page(row).encode(errors="replace"))
        self.folder = folder


def read(folder: Path, now: float) -> list[IncidentRow]:
    """All records in it, by number; what cannot be read is left out. `now`: seconds since 1970, to
    which their ages are brought."""
    rows = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("[0-9]*.json")):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                row = msgspec.json.decode(path.read_bytes(), type=IncidentRow)
                since = max(0.0, now - path.stat().st_mtime)
                rows.append(msgspec.structs.replace(row, age=row.age + since))
    return sorted(rows, key=lambda row: row.number)


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(f"{path.suffix}.{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
    os.replace(fresh, path)


def _keep_newest(place: Path) -> None:
    folders = sorted(place.iterdir(), key=lambda one: one.stat().st_mtime)
    for old in folders[:-MOST_FOLDERS]:
        shutil.rmtree(old, ignore_errors=True)
