"""Opens the run folder of a job: creates one, or reuses an existing one.

A master locks a file in the folder for its lifetime, so a folder given by `--run-dir` belongs to
one live job at a time. The next run in it continues with the files of the previous one or, with
`--fresh`, moves them to `previous/`.
"""

from __future__ import annotations

import contextlib
import os
from itertools import zip_longest
from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace

from elasticrun.core.words import plain
from elasticrun.host.runs import layout
from elasticrun.host.runs.index import keep_newest, make_run
from elasticrun.host.runs.layout import JobRecord, RunFolder, lock_folder
from elasticrun.wire.types import EntryKind

FILES: Final = (EntryKind.SCRIPT, EntryKind.RUN_PATH)
"""Kinds of programs whose target is a file, whose path may be written in several ways."""

MAX_WORD_CHARS: Final = 200
"""Maximum characters of a word in a difference."""


class RunRefused(Exception):
    """The folder cannot be used for this job."""


class OpenRun:
    """The run folder of a running job, and its record. `lock`: a descriptor that holds the folder's
    lock until `close`; -1: none."""

    def __init__(self, folder: RunFolder, job: JobRecord, lock: int = -1) -> None:
        self.folder = folder
        self.job = job
        self._lock = lock

    def update_record(self, job: JobRecord) -> None:
        """Replace the job's record. Raises OSError."""
        self.folder.write_job(job)
        self.job = job

    def close(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class RankProgram(NamedTuple):
    """What each rank runs."""

    words: tuple[str, ...] = ()
    """As in `JobRecord.program`."""

    workdir: str = ""

    def file(self) -> str:
        """The absolute path of the script, without links."""
        return os.path.realpath(os.path.join(self.workdir, self.words[1]))


UNKNOWN: Final = RankProgram()


def already_succeeded(at: Path, program: RankProgram = UNKNOWN) -> str:
    """A message if a job has already succeeded in this folder and is not to run again; else "".
    Raises RunRefused if that job ran another program than `program`."""
    folder = RunFolder(at)
    result, job = folder.result(), folder.job()
    if result is None or result.state != "succeeded":
        return ""
    name = job.name if job else result.job
    if job is not None and (other := _difference(RankProgram(job.program, job.workdir), program)):
        raise RunRefused(
            f"job {name} has already succeeded in {at} with another program: {other}; start "
            "over there (--fresh), or use another folder (--run-dir)"
        )
    step = f" at step {result.step}" if result.step >= 0 else ""
    return f"job {name} has already succeeded{step} (in {at}); --fresh runs it again"


def _difference(before: RankProgram, now: RankProgram) -> str:
    """How the earlier job's program differs from the program now, as a clause; "" if they are the
    same or one is unknown."""
    if not (before.words and now.words):
        return ""
    (was, target, *had), (kind, wanted, *has) = before.words, now.words
    if was != kind:
        return f"it ran the {was} {_short(target)}, this is the {kind} {_short(wanted)}"
    if kind in FILES:
        files = before.file(), now.file()
        target, wanted = files if target == wanted or files[0] == files[1] else (target, wanted)
    if target != wanted:
        return f"it ran the {was} {_short(target)}, this is {_short(wanted)}"
    for at, (one, other) in enumerate(zip_longest(had, has), start=1):
        if one != other:
            return f"its argument {at} was {_argument(one)}, here it is {_argument(other)}"
    return ""


def _argument(word: str | None) -> str:
    return "none" if word is None else _short(repr(word))


def _short(text: str) -> str:
    return plain(text if len(text) <= MAX_WORD_CHARS else f"{text[:MAX_WORD_CHARS]}...")


def open_new(root: Path, job: JobRecord, launch: str, stem: str = "") -> OpenRun:
    """Open the run folder of this launch in `root`, for its first master or a later one. Its name
    starts with `stem`, or else with the job's name. Raises OSError."""
    folder, lock = RunFolder(make_run(root, stem or job.name, launch)), -1
    with contextlib.suppress(BlockingIOError):  # an earlier master has not exited yet
        lock = lock_folder(folder.path)
    opened = _initialize(folder, job, lock, is_successor=True)
    with contextlib.suppress(OSError):
        keep_newest(root)
    return opened


def open_named(
    root: Path,
    job: JobRecord,
    launch: str,
    at: Path,
    *,
    stem: str = "",
    fresh: bool,
    is_successor: bool,
) -> OpenRun:
    """Open the folder `at`, and list it in `root` under the name that `open_new` would use.
    `fresh`: archive the files of an earlier run. `is_successor`: an earlier master of the same job
    has used it. Raises RunRefused if another job runs in it, OSError if it is unusable."""
    make_run(root, stem or job.name, launch, at)
    folder = RunFolder(at)
    before = folder.job()
    try:
        lock = lock_folder(at)
    except BlockingIOError:
        who = f"job {before.name} (process {before.pid} of {before.host})" if before else "a job"
        raise RunRefused(
            f"{who} runs in {at}: stop it first, or use another folder (--run-dir)"
        ) from None
    try:
        if fresh and not (is_successor or _same_launch(before, job)):
            archive(at)
        return _initialize(folder, job, lock, is_successor=is_successor)
    except OSError:
        os.close(lock)
        raise


def _same_launch(before: JobRecord | None, job: JobRecord) -> bool:
    """Whether the folder's record is from an earlier master of the same launching process."""
    return before is not None and before.process == job.process


def _initialize(
    folder: RunFolder, job: JobRecord, lock: int = -1, *, is_successor: bool = False
) -> OpenRun:
    before = folder.job()
    if before is not None:
        if (
            is_successor or _same_launch(before, job) or not before.pid
        ):  # a later master of the job, or a submitted job
            known = (
                "began", "first_began", "attempt", "resumed_at",
                "formed", "git_commit", "versions", "endpoint",
            )  # fmt: skip
            job = replace(job, **{name: getattr(before, name) for name in known})
        else:
            job = folder.next_start(before, job)
    opened = OpenRun(folder, job, lock)
    opened.update_record(job)
    return opened


def archive(at: Path) -> None:
    """Move the files of an earlier run to `previous/N`. Raises OSError."""
    if not (at / layout.JOB).exists():
        return  # no earlier run
    place = at / layout.PREVIOUS
    place.mkdir(exist_ok=True)
    numbers = [int(path.name) for path in place.iterdir() if path.name.isdecimal()]
    into = place / str(max(numbers, default=0) + 1)
    into.mkdir()
    for name in layout.OF_A_RUN:
        if os.path.lexists(at / name):
            (at / name).rename(into / name)
