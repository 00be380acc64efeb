"""Finds, lists and removes the run folders of a user on this host.

A run folder that the user chose (`--run-dir`) has a link in the user's root. It is found like the
others, and removing it removes only the link.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from elasticrun.core.words import did_you_mean
from elasticrun.host.runs.layout import ENDED, JOB, RunFolder
from elasticrun.host.system.processes import home
from elasticrun.wire import env

MAX_RUNS: Final = 4096
"""Maximum number of folders that are read: the newest."""

MAX_ENDED: Final = 200
"""Maximum number of folders of ended jobs that are kept; a new job displaces the oldest."""

MAX_NAME_CHARS: Final = 64
"""Maximum characters of a job's name in the name of its folder."""

MAX_LISTED: Final = 8
"""Maximum number of jobs listed in a sentence."""

FINISHED: Final = tuple(state for state in ENDED if state != "saved")
"""States of jobs that are not resumed automatically."""

_OURS: Final = re.compile(r".+-[0-9a-f]{8}")


T = TypeVar("T")


class NoRun(Exception):
    """No job matches, or several do."""


class SeveralRuns(NoRun):
    """Several jobs have the given name."""


class NamedJob(NamedTuple, Generic[T]):
    """A job with its names, to be found by one of them."""

    job: T
    names: tuple[str, ...]  # as in `RunFolder.names`; its own name is last
    stem: str  # as in `RunFolder`
    is_live: bool  # it runs, will run, or is suspended
    label: str  # distinguishes it from others of the same name


def to_named_job(folder: RunFolder, job: T) -> NamedJob[T]:
    """The names of a run folder's job, with `job` to represent it."""
    record, state = folder.job(), "suspended" if folder.is_suspended() else folder.state()
    began = time.strftime(" since %F %H:%M", time.localtime(record.began)) if record else ""
    return NamedJob(
        job, folder.names, folder.stem, folder.is_live(), f"{folder.id} ({state}{began})"
    )


def runs_root(environ: Mapping[str, str]) -> Path:
    """$ELASTICRUN_RUNS, else $XDG_STATE_HOME/elasticrun/runs, else ~/.local/state/elasticrun/runs.
    Raises OSError if this user has no home."""
    if own := environ.get(env.RUNS, ""):
        return Path(own).absolute()
    base = Path(environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():
        base = home() / ".local" / "state"
    return base / "elasticrun" / "runs"


def run_path(root: Path, name: str, launch: str) -> Path:
    """The path of a run folder in `root`, from the job's name and the launch id (8 hexadecimal
    digits)."""
    return root / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:MAX_NAME_CHARS] or 'job'}-{launch}"


def make_run(root: Path, name: str, launch: str, at: Path | None = None) -> Path:
    """Create the folder `run_path`, or the folder `at` and a link to it at `run_path`; reuses
    existing ones. Returns the folder. Raises OSError if the folder cannot be created; if only the
    link cannot, the job is not listed."""
    own = run_path(root, name, launch)
    (at or own).mkdir(mode=0o700, parents=True, exist_ok=True)
    if at is None:
        return own
    with contextlib.suppress(OSError):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = at.resolve()
        if not any(path.resolve() == target for path in _paths(root)):
            own.symlink_to(target, target_is_directory=True)
    return at


def all_runs(root: Path) -> list[RunFolder]:
    """All run folders in `root` that have a job's record, newest job first. Raises OSError."""
    began = [
        (job.began, folder)
        for folder in map(RunFolder, _paths(root))
        if (job := folder.job()) is not None
    ]
    return [folder for _, folder in sorted(began, key=lambda each: each[0], reverse=True)]


def mark_continued(root: Path, run: RunFolder, step: int) -> None:
    """Record in the results of saved and stopped jobs that `run` continues them: those of the same
    program and working directory that had ended before, with a saved step that is not above `step`,
    the first that `run` has reported. Raises OSError."""
    job = run.job()
    if job is None or not job.program or job.attempt > 1:  # a later start continues its own
        return
    for folder in all_runs(root):
        other, result = folder.job(), folder.result()
        if other is None or result is None or result.suspended:
            continue
        has_saved = result.state in ("saved", "stopped")
        is_same = (other.program, other.workdir) == (job.program, job.workdir)
        is_resumed = 0 <= result.saved <= step and result.ended <= job.began
        if has_saved and is_same and is_resumed and not folder.is_locked():
            folder.write_result(replace(result, state="continued", continued_by=run.id))


def find(root: Path, wanted: str, *, whole: str = "", newest: bool = False) -> RunFolder:
    """The run folder that `wanted` names: a path, or a name as in `pick`. Raises NoRun or
    OSError."""
    runs = [to_named_job(folder, folder) for folder in all_runs(root)]
    if is_folder(wanted, [one.names for one in runs]):
        at = Path(wanted).resolve()
        listed = next((one.job for one in runs if one.job.path.resolve() == at), None)
        if whole and listed is None:
            raise NoRun(f"{wanted} is not in your list of runs: remove that folder manually")
        return listed or RunFolder(at)
    if (folder := pick(wanted, runs, whole=whole, newest=newest)) is not None:
        return folder
    known = {one.names[-1] for one in runs}
    hint = did_you_mean(wanted, known) or (f"; there is {first_names(known)}" if known else "")
    raise NoRun(f"no job {wanted} has a run folder in {root}{hint}")


def is_folder(wanted: str, known: Iterable[Sequence[str]]) -> bool:
    """Whether `wanted` is the path of a run folder, and not the name of a job."""
    is_name = any(wanted in names for names in known)
    return bool(wanted) and not is_name and os.path.isfile(os.path.join(wanted, JOB))


def pick(
    wanted: str, known: Sequence[NamedJob[T]], *, whole: str = "", newest: bool = False
) -> T | None:
    """The job that `wanted` names: by its name or id; else by its stem; else by the start of its
    name, unless jobs with different stems match. Of several, the live one. If none is live, the
    newest if `newest` is set (for verbs that only read), else raises SeveralRuns. None if no name
    matches. `known`: newest first.

    `whole`: a verb that cannot be undone, and therefore needs a complete and unambiguous name; ""
    for any other. Raises NoRun."""
    meant = [one for one in known if wanted in one.names]
    if not meant and not whole:
        meant = [one for one in known if wanted == one.stem]
    if not meant:
        meant = [one for one in known if any(name.startswith(wanted) for name in one.names)]
        called = {one.names[-1] for one in meant}
        if whole and meant:
            raise NoRun(f"{whole} needs the full name or the id; "
                        f"there is {first_names(called)}")  # fmt: skip
        if len({one.stem for one in meant}) > 1:
            raise NoRun(f"several jobs match {wanted}: {first_names(called)}; name one")
    if len(meant) < 2:
        return meant[0].job if meant else None
    live = [one for one in meant if one.is_live]
    if len(live) == 1 and not whole:
        return live[0].job
    if newest and not live:
        return meant[0].job
    labels = [one.label for one in (live if live and not whole else meant)]
    shown = ", ".join(labels[:MAX_LISTED]) + (", ..." if len(labels) > MAX_LISTED else "")
    state = "" if live else ", and none of them runs"
    raise SeveralRuns(f"{len(labels)} jobs are called {wanted}{state}: {shown}; give the id of one")


def prune(root: Path, since: float, only: Collection[Path] | None = None) -> dict[str, Path | None]:
    """Remove the folders of jobs that ended at least `since` seconds ago. A job in state `saved`,
    which can continue, is removed only if it is in `only`; None: no restriction to some folders.
    Returns the removed folders by name; where only a link was removed, with the folder that
    remains. Raises OSError."""
    now = time.time()
    removed: dict[str, Path | None] = {}
    for folder in all_runs(root):
        if only is not None and folder.path not in only:
            continue
        states = FINISHED if only is None else ENDED
        if folder.state() in states and now - _ended(folder) >= since:
            stays = folder.place if folder.path.is_symlink() else None
            _remove(folder.path)
            removed[folder.path.name] = stays
    return removed


def keep_newest(root: Path) -> None:
    """Remove the oldest folders of ended jobs beyond MAX_ENDED. Raises OSError."""
    paths = _paths(root)
    if len(paths) <= MAX_ENDED:
        return
    runs = [(path, RunFolder(path)) for path in paths]
    ours = [(path, run) for path, run in runs if path.is_symlink() or run.job() is not None]
    ended = [path for path, run in ours if run.state() in FINISHED]
    for path in ended[MAX_ENDED:]:
        with contextlib.suppress(OSError):  # continue with the others
            _remove(path)


def _paths(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    ours = [path for path in root.iterdir() if _OURS.fullmatch(path.name)]
    return sorted(ours, key=_changed, reverse=True)[:MAX_RUNS]


def _changed(path: Path) -> float:
    with contextlib.suppress(OSError):  # another process has removed it
        return path.lstat().st_mtime
    return 0.0


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process has removed it
        if path.is_symlink():
            path.unlink()
            return
        try:
            shutil.rmtree(path)
        except OSError as wrong:
            what = f"cannot be removed: {wrong.strerror}"
            raise OSError(wrong.errno, what, str(path)) from None


def _ended(folder: RunFolder) -> float:
    if result := folder.result():
        return result.ended
    with contextlib.suppress(OSError):  # for a lost job: the last write
        return max(path.stat().st_mtime for path in (folder.path, folder.path / JOB))
    return 0.0


def first_names(names: Iterable[str]) -> str:
    """The first MAX_LISTED names in alphabetical order, for a sentence."""
    known = sorted(names)
    return ", ".join(known[:MAX_LISTED]) + (", ..." if len(known) > MAX_LISTED else "")
