"""The folder of one job's run: which files are in it, and how the job stands by them.

    job.json       who has started what, when, and of which commit (`JobRecord`)
    events.jsonl   what happened, a line each
    progress.csv   what `elasticrun.training.progress` was told, a row a step
    result.json    how the job ended (`RunResult`); there is none before that
    error.txt      the rank that failed first, for people
    incidents/     a record of each thing that stopped the training; 1-0007.* are of start 1
    logs/          what the ranks printed, where it is kept; what they did in a hang
    agents/        which files in logs/ are which rank's, a file each agent
    checkpoints/   of a script that has not said where they are to be
    previous/      the files of an earlier run in the same folder, with `--fresh`
    submitted.json, console.log   of `elasticrun submit`: what was typed, what its launchers print
    last-word.json   why such a launcher ended (`host/runs/last_word.py`)

Whoever replaces a file does it in one piece, so that a reader sees a whole one. Readers take no
more than MAX_BYTES of a file: a longer one is not one of ours, or only its end is wanted.
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
"""All that a run leaves. A folder that a person has named may hold other things beside it."""

LOCK: Final = ".lock"
"""Held by the job's master for as long as it lives."""

KEPT_ROOM: Final = 64 * 1024
"""Bytes of LOCK, so that the result can be written on a disk that has become full."""

_LAUNCH: Final = re.compile(r"(.+)-([0-9a-f]{8})")
"""The name of a run folder that was not named by a person: after what, and its id."""

_LOCK: Final = "hhqqi"
"""struct flock: whole file, and no pid, since the lock is the open file's."""

MAX_BYTES: Final = 1024 * 1024

LAST_BYTES: Final = 64 * 1024
"""From the end of a file in which its last row is looked for."""

ENDED: Final = ("succeeded", "failed", "saved", "stopped", "lost")
"""States of jobs that run no more. Those before the end: submitted, waiting (for its nodes),
running."""

NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""What a file system says that has none."""

Kept = TypeVar("Kept", bound=Struct)


class JobRecord(Struct, frozen=True, kw_only=True):
    """What is known of a job when it begins. Moments are seconds since 1970."""

    name: str
    id: str = ""  # by which its nodes meet (--rdzv-id)
    user: str = ""
    host: str = ""  # of the process that launched it
    began: float = 0.0
    command: tuple[str, ...] = ()
    program: tuple[str, ...] = ()  # kind (script, module, ...), target, arguments; (): not known
    workdir: str = ""
    git_commit: str = ""  # of the working directory; "+" behind it: with changes; "": not known
    where: str = "local"  # local, ssh, slurm, k8s
    nodes: str = "1"  # MIN:MAX, or one number
    nproc: str = ""  # as it was asked for: 8, auto, gpu
    versions: dict[str, str] = {}  # of elasticrun, python, torch
    log_dir: str = ""  # "": its ranks' logs are not kept
    endpoint: str = ""  # host:port of its master
    tensorboard: str = ""  # URL; "": there is none
    attempt: int = 1  # counts the starts in this folder
    resumed_at: int = -1  # step that the start before had saved; -1: none
    first_began: float = 0.0  # the first start in this folder; 0.0: that is this one
    launch: str = ""  # 8 hexadecimal digits that identify the run folder; "": in its name only
    formed: float = 0.0  # when its first round was; 0.0: not yet
    pid: int = 0  # of the launching process; 0: there is none yet
    started: int = 0  # when the kernel started that process, in clock ticks since boot
    boot_id: str = ""  # names the time for which `started` and `pid` mean anything
    pid_namespace: int = 0  # inode of the PID namespace in which `pid` means anything

    @property
    def process(self) -> ProcessId:
        """The process that launched it."""
        return ProcessId(self.pid, self.started, self.boot_id, self.pid_namespace, self.host)

    def age(self) -> float:
        """Seconds since it began, however often it was started since."""
        return max(0.0, time.time() - (self.first_began or self.began))

    def is_alive(self) -> bool | None:
        """Whether the process that launched it lives; None: it cannot be known from here."""
        return self.process.is_alive() if self.pid else None


class LocalAgent(Struct, frozen=True):
    """One node of a job on this host; without a name, the process that starts them."""

    node: str
    process: ProcessId


class Starting(Struct, frozen=True, kw_only=True):
    """Of SUBMITTED, the processes of its host that carry the job."""

    agents: tuple[LocalAgent, ...] = ()  # under ssh: the process that follows them


class ShortRow(Struct, frozen=True):
    """An incident; as in `IncidentRow`, and how long nothing was trained."""

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
    state: str  # succeeded, failed, saved (it is to be started again), stopped (by a person)
    exit_code: int = 0
    reason: str = ""
    failure: str = ""  # which rank failed first in the last round that failed, and how; "": none
    failed_rank: int = -1  # that rank; -1: none failed by itself
    failed_node: str = ""  # "" where the job has one node
    failed_how: str = ""
    suspended: bool = False  # by `elasticrun suspend`
    started: float = 0.0
    ended: float = 0.0
    nodes: int = 0  # that had a place in the last round
    world_size: int = 0
    restarts: int = 0  # that were charged
    step: int = -1  # the newest that was told; -1: none
    saved: int = -1  # the newest in storage; -1: none
    goodput: Goodput | None = None  # where the time went
    incidents: tuple[ShortRow, ...] = ()  # what stopped training, the newest last


class KeptEvent(Struct, frozen=True):
    """A line of `events.jsonl`. `time`: seconds since 1970."""

    number: int  # as in what its master tells, from 1; 0: its master does not tell it
    time: float
    level: str  # info, warning, error
    text: str


class RunFolder:
    """One such folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def place(self) -> Path:
        """Where it lies: of one that a person has placed, `path` is but a link to that."""
        return self.path.resolve() if self.path.is_symlink() else self.path

    @property
    def id(self) -> str:
        """8 hexadecimal digits that no other run folder has; "" where they are not known."""
        job, found = self.job(), _LAUNCH.fullmatch(self.path.name)
        return job.launch if job and job.launch else found[2] if found else ""

    @property
    def names(self) -> tuple[str, ...]:
        """By which the job is known: its folder's name, its id, its rendezvous id, and last its own
        name."""
        job = self.job()
        known = (self.path.name, self.id, job.id, job.name) if job else (self.path.name,)
        return tuple(name for name in known if name)

    @property
    def stem(self) -> str:
        """What the job was named after: of one that nobody has named, its script."""
        found = _LAUNCH.fullmatch(self.path.name)
        return found[1] if found else self.names[-1]

    def job(self) -> JobRecord | None:
        """None where there is no such file, or none of ours."""
        return self._read(JOB, JobRecord)

    def is_suspended(self) -> bool:
        """Whether its job was suspended, and not resumed since."""
        result = self.result()
        return result is not None and result.suspended

    def is_live(self) -> bool:
        """Whether its job runs, is to run, or is suspended: such a job keeps its name."""
        return self.is_suspended() or self.state() not in ENDED

    def result(self) -> RunResult | None:
        """None as long as the job has not ended, or where nobody has written how."""
        return self._read(RESULT, RunResult)

    def is_held(self) -> bool:
        """Whether a master of the job lives, as far as the file system tells: the launcher may have
        gone before it."""
        with contextlib.suppress(OSError), open(self.path / LOCK, "rb") as file:
            wanted = struct.pack(_LOCK, fcntl.F_WRLCK, 0, 0, 0, 0)
            found: int = struct.unpack(_LOCK, fcntl.fcntl(file, fcntl.F_OFD_GETLK, wanted))[0]
            return found != fcntl.F_UNLCK
        return False

    def state(self) -> str:
        """How the job stands, in a word; `lost`: launcher and master have gone without a result.
        A job of another host runs until it has a result: only that host, or its scheduler, knows
        better."""
        if result := self.result():
            return result.state
        job = self.job()
        if job is None:
            return "lost"
        if not job.pid:
            left = self._is_left(job)
            return "submitted" if not left else "lost" if self._last_word(job) is None else "failed"
        if job.is_alive() is False and not self.is_held():
            return "lost"
        return "running" if job.formed else "waiting"

    def why_over(self, job: JobRecord) -> str:
        """Of a job that is over without a result: what has ended it, as far as that is known, and
        what was heard last."""
        if not job.pid:
            return self.last_words(job) or "it was submitted, and no launcher has begun"
        if job.boot_id and job.boot_id != boot_id():
            why = f"{job.host} was started anew while the job ran"
        else:
            why = f"its launcher, process {job.pid} of {job.host}, has gone and left no result"
        step, events = self.last_step(), self.events(0.0)
        why += f"; the last step it told was {step}" if step >= 0 else ""
        return why + (f"; last event: {events[-1].text}" if events else "")

    def last_words(self, job: JobRecord) -> str:
        """Why the launcher of this start has ended; else the last line that launchers printed, ""
        for none."""
        word = self._last_word(job)
        return self.last_line() if word is None else word.text

    def _last_word(self, job: JobRecord) -> LastWord | None:
        with contextlib.suppress(OSError, ValueError):
            file = self.path / LAST_WORD
            if file.stat().st_mtime >= job.began:
                return last_word.read(file.read_text(encoding="utf-8"))
        return None

    def last_line(self) -> str:
        """That launchers have printed, "" for none."""
        with contextlib.suppress(OSError), open(self.path / CONSOLE, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
            lines = file.read(LAST_BYTES).decode(errors="replace").split("\n")
            return next((line for line in reversed(lines) if line.strip()), "")
        return ""

    def _is_left(self, job: JobRecord) -> bool:
        """Whether all that were to begin the job are known to have gone."""
        if job.where not in ("local", "ssh"):
            return False
        agents = self.agents()
        if not agents and job.host != os.uname().nodename:
            return False
        return all(one.process.is_alive() is False for one in agents)

    def carriers(self) -> list[LocalAgent]:
        """The processes that carry it, or are to start those, and that live and can be reached
        from here by their pids."""
        return [one for one in self.agents() if one.process.is_local and one.process.is_alive()]

    def agents(self) -> tuple[LocalAgent, ...]:
        """The processes that were started to carry it, or to start those."""
        known = self._read(SUBMITTED, Starting)
        return known.agents if known is not None else ()

    def last_step(self) -> int:
        """The newest step that was told; of a job that was resumed, the step that it goes on from
        until it tells one; -1: none."""
        result, job, row = self.result(), self.job(), self._last_row()
        told = at = -1.0
        with contextlib.suppress(ValueError):  # also where its last start has told none
            told, at = int(row.get("step", "-1")), float(row.get("time", "-1"))
        if result is None and job is not None and job.resumed_at >= 0 and at < job.began:
            return job.resumed_at
        return max(int(told), result.step if result else -1)

    def told(self) -> str:
        """What the newest row of progress.csv says: `loss 0.2488 at step 140`; "" without numbers
        beside the step."""
        row = {name: said for name, said in self._last_row().items() if said}
        step = row.pop("step", "")
        with contextlib.suppress(ValueError):
            numbers = {name: float(said) for name, said in row.items()}
            said = [
                f"{name} {numbers[name]:.6g}" for name in numbers if name not in ("time", "round")
            ]
            return f"{', '.join(said)} at step {step}" if said else ""
        return ""

    def _last_row(self) -> dict[str, str]:
        """By its titles; empty where there is none."""
        with contextlib.suppress(OSError, ValueError):
            with open(self.path / PROGRESS, "rb") as file:
                titles = file.readline(LAST_BYTES).decode().rstrip("\r\n").split(",")
                file.seek(max(file.tell(), os.fstat(file.fileno()).st_size - LAST_BYTES))
                rows = file.read(LAST_BYTES).rpartition(b"\n")[0].splitlines()
            return dict(zip(titles, rows[-1].decode().split(","), strict=False)) if rows else {}
        return {}

    def events(self, now: float) -> list[EventRow]:
        """What has happened, the newest last, as far back as MAX_BYTES. `now`: seconds since 1970,
        from which their ages are counted."""
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
        """What failed last, for people; "" where nothing has since then (seconds since 1970)."""
        with contextlib.suppress(OSError), open(self.path / ERROR, "rb") as file:
            if os.fstat(file.fileno()).st_mtime < since:
                return ""
            return file.read(MAX_BYTES).decode(errors="replace")
        return ""

    def begin_again(self) -> None:
        """Its job is to be started once more. OSError."""
        if job := self.job():
            again = replace(job, pid=0, started=0, formed=0.0, endpoint="", began=time.time())
            self.write_job(self.next_start(job, again))
        else:
            (self.path / RESULT).unlink(missing_ok=True)

    def next_start(self, before: JobRecord, job: JobRecord) -> JobRecord:
        """`job` as the start that follows `before`, whose result goes and whose incidents are kept.
        OSError."""
        result = self.result()
        saved = result.saved if result is not None else before.resumed_at
        (self.path / RESULT).unlink(missing_ok=True)
        self._keep_incidents(before.attempt)
        first = before.first_began or before.began
        attempt = before.attempt + 1
        return replace(job, attempt=attempt, first_began=first, resumed_at=saved)

    def _keep_incidents(self, attempt: int) -> None:
        """Those of this start, before another counts from 1 again: 0007.json becomes 1-0007.json.
        OSError."""
        for path in list((self.path / INCIDENTS).glob("*.*")):
            if path.stem.isdecimal():
                path.rename(path.with_name(f"{attempt}-{path.name}"))

    def write_job(self, job: JobRecord) -> None:
        """In place of the one that is there; bytes of arguments and paths that are no text become
        "?". OSError."""
        self._write(JOB, job)

    def write_result(self, result: RunResult) -> None:
        """How the job has ended, in place of what is there. OSError."""
        try:
            self._write(RESULT, result)
        except OSError as wrong:
            if wrong.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            os.truncate(self.path / LOCK, 0)  # the room that was kept for it
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


def hold(path: Path) -> int:
    """A descriptor by which the folder is held until it is closed, or its process ends.
    BlockingIOError where another one holds it, OSError."""
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_LOCK, fcntl.F_WRLCK, 0, 0, 0, 0))
    except OSError as wrong:
        if wrong.errno not in NO_LOCKS:
            os.close(fd)
            raise
    with contextlib.suppress(OSError):  # a full disk is told of by others
        os.posix_fallocate(fd, 0, KEPT_ROOM)
    return fd


def replace_file(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Write it as a whole or not at all, also where others may write; with `sync`, also where the
    power fails. OSError."""
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
