"""The job's record in its run folder: which folder it is, and the content of `job.json` at the
start and of `result.json` at the end.

The commit and the versions take a moment to find, so `run_files` adds them at the first round."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from elasticrun import __version__
from elasticrun.config import EXIT_FAILED, EXIT_OK, EXIT_SAVED, MasterConfig
from elasticrun.core.events import JobOver
from elasticrun.core.reasons import AllLeft, failure_in, is_by_operator, read
from elasticrun.core.sight.picture import Picture
from elasticrun.host import user_folder
from elasticrun.host.runs.index import run_path, runs_root
from elasticrun.host.runs.layout import JobRecord, RunFolder, RunResult, ShortRow
from elasticrun.host.runs.opening import (
    OpenRun,
    RankProgram,
    RunRefused,
    already_succeeded,
    open_named,
    open_new,
)
from elasticrun.host.system.processes import ProcessId, user_name
from elasticrun.master.outward.report import lasted

GIT_LIMIT: Final = 1.0
"""Seconds for each git command."""

ID_DIGITS: Final = 4
"""Number of digits of the launch id that an unnamed job has in its name."""

MAX_COMMIT: Final = 80
"""Maximum characters of a commit."""


def run_folder_path(config: MasterConfig) -> str:
    """The path of the run folder, which may not exist yet; "": this user can have none."""
    if config.launch.run.folder:
        return str(Path(config.launch.run.folder).absolute())
    with contextlib.suppress(OSError):
        return str(run_path(runs_root(os.environ), _stem(config), _launch(config)))
    return ""


def open_fresh(config: MasterConfig, hosted: bool) -> OpenRun:
    """Create a run folder in the user's runs root. `hosted`: an agent started this master. Raises
    OSError."""
    launch = _launch(config)
    return open_new(runs_root(os.environ), _record(config, hosted, launch), launch, _stem(config))


def open_placed(config: MasterConfig, hosted: bool) -> OpenRun | str:
    """Open the run folder that the user named, or return a sentence if its job has already
    succeeded and is not to run again. Raises RunRefused, OSError."""
    at = Path(config.launch.run.folder).absolute()
    program = RankProgram(config.launch.run.program, config.launch.run.workdir or os.getcwd())
    if not config.launch.run.fresh and (sentence := already_succeeded(at, program)):
        return sentence
    return _open_named(config, hosted, at, is_successor=False)


def open_again(config: MasterConfig, hosted: bool) -> OpenRun:
    """Open the run folder that the user named, for a later master of the same job. Raises OSError,
    also if another job uses it now."""
    try:
        return _open_named(
            config, hosted, Path(config.launch.run.folder).absolute(), is_successor=True
        )
    except RunRefused as refused:
        raise OSError(str(refused)) from None


def _open_named(config: MasterConfig, hosted: bool, at: Path, *, is_successor: bool) -> OpenRun:
    root = Path(os.devnull)
    with contextlib.suppress(OSError):  # without a home directory it is not listed
        root = runs_root(os.environ)
    fresh = config.launch.run.fresh
    launch = ("" if fresh else RunFolder(at).id) or _launch(config)
    record = _record(config, hosted, launch)
    stem = _stem(config)
    return open_named(root, record, launch, at, stem=stem, fresh=fresh, is_successor=is_successor)


def _record(config: MasterConfig, hosted: bool, launch: str) -> JobRecord:
    """The job's record as known at the start. The launcher is the agent that started this master;
    if a user started it, the master itself."""
    launcher, spec = ProcessId.of(os.getppid() if hosted else os.getpid()), config.spec
    nodes = f"{spec.min_nodes}:{spec.max_nodes}" if spec is not None else ""
    return JobRecord(
        name=name_of(config, launch),
        id=config.identity.job_id,
        launch=launch,
        user=user_name(),
        host=launcher.host,
        began=time.time(),
        command=config.launch.run.command,
        program=config.launch.run.program,
        workdir=config.launch.run.workdir or os.getcwd(),
        git_commit=config.launch.run.git_commit,
        where=config.launch.run.where,
        nodes=nodes,
        nproc=config.launch.run.nproc,
        log_dir=config.log_dir,
        pid=launcher.pid,
        started=launcher.started,
        boot_id=launcher.boot,
        pid_namespace=launcher.namespace,
    )


def name_of(config: MasterConfig, launch: str = "") -> str:
    """The job's name for people. An unnamed job is named after its script, with digits that
    distinguish jobs of one script: by its id, if that was minted so, because all nodes know it;
    else by its launch id."""
    run = config.launch.run
    if run.unnamed and run.launch:
        return config.identity.job_id
    if not run.unnamed:
        return _stem(config)
    return f"{run.name}-{(launch or _launch(config))[:ID_DIGITS]}"


def _stem(config: MasterConfig) -> str:
    return config.launch.run.name or config.identity.job_id


def _launch(config: MasterConfig) -> str:
    """The launch id: the digits of the job's id, if this launch minted it; else those of the record
    folder, which all masters with the same folder share; without one, a number of this process."""
    run = config.launch.run
    if run.launch and config.identity.job_id.endswith(f"-{run.launch}"):
        return run.launch
    record = Path(config.record_dir).name
    made = record.removeprefix(user_folder.PREFIX)
    return made[:8] if made != record and len(made) >= 8 else f"{os.getpid():08x}"


def git_commit(folder: str) -> str:
    """The commit checked out in this folder, with a "+" if files differ from it; "" without a
    repository, without git, or if git does not answer in time. Blocks."""
    place = Path(folder or ".")
    if not any((above / ".git").exists() for above in (place, *place.parents)):
        return ""
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    whole = ("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")
    for words in (whole, ("rev-parse", "HEAD")):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            result = subprocess.run(
                ["git", "-C", str(place), *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=GIT_LIMIT,
                env=environ,
            )
            return result.stdout.strip()[:MAX_COMMIT] if result.returncode == 0 else ""
    return ""


def versions() -> dict[str, str]:
    """Versions of elasticrun, Python and torch (if installed; it is not imported)."""
    found = {"elasticrun": __version__, "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    return found


# ---------------------------------------------------------------- the end

_STATES = {EXIT_OK: "succeeded", EXIT_SAVED: "saved"}
"""The states of jobs that have not failed, by exit code."""


def state_of(end: JobOver) -> str:
    """The job's state at its end, one of `RunResult.state`."""
    reason = read(end.reason, end.code)
    if is_by_operator(reason):
        return "stopped"
    is_interrupted = isinstance(reason, AllLeft) and reason.signal and end.exit_code == EXIT_FAILED
    return _STATES.get(end.exit_code, "interrupted" if is_interrupted else "failed")


def result_of(end: JobOver, found: Picture) -> RunResult:
    """The content of `result.json`. `found`: the job's last picture."""
    status, now = found.status, time.time()
    failed = failure_in(read(status.last_failure, status.failed))
    rows = (
        ShortRow(
            *(row.number, row.cause, row.sentence, lasted(row)),
            *(row.steps_lost, row.slot_seconds, row.cost),
            *(row.restarted, row.first_step),
        )
        for row in found.incidents
    )
    return RunResult(
        job=status.job_id,
        state=state_of(end),
        exit_code=end.exit_code,
        reason=end.reason,
        failure=status.last_failure,
        failed_rank=-1 if failed is None else failed.rank,
        failed_node="" if failed is None else failed.node,
        failed_how="" if failed is None else failed.what,
        started=now - status.age,
        ended=now,
        nodes=sum(node.group_rank >= 0 for node in status.nodes),
        world_size=status.world_size,
        restarts=status.restart_count,
        step=status.step,
        saved=end.saved,
        goodput=found.goodput,
        incidents=tuple(rows),
    )


def last_words(result: RunResult) -> bytes:
    """A short form of the result, because Kubernetes keeps only 4096 bytes of a pod's termination
    message."""
    short = {"reason": result.reason[:500], "failure": "", "failed_how": ""}
    return msgspec.json.encode(replace(result, **short, goodput=None, incidents=()))
