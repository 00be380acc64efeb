"""The folder of one run of a job: its files, and the state of the job according to them.

    job.json       who has started what, when, and of which commit (`JobRecord`)
    events.jsonl   what happened, one event per line
    progress.csv   values passed to `elasticrun.training.progress`, one row per step
    result.json    how the job ended (`RunResult`); missing before that
    error.txt      the last failure, for people
    incidents/     a record of each interruption of training; 1-0007.* are from start 1
    logs/          the output of ranks, if it is kept; their stacks in a hang
    agents/        which files in logs/ belong to which rank, one file per agent
    checkpoints/   checkpoints of a script that does not specify a folder
    previous/      the files of an earlier run in the same folder, with `--fresh`
    submitted.json, console.log   of `elasticrun submit`: the command, its launchers' output
    last-word.json   why such a launcher exited (`host/runs/last_word.py`)

Files are replaced atomically, so that readers see complete ones. Readers use at most MAX_BYTES of a
file: a longer file is not one of ours, or only its end is needed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import struct
import time
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from elasticrun.core.sight.picture import EventRow, Goodput
from elasticrun.host.runs import last_word
from elasticrun.host.runs.last_word import LastWord
from elasticrun.host.system.processes import ProcessId, boot_id

JOB: Final = "job.json"
EVENTS: Final = "events.jsonl"
PROGRESS: Final = "progress.csv"
RESULT: Final = "result.json"
ERROR: Final = "error.txt"
INCIDENTS: Final = "incidents"
LOGS: Final = "logs"
AGENTS: Final = "agents"
CHECKPOINTS: Final = "checkpoints"
PREVIOUS: Final = "previous"
SUBMITTED: Final = "submitted.json"
CONSOLE: Final = "console.log"
LAST_WORD: Final = "last-word.json"

OF_A_RUN: Final = (JOB, EVENTS, PROGRESS, RESULT, ERROR, INCIDENTS, LOGS, AGENTS, CHECKPOINTS)
"""What `archive` moves: the files of a run. A folder that the user chose may contain others."""

LOCK: Final = ".lock"
"""File that the job's master locks as long as it lives."""

RESERVED_BYTES: Final = 64 * 1024
"""Bytes allocated to LOCK, and freed on a full disk so that the result can be written."""

_LAUNCH: Final = re.compile(r"(.+)-([0-9a-f]{8})")
"""The name of a run folder that the user did not choose: stem and launch id."""

_LOCK: Final = "hhqqi"
"""struct flock. Used for the whole file, and with pid 0: the lock belongs to the open file
description."""

MAX_BYTES: Final = 1024 * 1024

LAST_BYTES: Final = 64 * 1024
"""Bytes at the end of a file that are searched for its last row."""

ENDED: Final = ("succeeded", "failed", "saved", "stopped", "interrupted", "continued", "lost")
"""States of jobs that have ended. The other states: submitted, waiting (for its nodes), running."""

NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of file systems that do not support locks."""

Kept = TypeVar("Kept", bound=Struct)


class JobRecord(Struct, frozen=True, kw_only=True):
    """What is known of a job when it begins. Moments are seconds since 1970."""

    name: str
    id: str = ""  # the id by which its nodes meet (--rdzv-id)
    user: str = ""
    host: str = ""  # of the launching process
    began: float = 0.0
    command: tuple[str, ...] = ()
    program: tuple[str, ...] = ()  # kind (script, module, ...), target, arguments; (): unknown
    workdir: str = ""
    git_commit: str = ""  # of the working directory; with "+" if modified; "": unknown
    where: str = "local"  # local, ssh, slurm, k8s
    nodes: str = "1"  # MIN:MAX, or one number
    nproc: str = ""  # as requested: 8, auto, gpu
    versions: dict[str, str] = {}  # of elasticrun, python, torch
    log_dir: str = ""  # "": its ranks' logs are not kept
    endpoint: str = ""  # host:port of its master
    tensorboard: str = ""  # URL; "": none
    attempt: int = 1  # number of this start in the folder
    resumed_at: int = -1  # step saved by the previous start; -1: none
    first_began: float = 0.0  # the first start in this folder; 0.0: this one
    launch: str = ""  # 8 hexadecimal digits that identify the run folder; "": in its name only
    formed: float = 0.0  # time of its first round; 0.0: not yet
    pid: int = 0  # of the launching process; 0: none yet
    started: int = 0  # kernel start time of that process, in clock ticks since boot
    boot_id: str = ""  # identifies the boot in which `started` and `pid` are valid
    pid_namespace: int = 0  # inode of the PID namespace in which `pid` is valid

    @property
    def process(self) -> ProcessId:
        """The launching process."""
        return ProcessId(self.pid, self.started, self.boot_id, self.pid_namespace, self.host)

    def age(self) -> float:
        """Seconds since the job began, regardless of later starts."""
        return max(0.0, time.time() - (self.first_began or self.began))

    def is_alive(self) -> bool | None:
        """Whether the launching process is alive; None: unknown here."""
        return self.process.is_alive() if self.pid else None


class LocalAgent(Struct, frozen=True):
    """The agent of one node; with `node` "", the process that starts the agents."""

    node: str
    process: ProcessId


class Starting(Struct, frozen=True, kw_only=True):
    """The part of SUBMITTED that lists the processes that were started to run the job."""

    agents: tuple[LocalAgent, ...] = ()  # under ssh: the process that monitors them


class ShortRow(Struct, frozen=True):
    """An incident, as in `IncidentRow`, with the duration of the interruption."""

    number: int
    cause: str
    sentence: str
    seconds: float
    steps_lost: int
    slot_seconds: float
    cost: float
    restarted: float = -1.0
    first_step: float = -1.0


class RunResult(Struct, frozen=True, kw_only=True):
    """How a job has ended. Moments are seconds since 1970."""

    job: str = ""
    state: str  # succeeded, failed, saved (a start resumes there), stopped (by a person),
    # interrupted (by a signal, and nothing was saved), continued (by `continued_by`)
    exit_code: int = 0
    reason: str = ""
    failure: str = ""  # first failed rank of the last failed round, with the cause; "": none
    failed_rank: int = -1  # that rank; -1: none failed by itself
    failed_node: str = ""  # "" if the job has one node
    failed_how: str = ""
    suspended: bool = False  # by `elasticrun suspend`
    continued_by: str = ""  # id of the run in which the same command has continued it
    started: float = 0.0
    ended: float = 0.0
    nodes: int = 0  # number of nodes in the last round
    world_size: int = 0
    restarts: int = 0  # charged ones
    step: int = -1  # the newest reported one; -1: none
    saved: int = -1  # the newest in storage; -1: none
    goodput: Goodput | None = None  # where the time was spent
    incidents: tuple[ShortRow, ...] = ()  # interruptions of training, the newest last


class KeptEvent(Struct, frozen=True):
    """A line of `events.jsonl`. `time`: seconds since 1970."""

    number: int  # number in the master's list, from 1; 0: not in that list
    time: float
    level: str  # info, warning, error
    text: str


class RunFolder:
    """One run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def place(self) -> Path:
        """The folder itself: if the user chose it, `path` may be a link to it."""
        return self.path.resolve() if self.path.is_symlink() else self.path

    @property
    def id(self) -> str:
        """The launch id: 8 hexadecimal digits, unique to this run folder; "" if unknown."""
        job, found = self.job(), _LAUNCH.fullmatch(self.path.name)
        return job.launch if job and job.launch else found[2] if found else ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the job: its folder's name, its launch id, its rendezvous id, and last its own
        name; only the first if there is no record."""
        job = self.job()
        known = (self.path.name, self.id, job.id, job.name) if job else (self.path.name,)
        return tuple(name for name in known if name)

    @property
    def stem(self) -> str:
        """What the folder's name starts with: the job's given name, else its script."""
        found = _LAUNCH.fullmatch(self.path.name)
        return found[1] if found else self.names[-1]

    def job(self) -> JobRecord | None:
        """The job's record; None if there is none or it is invalid."""
        return self._read(JOB, JobRecord)

    def is_suspended(self) -> bool:
        """Whether the job was suspended and not resumed."""
        result = self.result()
        return result is not None and result.suspended

    def is_live(self) -> bool:
        """Whether the job runs, will run, or is suspended: such a job keeps its name."""
        return self.is_suspended() or self.state() not in ENDED

    def result(self) -> RunResult | None:
        """The job's result; None if it has not ended, or ended without writing one."""
        return self._read(RESULT, RunResult)

    def is_locked(self) -> bool:
        """Whether a master of the job is alive, as far as the file system knows. It may outlive the
        launcher."""
        with contextlib.suppress(OSError), open(self.path / LOCK, "rb") as file:
            request = struct.pack(_LOCK, fcntl.F_WRLCK, 0, 0, 0, 0)
            found: int = struct.unpack(_LOCK, fcntl.fcntl(file, fcntl.F_OFD_GETLK, request))[0]
            return found != fcntl.F_UNLCK
        return False

    def state(self) -> str:
        """The state of the job in a word; `lost`: launcher and master have exited without a result.
        A job on another host that has no result counts as running (or waiting, or submitted),
        because its processes cannot be checked from here."""
        if result := self.result():
            return result.state
        job = self.job()
        if job is None:
            return "lost"
        if not job.pid:
            gone = self._are_agents_gone(job)
            return "submitted" if not gone else "lost" if self._last_word(job) is None else "failed"
        if job.is_alive() is False and not self.is_locked():
            return "lost"
        return "running" if job.formed else "waiting"

    def end_reason(self, job: JobRecord) -> str:
        """Why a job ended that has no result, as far as known, with its last step and event."""
        if not job.pid:
            return self.last_words(job) or "it was submitted, but no launcher has started"
        if job.boot_id and job.boot_id != boot_id():
            why = f"{job.host} was rebooted while the job ran"
        else:
            why = f"its launcher, process {job.pid} of {job.host}, has exited without a result"
        step, events = self.last_step(), self.events(0.0)
        why += f"; its last reported step is {step}" if step >= 0 else ""
        return why + (f"; last event: {events[-1].text}" if events else "")

    def last_words(self, job: JobRecord) -> str:
        """Why the launcher of this start exited; else the last line that launchers printed, "" if
        none."""
        word = self._last_word(job)
        return self.last_line() if word is None else word.text

    def _last_word(self, job: JobRecord) -> LastWord | None:
        with contextlib.suppress(OSError, ValueError):
            file = self.path / LAST_WORD
            if file.stat().st_mtime >= job.began:
                return last_word.read(file.read_text(encoding="utf-8"))
        return None

    def last_line(self) -> str:
        """The last line that launchers printed, "" if none."""
        with contextlib.suppress(OSError), open(self.path / CONSOLE, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
            lines = file.read(LAST_BYTES).decode(errors="replace").split("\n")
            return next((line for line in reversed(lines) if line.strip()), "")
        return ""

    def _are_agents_gone(self, job: JobRecord) -> bool:
        """Whether all processes that were started to run the job are known to have exited."""
        if job.where not in ("local", "ssh"):
            return False
        agents = self.agents()
        if not agents and job.host != os.uname().nodename:
            return False
        return all(one.process.is_alive() is False for one in agents)

    def live_agents(self) -> list[LocalAgent]:
        """Those of `agents` that are alive and can be signaled from here by pid."""
        return [one for one in self.agents() if one.process.is_local and one.process.is_alive()]

    def agents(self) -> tuple[LocalAgent, ...]:
        """The processes that `elasticrun submit` started: agents, or a process that starts
        agents."""
        known = self._read(SUBMITTED, Starting)
        return known.agents if known is not None else ()

    def last_step(self) -> int:
        """The newest reported step; for a resumed job that has reported none yet, the step from
        which it resumes; -1: none."""
        result, job, row = self.result(), self.job(), self._last_row()
        step = at = -1.0
        with contextlib.suppress(ValueError):  # the last start may have reported none
            step, at = int(row.get("step", "-1")), float(row.get("time", "-1"))
        if result is None and job is not None and job.resumed_at >= 0 and at < job.began:
            return job.resumed_at
        return max(int(step), result.step if result else -1)

    def newest_metrics(self) -> str:
        """The newest row of progress.csv as text: `loss 0.2488 at step 140`; "" if it has no
        metrics."""
        row = {name: value for name, value in self._last_row().items() if value}
        step = row.pop("step", "")
        with contextlib.suppress(ValueError):
            numbers = {name: float(value) for name, value in row.items()}
            value = [
                f"{name} {numbers[name]:.6g}" for name in numbers if name not in ("time", "round")
            ]
            return f"{', '.join(value)} at step {step}" if value else ""
        return ""

    def _last_row(self) -> dict[str, str]:
        """The last row of progress.csv, by column; {} if there is none."""
        with contextlib.suppress(OSError, ValueError):
            with open(self.path / PROGRESS, "rb") as file:
                titles = file.readline(LAST_BYTES).decode().rstrip("\r\n").split(",")
                file.seek(max(file.tell(), os.fstat(file.fileno()).st_size - LAST_BYTES))
                rows = file.read(LAST_BYTES).rpartition(b"\n")[0].splitlines()
            return dict(zip(titles, rows[-1].decode().split(","), strict=False)) if rows else {}
        return {}

    def events(self, now: float) -> list[EventRow]:
        """The events in the last MAX_BYTES of their file, newest last. `now`: seconds since 1970,
        for their ages."""
        rows = []
        with contextlib.suppress(OSError), open(self.path / EVENTS, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_BYTES))
            for line in file.read(MAX_BYTES).splitlines():
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    one = msgspec.json.decode(line, type=KeptEvent)
                    age = max(0.0, now - one.time)
                    rows.append(EventRow(one.number, age, "", one.text, one.level))
        return rows

    def error(self, since: float = 0.0) -> str:
        """The content of `error.txt`: the last failure; "" if there is none since `since` (seconds
        since 1970)."""
        with contextlib.suppress(OSError), open(self.path / ERROR, "rb") as file:
            if os.fstat(file.fileno()).st_mtime < since:
                return ""
            return file.read(MAX_BYTES).decode(errors="replace")
        return ""

    def prepare_restart(self) -> None:
        """Prepare the folder for the next start of its job. Raises OSError."""
        if job := self.job():
            again = replace(job, pid=0, started=0, formed=0.0, endpoint="", began=time.time())
            self.write_job(self.next_start(job, again))
        else:
            (self.path / RESULT).unlink(missing_ok=True)

    def next_start(self, before: JobRecord, job: JobRecord) -> JobRecord:
        """Turn `job` into the record of the start that follows `before`; returns it, not written.
        Removes the previous start's result and renames its incidents. Raises OSError."""
        result = self.result()
        saved = result.saved if result is not None else before.resumed_at
        (self.path / RESULT).unlink(missing_ok=True)
        self._keep_incidents(before.attempt)
        first = before.first_began or before.began
        attempt = before.attempt + 1
        return replace(job, attempt=attempt, first_began=first, resumed_at=saved)

    def _keep_incidents(self, attempt: int) -> None:
        """Rename the incidents of start `attempt`, because the next start counts from 1 again:
        0007.json becomes 1-0007.json. Raises OSError."""
        for path in list((self.path / INCIDENTS).glob("*.*")):
            if path.stem.isdecimal():
                path.rename(path.with_name(f"{attempt}-{path.name}"))

    def write_job(self, job: JobRecord) -> None:
        """Replace the record; undecodable bytes of arguments and paths become "?". Raises
        OSError."""
        self._write(JOB, job)

    def write_result(self, result: RunResult) -> None:
        """Write the job's result, replacing an earlier one. Raises OSError."""
        try:
            self._write(RESULT, result)
        except OSError as wrong:
            if wrong.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            os.truncate(self.path / LOCK, 0)  # frees the space that is reserved for this
            self._write(RESULT, result)

    def _write(self, name: str, record: Struct) -> None:
        text = json.dumps(msgspec.to_builtins(record), indent=2, ensure_ascii=False)
        replace_file(self.path / name, text.encode(errors="replace") + b"\n")

    def _read(self, name: str, kind: type[Kept]) -> Kept | None:
        try:
            with open(self.path / name, "rb") as file:
                return msgspec.json.decode(file.read(MAX_BYTES), type=kind)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None


def lock_folder(path: Path) -> int:
    """Lock the folder; returns a descriptor that holds the lock until it is closed or the process
    exits. On a file system without locks it holds none. Raises BlockingIOError if another process
    has the lock, or OSError."""
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_LOCK, fcntl.F_WRLCK, 0, 0, 0, 0))
    except OSError as wrong:
        if wrong.errno not in NO_LOCKS:
            os.close(fd)
            raise
    with contextlib.suppress(OSError):  # a full disk is reported elsewhere
        os.posix_fallocate(fd, 0, RESERVED_BYTES)
    return fd


def replace_file(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Create or replace a file atomically, even with concurrent writers; with `sync`, its content
    also survives a power failure. Raises OSError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(fd)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
