"""Where the output of ranks goes: torchrun's tree of files, and the copy of tee'd streams.

`<log_dir>/<run_id>_<8 random>/attempt_<N>/<local_rank>/{stdout.log,stderr.log,error.json}`. Ranks
write their files themselves (the spawner opens them), so nothing here is on their way. Earlier
attempts are never removed: what a world printed before it ended is what one wants to read.

A run that named no folder has one under $TMPDIR. Its owner holds the lock of a file in it for as
long as it lives; what is there without the file is torchrun's, or was kept on purpose, and is
nobody's to remove.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import re
import shutil
import socket
import string
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Final

from elasticrun.agent.logs.console import FROZEN_AFTER, ConsoleWriter
from elasticrun.agent.logs.folded import FoldedConsole
from elasticrun.agent.logs.last_lines import last_lines
from elasticrun.agent.logs.tail import LineFilter, Reader, Tail
from elasticrun.agent.logs.whereabouts import LogNotes
from elasticrun.config import LogPlan
from elasticrun.host.log import logger
from elasticrun.wire import env

PREFIX: Final = "torchelastic_"

LOCK: Final = ".owner"

KEPT_FOR: Final = 24 * 3600.0
"""Seconds since its last line for which output is kept whose owner was killed: people read the
logs of a run that has ended so, and a scheduler starts the next run at once."""

MOST: Final = 4096
"""Entries of the folder for temporary files that are looked at."""

STDOUT = 1

STDERR = 2

DEV_NULL = os.devnull

MOST_NAMED = 3
"""Files named in one sentence."""


PLUGINS: Final = "torchrun.logs_specs"
"""Group of the entry points that --logs-specs may name."""


@dataclass(slots=True)
class Destinations:
    """The shape of torch's LogsDest: by local rank the file of each stream ("" is the launcher's
    own stream), which of them are copied to the console, and where errors are described."""

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogsPlugin:
    """The user's LogsSpecs, named by --logs-specs. Its contract is torch's (`LogsSpecs.reify(envs)
    -> LogsDest`), so torch is loaded here, late, in the agent; a line says so because it costs
    memory and time. Raises what the plug-in raises; ValueError if there is none."""

    def __init__(self, plan: LogPlan, nproc: int) -> None:
        name = plan.logs_specs or ""
        points = list(metadata.entry_points(group=PLUGINS, name=name))
        if not points:
            raise ValueError(f"no entry point of that name in the group {PLUGINS}")
        logger.warning("loading torch in the agent for --logs-specs %s", name)
        std = importlib.import_module("torch.distributed.elastic.multiprocessing").Std

        def words(every: int, by_rank: Mapping[int, int]) -> Any:
            if not by_rank:
                return std(every)
            return {i: std(by_rank.get(i, every)) for i in range(nproc)}

        self._specs = points[0].load()(
            log_dir=plan.log_dir,
            redirects=words(plan.redirects_all, plan.redirects),
            tee=words(plan.tee_all, plan.tee),
            local_ranks_filter=set(plan.local_ranks_filter) if plan.local_ranks_filter else None,
        )

    def reify(self, envs: Mapping[int, dict[str, str]]) -> Destinations:
        """Ask the plug-in; it may change `envs` too (torch's own sets the error file there). What a
        LogsDest of its version does not have is empty."""
        dest, ours = self._specs.reify(dict(envs)), Destinations()
        for name in ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files"):
            files = getattr(dest, name, None) or {}
            setattr(ours, name, {int(rank): str(path) for rank, path in files.items()})
        for name in ("filtered_stdout", "filtered_stderr"):
            setattr(ours, name, str(getattr(dest, name, "") or ""))
        return ours


class LogFolder:
    """`torchelastic_XXXX`, ours until the process ends. Raises OSError if it cannot be made."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        lock = os.path.join(self.path, LOCK)
        self._fd = os.open(lock + ".new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks; then it is never swept
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(lock + ".new", lock)  # locked before anybody can see it

    def leave(self, superfluous: Iterable[str]) -> None:
        """At the end of the run: remove the files of these names, and what is empty then. The rest
        is kept on purpose."""
        names = {LOCK, LOCK + ".new", *superfluous}
        for folder, _, files in os.walk(self.path, topdown=False):
            for file in files:
                path = os.path.join(folder, file)
                with contextlib.suppress(OSError):
                    if file in names:
                        os.unlink(path)
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        os.close(self._fd)


def sweep(now: float | None = None) -> None:
    """Remove the folders of this user's runs that were killed: what nothing was written into at
    once, output KEPT_FOR seconds after its last line."""
    now = time.time() if now is None else now
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for _, entry in zip(range(MOST), entries, strict=False):
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _sweep_one(entry, now)


def _sweep_one(entry: os.DirEntry[str], now: float) -> None:
    if not entry.is_dir(follow_symlinks=False):
        return
    if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
        return
    fd = os.open(os.path.join(entry.path, LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        written = max(_last_written(entry.path), default=0.0)
        if written + KEPT_FOR < now:
            shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(fd)


def _last_written(path: str) -> Iterator[float]:
    """The times of the files in which there is something."""
    for folder, _, files in os.walk(path):
        for file in files:
            about = os.lstat(os.path.join(folder, file))
            if about.st_size:
                yield about.st_mtime


class LogsUnusable(Exception):
    """Log files cannot be written as asked; the text is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class RankLogs:
    """Where one rank writes, in the words of `wire.spawning.SpawnRank`."""

    stdout: str  # "": the launcher's own; "/dev/null": nowhere
    stderr: str
    error_file: str  # "": nowhere


class RankOutput:
    """The output of all local ranks over all their lives.

    `prepare`, `open_attempt`, `close` and `tidy` touch the disk and may block: call them in a
    thread. `rank_exited` returns at once.
    """

    def __init__(
        self,
        plan: LogPlan,
        run_id: str,
        role: str,
        nproc: int,
        stdout_fd: int = 1,
        stderr_fd: int = 2,
        *,
        patience: float = FROZEN_AFTER,
    ) -> None:
        self._plan = plan
        self._run_id = run_id
        self._role = role
        self._nproc = nproc
        # Each stream has a reader of its own: a stdout that nobody reads holds no stderr up.
        told: set[str] = set()
        self._readers = {STDERR: Reader(told=told), STDOUT: Reader(told=told)}
        self._consoles = {
            STDERR: ConsoleWriter(stderr_fd, patience=patience),
            STDOUT: ConsoleWriter(stdout_fd, patience=patience),
        }
        self._order = threading.Lock()
        self._stderr_shown = False
        self._plugin: LogsPlugin | None = None
        self._run_dir = ""
        self._logs: dict[int, RankLogs] = {}
        self._folder: LogFolder | None = None
        self._only_copy = False
        """Whether the files have what was not shown on the console."""
        self._warned_filters = False
        self.notes: LogNotes | None = None
        """Where the files are is noted there, for people who look for them."""

    @property
    def run_dir(self) -> str:
        """The folder of this run; empty before `prepare`, with a plug-in and with /dev/null."""
        return self._run_dir

    @property
    def has_files(self) -> bool:
        """Whether the output of some rank goes to files in `run_dir`."""
        plan = self._plan
        some = plan.redirects_all | plan.tee_all | any(plan.redirects.values())
        return bool(self._run_dir) and bool(some | any(plan.tee.values()))

    @property
    def is_kept(self) -> bool:
        """Whether `run_dir` is there when the job has ended: a person has named it, or it has the
        output of a rank."""
        return self.has_files or (bool(self._run_dir) and self._plan.log_dir is not None)

    def prepare(self) -> None:
        """Make the folder of this run, or load the plug-in. Raises LogsUnusable; may be called
        early, so that a wrong --log-dir ends the launcher before anything is started."""
        if self._run_dir or self._plugin is not None or self._plan.log_dir == DEV_NULL:
            return
        if self._plan.logs_specs is not None:
            try:
                self._plugin = LogsPlugin(self._plan, self._nproc)
            except Exception as error:
                raise LogsUnusable(
                    f"--logs-specs {self._plan.logs_specs} cannot be used: {_one_line(error)}"
                ) from error
            return
        base = self._plan.log_dir
        if base is not None and os.path.isfile(base):
            raise LogsUnusable(f"--log-dir {base} is a file; it must be a folder")
        # What a folder's name cannot hold, or would make several folders of.
        name = re.sub(r"[/\0]", "_", self._run_id)[:128]
        try:
            if base is None:
                self._folder = LogFolder()
                base = self._folder.path
            else:
                os.makedirs(base, exist_ok=True)
            self._run_dir = tempfile.mkdtemp(prefix=f"{name}_", dir=base)
        except OSError as error:
            where = f"no folder can be made in {base or 'the folder for temporary files'}"
            raise LogsUnusable(f"--log-dir: {where}: {error.strerror}") from error
        logger.info("log directory set to: %s", self._run_dir)

    def open_attempt(self, attempt: int, envs: Mapping[int, dict[str, str]]) -> dict[int, RankLogs]:
        """Make the files of one life of all local ranks and follow those that are tee'd.

        `envs` are the ranks' variables by local rank: prefixes and plug-ins read them, and each
        gets its TORCHELASTIC_ERROR_FILE here, as under torchrun. Raises LogsUnusable.
        """
        self.prepare()
        try:
            if self._plugin is not None:
                places = self._plugin.reify(envs)
            elif self._plan.log_dir == DEV_NULL:
                places = _nowhere(envs)
            else:
                places = self._default_places(attempt, envs)
            self._follow(places, envs)
        except OSError as error:
            raise LogsUnusable(f"cannot write logs: {error.strerror or error}") from error
        except RuntimeError as error:  # no thread
            raise LogsUnusable(f"cannot show the ranks' output: {error}") from error
        logs = {}
        for local_rank, variables in envs.items():
            error_file = places.error_files.get(local_rank, "")
            if self._plugin is None:
                variables[env.ERROR_FILE] = error_file
            else:  # the plug-in may have chosen to name another file, or none
                error_file = variables.setdefault(env.ERROR_FILE, error_file)
            logs[local_rank] = RankLogs(
                places.stdouts.get(local_rank, ""), places.stderrs.get(local_rank, ""), error_file
            )
        self._logs = logs
        return logs

    def last_lines(self, local_rank: int) -> str:
        """What this rank has written last, where it has files; blocks."""
        logs = self._logs.get(local_rank)
        return "" if logs is None else last_lines((logs.stdout, logs.stderr))

    def rank_exited(self, local_rank: int) -> None:
        """The rank has been reaped: its files are read for LOG_DRAIN seconds more."""
        for reader in self._readers.values():
            reader.rank_gone(local_rank)

    def hurry(self, seconds: float) -> None:
        """`close` is to end within so many seconds: first stderr is shown, then, in what is left of
        them, stdout. From any thread."""
        until = time.monotonic() + seconds
        with self._order:
            self._consoles[STDOUT].hold(not self._stderr_shown)
        for console in self._consoles.values():
            console.hurry(until)

    def close(self, timeout: float) -> int:
        """Show what there is to the end, however long that takes, as long as somebody reads. Gives
        a console up that nobody reads, and a disk that gives nothing, for `timeout` seconds. Says
        what was not shown; returns its bytes."""
        for reader in self._readers.values():
            reader.end()
        for stream, reader in self._readers.items():
            console = self._consoles[stream]
            if not reader.ended(timeout, console):
                logger.warning("log files could not be read to their end: the disk does not answer")
            console.close(timeout)
            with self._order:
                self._stderr_shown = True
                self._consoles[STDOUT].hold(False)
        cut = self._tell_cut()
        self._only_copy |= cut > 0
        return cut

    def _tell_cut(self) -> int:
        """Name the files that have what was not shown, those with the most of it first."""
        total = 0
        for stream, name in ((STDERR, "stderr"), (STDOUT, "stdout")):
            console = self._consoles[stream]
            lost = sorted(console.lost.items(), key=lambda item: -item[1])
            count = sum(size for _, size in lost)
            if not count:
                continue
            total += count
            where = ", ".join(f"{path} ({_amount(size)})" for path, size in lost[:MOST_NAMED])
            if len(lost) > MOST_NAMED:
                where += f" and {len(lost) - MOST_NAMED} more beside them"
            words = "%s of the ranks' %s were not shown, because %s; these files have it all: %s"
            logger.warning(words, _amount(count), name, console.why_over, where)
        return total

    def tidy(self, *, ended_well: bool = False) -> None:
        """After `close`: of the folder under $TMPDIR that nobody asked for, only what may still be
        wanted is kept: anything if the job failed, files of the ranks' own, output that was not
        shown. What killed runs have left goes too."""
        if self._folder is not None:
            useless = ended_well and not self._only_copy
            self._folder.leave(("stdout.log", "stderr.log", "error.json") if useless else ())
            self._folder = None
        sweep()

    # ---------------------------------------------------------------- one attempt

    def shows_stderr(self, local_rank: int) -> bool:
        """Whether what this rank writes to stderr is on the terminal for certain."""
        plan = self._plan
        tee = plan.tee.get(local_rank, plan.tee_all)
        hidden = plan.redirects.get(local_rank, plan.redirects_all) & ~tee & STDERR
        some = plan.logs_specs is not None or plan.local_ranks_filter or plan.stderr_filters
        return not (hidden or some)

    def _default_places(self, attempt: int, envs: Mapping[int, dict[str, str]]) -> Destinations:
        folder = _fresh_folder(os.path.join(self._run_dir, f"attempt_{attempt}"))
        places = Destinations(
            filtered_stdout=os.path.join(folder, "filtered_stdout.log"),
            filtered_stderr=os.path.join(folder, "filtered_stderr.log"),
        )
        plan = self._plan
        for local_rank in envs:
            own = os.path.join(folder, str(local_rank))
            os.mkdir(own)
            tee = plan.tee.get(local_rank, plan.tee_all)
            to_file = plan.redirects.get(local_rank, plan.redirects_all) | tee
            shown = not plan.local_ranks_filter or local_rank in plan.local_ranks_filter
            for bit, files, tees, name in (
                (STDOUT, places.stdouts, places.tee_stdouts, "stdout.log"),
                (STDERR, places.stderrs, places.tee_stderrs, "stderr.log"),
            ):
                if to_file & bit:
                    files[local_rank] = os.path.join(own, name)
                    if tee & bit and shown:
                        tees[local_rank] = files[local_rank]
                    else:
                        self._only_copy = True
                else:
                    files[local_rank] = "" if shown else DEV_NULL
            places.error_files[local_rank] = os.path.join(own, "error.json")
        if self.notes is not None and self.has_files:
            with contextlib.suppress(OSError):  # a convenience
                ranks = {local_rank: int(envs[local_rank][env.RANK]) for local_rank in envs}
                self.notes.add(folder, attempt, ranks)
        return places

    def _follow(self, places: Destinations, envs: Mapping[int, dict[str, str]]) -> None:
        for stream, tees, needles, path in (
            (STDOUT, places.tee_stdouts, self._plan.stdout_filters, places.filtered_stdout),
            (STDERR, places.tee_stderrs, self._plan.stderr_filters, places.filtered_stderr),
        ):
            tails: list[Tail] = []
            copy = self._open_filter(needles, path)
            for local_rank, file in sorted(tees.items()):
                if not file or file == DEV_NULL:
                    continue
                with open(file, "wb"):  # it must be there, and empty, before it can be watched
                    pass
                prefix = self._prefix(local_rank, envs[local_rank])
                tails.append(Tail(local_rank, file, prefix, self._consoles[stream], copy))
            self._fold(stream, tails, envs)
            if tails or copy is not None:
                self._readers[stream].add(tails, () if copy is None else (copy,))

    def _fold(self, stream: int, tails: list[Tail], envs: Mapping[int, dict[str, str]]) -> None:
        """Several ranks on a terminal are folded. A prefix of the user's own names one rank."""
        plan, console = self._plan, self._consoles[stream]
        if not plan.fold or plan.prefix_template or len(tails) < 2 or not console.is_terminal:
            return
        paths = {tail.local_rank: tail.path for tail in tails}
        folded = FoldedConsole(console, {i: int(envs[i][env.RANK]) for i in paths}, paths)
        for tail in tails:
            tail.folded = folded

    def _open_filter(self, needles: tuple[str, ...], path: str) -> LineFilter | None:
        if not needles:
            return None
        if not path or path.startswith(DEV_NULL):
            if not self._warned_filters:
                logger.warning("--duplicate-*-filters does nothing: there is no log folder")
                self._warned_filters = True
            return None
        self._only_copy = True  # not literally; it was asked for
        return LineFilter(path, needles)

    def _prefix(self, local_rank: int, variables: Mapping[str, str]) -> bytes:
        if not self._plan.prefix_template:
            return f"[{self._role}{local_rank}]:".encode(errors="surrogateescape")
        text = string.Template(self._plan.prefix_template).safe_substitute(
            role_name=self._role,
            local_rank=local_rank,
            rank=variables.get(env.RANK, ""),
            hostname=socket.gethostname(),
        )
        return text.encode(errors="surrogateescape")


def _amount(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count} bytes"


def _nowhere(envs: Mapping[int, dict[str, str]]) -> Destinations:
    """--log-dir /dev/null: no file at all; as under torchrun streams then go to the console even
    where a redirect was asked for."""
    return Destinations(
        stdouts=dict.fromkeys(envs, ""),
        stderrs=dict.fromkeys(envs, ""),
        error_files=dict.fromkeys(envs, ""),
    )


def _fresh_folder(path: str) -> str:
    """Make `path`, or `path.1`, `path.2`, ... if an earlier life has left one of that name."""
    candidate = path
    for number in range(1, 1_000_000):
        try:
            os.makedirs(candidate)
        except FileExistsError:
            candidate = f"{path}.{number}"
        else:
            return candidate
    raise OSError(f"{path} exists a million times")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
