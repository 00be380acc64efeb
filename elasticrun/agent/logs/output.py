"""The output of ranks: torchrun's tree of log files, and the console copy of tee'd streams.

`<log_dir>/<run_id>_<8 random>/attempt_<N>/<local_rank>/{stdout.log,stderr.log,error.json}`. Ranks
write their files themselves (the spawner opens them), so this module does not delay them. A new
attempt does not remove the files of earlier ones: the user wants to read what ranks printed before
they failed.

A run without --log-dir gets a folder under $TMPDIR, in which its agent holds a file lock as long as
it runs. Folders without the lock file belong to torchrun or were kept on purpose, and are never
removed.
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
from typing import Any, Final

from elasticrun.agent.logs.console import FROZEN_AFTER, ConsoleWriter
from elasticrun.agent.logs.folded import FoldedConsole
from elasticrun.agent.logs.last_lines import last_lines
from elasticrun.agent.logs.log_index import LogNotes
from elasticrun.agent.logs.tail import LineFilter, Reader, Tail
from elasticrun.config import LogPlan
from elasticrun.host.log import logger
from elasticrun.wire import env

PREFIX: Final = "torchelastic_"

LOCK: Final = ".owner"

KEPT_FOR: Final = 24 * 3600.0
"""Seconds after its last line for which a killed run's output is kept. The next run would remove it
otherwise, and a scheduler starts that run before anybody has read the output."""

MAX_SWEPT: Final = 4096
"""Maximum number of entries of the temporary folder that a sweep examines."""

STDOUT = 1

STDERR = 2

DEV_NULL = os.devnull

MOST_NAMED = 3
"""Maximum number of files named in one sentence."""


PLUGINS: Final = "torchrun.logs_specs"
"""Group of the entry points that --logs-specs may name."""


@dataclass(slots=True)
class Destinations:
    """The fields of torch's LogsDest: by local rank the file of each stream ("" is the launcher's
    own stream), the streams copied to the console, and the error files."""

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogsPlugin:
    """The user's LogsSpecs, named by --logs-specs.

    Its interface is torch's (`LogsSpecs.reify(envs) -> LogsDest`), so the agent imports torch here,
    and only then. A log line says so, because that costs memory and time. Raises what the plug-in
    raises; ValueError if there is no such plug-in."""

    def __init__(self, plan: LogPlan, nproc: int) -> None:
        from importlib import metadata  # its import takes a tenth of an agent's start

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
        """Call the plug-in; it may also change `envs` (torch's own sets the error file there).
        Fields that its torch version's LogsDest lacks stay empty."""
        dest, ours = self._specs.reify(dict(envs)), Destinations()
        for name in ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files"):
            files = getattr(dest, name, None) or {}
            setattr(ours, name, {int(rank): str(path) for rank, path in files.items()})
        for name in ("filtered_stdout", "filtered_stderr"):
            setattr(ours, name, str(getattr(dest, name, "") or ""))
        return ours


class LogFolder:
    """The folder `torchelastic_XXXX` of a run without --log-dir, locked until `leave` or the end of
    the process. Raises OSError if it cannot be created."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        lock = os.path.join(self.path, LOCK)
        self._fd = os.open(lock + ".new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks: never swept
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(lock + ".new", lock)  # locked before it is visible

    def leave(self, superfluous: Iterable[str]) -> None:
        """At the end of the run: remove the files with these names and all folders that are empty
        then, and release and remove the lock. All other files are kept, also by later sweeps."""
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
    """Remove the folders of this user's killed runs: those without output at once, others KEPT_FOR
    seconds after their last line."""
    now = time.time() if now is None else now
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for _, entry in zip(range(MAX_SWEPT), entries, strict=False):
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
    """The modification times of the non-empty files."""
    for folder, _, files in os.walk(path):
        for file in files:
            about = os.lstat(os.path.join(folder, file))
            if about.st_size:
                yield about.st_mtime


_FILES: Final = {STDOUT: "stdout.log", STDERR: "stderr.log"}

_BEFORE: Final = ".next"
"""A folder beside those of the attempts, for files of standbys."""


class LogsUnusable(Exception):
    """Log files cannot be written as requested; the text is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class RankLogs:
    """The output paths of one rank, as in `wire.spawning.SpawnRank`."""

    stdout: str  # "": the launcher's own; "/dev/null": discarded
    stderr: str
    error_file: str  # "": none


class RankOutput:
    """The output of all local ranks over all attempts.

    `prepare`, `open_attempt`, `last_lines`, `close` and `tidy` use the disk and may block: call
    them in a thread. `rank_exited` returns at once.
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
        # Each stream has its own reader, so that an unread stdout does not delay stderr.
        logged: set[str] = set()
        self._readers = {STDERR: Reader(logged=logged), STDOUT: Reader(logged=logged)}
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
        self._has_unshown = False
        """Whether the files contain output that was not shown on the console."""
        self._warned_filters = False
        self.notes: LogNotes | None = None
        """Records where the files are, for `elasticrun logs`."""

    @property
    def run_dir(self) -> str:
        """The folder of this run; empty before `prepare`, with a plug-in and with /dev/null."""
        return self._run_dir

    @property
    def has_files(self) -> bool:
        """Whether the output of any rank goes to files in `run_dir`."""
        plan = self._plan
        some = plan.redirects_all | plan.tee_all | any(plan.redirects.values())
        return bool(self._run_dir) and bool(some | any(plan.tee.values()))

    @property
    def is_kept(self) -> bool:
        """Whether `run_dir` still exists after a failed job: the user named it, or it has output of
        a rank."""
        return self.has_files or (bool(self._run_dir) and self._plan.log_dir is not None)

    def prepare(self) -> None:
        """Create the folder of this run, or load the plug-in. Raises LogsUnusable. May be called
        early, so that a wrong --log-dir ends the launcher before any rank starts."""
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
        # Replace characters that a folder's name cannot contain.
        name = re.sub(r"[/\0]", "_", self._run_id)[:128]
        try:
            if base is None:
                self._folder = LogFolder()
                base = self._folder.path
            else:
                os.makedirs(base, exist_ok=True)
            self._run_dir = tempfile.mkdtemp(prefix=f"{name}_", dir=base)
        except OSError as error:
            where = f"no folder can be created in {base or 'the folder for temporary files'}"
            raise LogsUnusable(
                f"{where} for logs: {error.strerror}; choose another with --log-dir or --run-dir"
            ) from error
        logger.info("log directory set to: %s", self._run_dir)

    def open_attempt(self, attempt: int, envs: Mapping[int, dict[str, str]]) -> dict[int, RankLogs]:
        """Create the files of one attempt of all local ranks, and follow the tee'd ones.

        `envs` are the ranks' variables by local rank. Prefixes and plug-ins read them.
        TORCHELASTIC_ERROR_FILE is added to each rank's, as under torchrun. Raises LogsUnusable.
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
            else:  # the plug-in may have set another file, or none
                error_file = variables.setdefault(env.ERROR_FILE, error_file)
            logs[local_rank] = RankLogs(
                places.stdouts.get(local_rank, ""), places.stderrs.get(local_rank, ""), error_file
            )
        self._logs = logs
        return logs

    def last_lines(self, local_rank: int) -> str:
        """The last lines that this rank wrote to its files, if any. Blocks."""
        logs = self._logs.get(local_rank)
        return "" if logs is None else last_lines((logs.stdout, logs.stderr))

    def rank_exited(self, local_rank: int) -> None:
        """Call when the rank has been reaped: its files are read for another LOG_DRAIN seconds."""
        for reader in self._readers.values():
            reader.rank_exited(local_rank)

    def hurry(self, seconds: float) -> None:
        """Limit `close` to this many seconds: first stderr is shown, then stdout in the remaining
        time. Callable from any thread."""
        until = time.monotonic() + seconds
        with self._order:
            self._consoles[STDOUT].hold(not self._stderr_shown)
        for console in self._consoles.values():
            console.hurry(until)

    def close(self, timeout: float) -> int:
        """Show all output, however long that takes, as long as somebody reads it.

        Gives up on a console that nobody reads, and on a disk that returns nothing, for `timeout`
        seconds. Logs what was not shown and returns the number of its bytes."""
        for reader in self._readers.values():
            reader.stop()
        for stream, reader in self._readers.items():
            console = self._consoles[stream]
            if not reader.join(timeout, console):
                logger.warning("the log files were not fully read: the disk does not respond")
            console.close(timeout)
            with self._order:
                self._stderr_shown = True
                self._consoles[STDOUT].hold(False)
        cut = self._log_unshown()
        self._has_unshown |= cut > 0
        return cut

    def _log_unshown(self) -> int:
        """Log the files with output that was not shown, those with the most first; returns the
        number of bytes."""
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
                where += f" and {len(lost) - MOST_NAMED} more"
            words = "%s of the ranks' %s were not shown, because %s; it is all in these files: %s"
            logger.warning(words, _amount(count), name, console.why_over, where)
        return total

    def tidy(self, *, ended_well: bool = False) -> None:
        """Call after `close`: clean up the folder under $TMPDIR, and folders that killed runs have
        left.

        All files of a failed job, files that ranks created, and output that was not shown are
        kept."""
        if self._run_dir:
            shutil.rmtree(os.path.join(self._run_dir, _BEFORE), ignore_errors=True)
        if self._folder is not None:
            useless = ended_well and not self._has_unshown
            self._folder.leave(("stdout.log", "stderr.log", "error.json") if useless else ())
            self._folder = None
        sweep()

    # ---------------------------------------------------------------- one attempt

    def shows_stderr(self, local_rank: int) -> bool:
        """Whether this rank's stderr certainly appears on the terminal."""
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
        has_standbys = os.path.isdir(os.path.join(self._run_dir, _BEFORE))
        for local_rank in envs:
            own = os.path.join(folder, str(local_rank))
            os.mkdir(own)
            tee = plan.tee.get(local_rank, plan.tee_all)
            for bit, files, tees in (
                (STDOUT, places.stdouts, places.tee_stdouts),
                (STDERR, places.stderrs, places.tee_stderrs),
            ):
                files[local_rank] = file = self._destination(local_rank, bit, own)
                if not file.startswith(own):
                    continue
                if has_standbys:
                    with contextlib.suppress(OSError):  # a standby has it open
                        os.rename(self._before(local_rank, bit, own), file)
                        os.utime(file)
                if tee & bit and self._is_shown(local_rank):
                    tees[local_rank] = file
                else:
                    self._has_unshown = True
            places.error_files[local_rank] = os.path.join(own, "error.json")
        if self.notes is not None and self.has_files:
            with contextlib.suppress(OSError):  # only a convenience
                ranks = {local_rank: int(envs[local_rank][env.RANK]) for local_rank in envs}
                self.notes.add(folder, attempt, ranks)
        return places

    def _is_shown(self, local_rank: int) -> bool:
        shown = self._plan.local_ranks_filter
        return not shown or local_rank in shown

    def _destination(self, local_rank: int, bit: int, own: str) -> str:
        """Where a stream of a rank goes (`RankLogs`); `own`: the folder of its files."""
        plan = self._plan
        to_file = plan.redirects.get(local_rank, plan.redirects_all)
        to_file |= plan.tee.get(local_rank, plan.tee_all)
        if to_file & bit:
            return os.path.join(own, _FILES[bit])
        return "" if self._is_shown(local_rank) else DEV_NULL

    def _before(self, local_rank: int, bit: int, own: str) -> str:
        """The same while only a standby has the file."""
        place = self._destination(local_rank, bit, own)
        if not place.startswith(own):
            return place
        return os.path.join(self._run_dir, _BEFORE, f"{local_rank}.{_FILES[bit]}")

    def foresee(
        self, attempt: int, envs: Mapping[int, dict[str, str]]
    ) -> dict[int, tuple[RankLogs, RankLogs]]:
        """The logs that `open_attempt` will give the ranks of a later attempt, and where their
        standbys open these files until then; adds to `envs` as that does. Empty if a plug-in
        chooses the files. Blocks."""
        found: dict[int, tuple[RankLogs, RankLogs]] = {}
        for local_rank, variables in envs.items() if self._plugin is None else ():
            variables[env.ERROR_FILE] = ""
            later = now = RankLogs("", "", "")
            if self._run_dir:
                own = os.path.join(self._run_dir, f"attempt_{attempt}", str(local_rank))
                error = variables[env.ERROR_FILE] = os.path.join(own, "error.json")
                out, err = (self._destination(local_rank, bit, own) for bit in _FILES)
                later = RankLogs(out, err, error)
                out, err = (self._before(local_rank, bit, own) for bit in _FILES)
                now = RankLogs(out, err, error)
                if now != later:
                    os.makedirs(os.path.join(self._run_dir, _BEFORE), exist_ok=True)
            found[local_rank] = (later, now)
        return found

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
                with open(file, "wb"):  # it must exist and be empty before it can be watched
                    pass
                prefix = self._prefix(local_rank, envs[local_rank])
                tails.append(Tail(local_rank, file, prefix, self._consoles[stream], copy))
            self._fold(stream, tails, envs)
            if tails or copy is not None:
                self._readers[stream].add(tails, () if copy is None else (copy,))

    def _fold(self, stream: int, tails: list[Tail], envs: Mapping[int, dict[str, str]]) -> None:
        """Fold the lines of several ranks on a terminal, unless the user has defined a prefix,
        which names one rank."""
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
                logger.warning("--duplicate-*-filters has no effect without a log folder")
                self._warned_filters = True
            return None
        self._has_unshown = True  # the user asked for these files
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
    """The destinations with --log-dir=/dev/null: no files. As under torchrun, all streams then go
    to the console, even with --redirects."""
    return Destinations(
        stdouts=dict.fromkeys(envs, ""),
        stderrs=dict.fromkeys(envs, ""),
        error_files=dict.fromkeys(envs, ""),
    )


def _fresh_folder(path: str) -> str:
    """Create `path`, or `path.1`, `path.2`, ... if an earlier attempt has left one of that name."""
    candidate = path
    for number in range(1, 1_000_000):
        try:
            os.makedirs(candidate)
        except FileExistsError:
            candidate = f"{path}.{number}"
        else:
            return candidate
    raise OSError(f"no free name for {path}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
