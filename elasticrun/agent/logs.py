"""Where the output of ranks goes: torchrun's tree of files, and the copy of tee'd streams.

`<log_dir>/<run_id>_<8 random>/attempt_<N>/<local_rank>/{stdout.log,stderr.log,error.json}`. Ranks
write their files themselves (the spawner opens them), so nothing here is on their way. Earlier
attempts are never removed: what a world printed before it ended is what one wants to read.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import string
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from elasticrun.agent.console import FROZEN_AFTER, ConsoleWriter
from elasticrun.agent.logs_plugin import Destinations, LogsPlugin
from elasticrun.agent.tail import LineFilter, Reader, Tail
from elasticrun.config import LogPlan
from elasticrun.operator_log import logger
from elasticrun.wire import env

STDOUT = 1
STDERR = 2
DEV_NULL = os.devnull


class LogsUnusable(Exception):
    """Log files cannot be written as asked; the text is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class RankLogs:
    """Where one rank writes, in the words of `wire.spawner.SpawnRank`."""

    stdout: str  # "": the launcher's own; "/dev/null": nowhere
    stderr: str
    error_file: str  # "": nowhere


class RankOutput:
    """The output of all local ranks over all their lives.

    `prepare`, `open_attempt` and `close` touch the disk and may block: call them in a thread.
    `rank_exited` returns at once.
    """

    def __init__(
        self,
        plan: LogPlan,
        run_id: str,
        role: str,
        nproc: int,
        *,
        stdout_fd: int = 1,
        stderr_fd: int = 2,
        patience: float = FROZEN_AFTER,
    ) -> None:
        self._plan = plan
        self._run_id = run_id
        self._role = role
        self._nproc = nproc
        self._reader = Reader()
        self._consoles = {
            STDOUT: ConsoleWriter(stdout_fd, patience=patience),
            STDERR: ConsoleWriter(stderr_fd, patience=patience),
        }
        self._plugin: LogsPlugin | None = None
        self._run_dir = ""
        self._warned_filters = False

    @property
    def run_dir(self) -> str:
        """The folder of this run; empty before `prepare`, with a plug-in and with /dev/null."""
        return self._run_dir

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
                base = tempfile.mkdtemp(prefix="torchelastic_")
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
        return logs

    def rank_exited(self, local_rank: int) -> None:
        """The rank has been reaped: its files are read for LOG_DRAIN seconds more."""
        self._reader.rank_gone(local_rank)

    def close(self, timeout: float) -> int:
        """Show what there is to the end. Gives up when a console takes nothing, or the disk gives
        nothing, for `timeout` seconds. Returns how many lines were never shown."""
        if not self._reader.stop(timeout):
            logger.warning("log files could not be read to their end: the disk does not answer")
        dropped = sum(console.close(timeout) for console in self._consoles.values())
        self._tidy()
        if dropped:
            where = f"; the files in {self._run_dir} have them" if self._run_dir else ""
            logger.warning(
                "%d lines of rank output were not shown on the console%s", dropped, where
            )
        return dropped

    def _tidy(self) -> None:
        """A folder under $TMPDIR that nobody asked for, and into which nothing was written, goes
        again. `rmdir` removes empty folders only, so whatever a rank has left is kept."""
        if self._plan.log_dir is not None or not self._run_dir:
            return
        for folder, _, _ in os.walk(os.path.dirname(self._run_dir), topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    # ---------------------------------------------------------------- one attempt

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
                    files[local_rank] = "" if shown else DEV_NULL
            places.error_files[local_rank] = os.path.join(own, "error.json")
        return places

    def _follow(self, places: Destinations, envs: Mapping[int, dict[str, str]]) -> None:
        tails: list[Tail] = []
        filters: list[LineFilter] = []
        for stream, tees, needles, path in (
            (STDOUT, places.tee_stdouts, self._plan.stdout_filters, places.filtered_stdout),
            (STDERR, places.tee_stderrs, self._plan.stderr_filters, places.filtered_stderr),
        ):
            copy = self._open_filter(needles, path)
            if copy is not None:
                filters.append(copy)
            for local_rank, file in sorted(tees.items()):
                if not file or file == DEV_NULL:
                    continue
                with open(file, "wb"):  # it must be there, and empty, before it can be watched
                    pass
                prefix = self._prefix(local_rank, envs[local_rank])
                tails.append(Tail(local_rank, file, prefix, self._consoles[stream], copy))
        if tails or filters:
            self._reader.add(tails, filters)

    def _open_filter(self, needles: tuple[str, ...], path: str) -> LineFilter | None:
        if not needles:
            return None
        if not path or path.startswith(DEV_NULL):
            if not self._warned_filters:
                logger.warning("--duplicate-*-filters does nothing: there is no log folder")
                self._warned_filters = True
            return None
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
