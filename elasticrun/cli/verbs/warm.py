"""`elasticrun warm`: a process that keeps torch imported, so that later jobs fork from it."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from elasticrun.agent import warm
from elasticrun.cli.flags import PROG, Parser
from elasticrun.cli.settings import UsageError
from elasticrun.config import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from elasticrun.host.user_folder import user_folder
from elasticrun.wire import env, frames, spawning

ANSWER_LIMIT: Final = 5.0
"""Seconds to wait for a warm process to describe itself."""


def main(words: Sequence[str], notify: Callable[[str], None]) -> int:
    """Start a warm process, or list or stop this user's. Returns the exit code. Raises
    UsageError."""
    args = _parser().parse_args(list(words))
    given = [n for n, is_given in (("idle", args.idle is not None), ("one-rank", args.one_rank))
             if is_given]  # fmt: skip
    if given and (args.list or args.stop):
        way = "list" if args.list else "stop"
        raise UsageError(f"--{given[0]} has no effect with --{way}", EXIT_USAGE)
    try:
        folder = user_folder(os.environ)
    except OSError as error:
        raise UsageError(f"no folder for the socket: {error}", EXIT_FAILED) from None
    if args.list:
        return _list(folder)
    if args.stop:
        return _stop(folder, notify)
    serves = _serves(one_rank=args.one_rank)
    return _start(_environ(one_rank=args.one_rank), serves, args.idle, notify)


def _serves(*, one_rank: bool) -> str:
    """Which jobs from this shell can fork from the process, as a phrase: torch sizes its thread
    pools when it is imported."""
    if os.environ.get(env.OMP_NUM_THREADS):
        return f"jobs with {env.OMP_NUM_THREADS}={os.environ[env.OMP_NUM_THREADS]}"
    if one_rank:
        return "jobs with one rank per node"
    return "jobs with several ranks per node (--one-rank: for jobs with one)"


def _environ(*, one_rank: bool) -> dict[str, str]:
    """The variables with which the fork server of a job from this shell starts."""
    return {**({} if one_rank else {env.OMP_NUM_THREADS: "1"}), **os.environ}


def _seconds(minutes: str) -> float:
    """Parse the value of --idle, in minutes. Returns seconds."""
    with contextlib.suppress(ValueError):
        if 0 < float(minutes) <= 7 * 24 * 60:
            return float(minutes) * 60
    raise argparse.ArgumentTypeError(f"{minutes!r} is not a number of minutes up to a week")


def _parser() -> Parser:
    made = Parser(
        prog=f"{PROG} warm",
        description="Keep a process that has imported torch. Later jobs of the same user, with the "
        "same interpreter and environment, are forked from it.",
        epilog="It ends by itself when no job has used it for a while. A job whose surroundings "
        "differ (docs/warm.md) starts without it, and says why.",
    )
    made.add_argument(
        "--idle", type=_seconds, metavar="MINUTES",
        help=f"End after this many minutes without a job. [default {warm.IDLE / 60:g}]",
    )  # fmt: skip
    made.add_argument(
        "--one-rank", action="store_true",
        help="For jobs with one rank per node, for which OMP_NUM_THREADS is not set to 1.",
    )  # fmt: skip
    ways = made.add_mutually_exclusive_group()
    ways.add_argument("--list", action="store_true", help="Show warm processes.")
    ways.add_argument("--stop", action="store_true", help="End warm processes; jobs keep running.")
    return made


def _start(
    environ: dict[str, str], serves: str, idle: float | None, notify: Callable[[str], None]
) -> int:
    path = warm.socket_path(environ)
    there = _describe(path)
    if there is not None:
        notify(f"process {there.pid} is already warm, with torch {there.torch}, for {serves}")
        if idle is not None:
            notify("--idle has no effect on it: `elasticrun warm --stop` first")
        if reason := warm.refusal(path, environ):
            notify(f"jobs of this shell cannot use it: {reason}; {warm.REMEDY}")
            return EXIT_FAILED
        return EXIT_OK if idle is None else EXIT_FAILED
    idle = warm.IDLE if idle is None else idle
    answer, pid = warm.start(path, idle, environ)
    word, _, rest = answer.partition(" ")
    if word != "ok":
        notify(f"error: cannot start a warm process: {rest or 'it died during its start'}")
        return EXIT_FAILED
    notify(f"process {pid} is warm, with torch {rest}, for {serves}; it ends after "
        f"{idle / 60:g} minutes without a job")  # fmt: skip
    return EXIT_OK


def _live_processes(folder: Path) -> Iterator[tuple[Path, spawning.Description]]:
    """The sockets of this user's warm processes that answer, with each process's description."""
    for path in sorted(folder.glob("warm-*.sock")):
        if path.is_socket() and (found := _describe(path)) is not None:
            yield path, found


def _describe(path: Path) -> spawning.Description | None:
    """The description of the process at a socket; None if it does not answer."""
    answer = _send(path, spawning.Describe())
    return answer if isinstance(answer, spawning.Description) else None


def _send(path: Path, word: spawning.ToWarm) -> spawning.FromWarm | None:
    """Send a message and return the answer; None if the process does not support the message or has
    exited. Removes the socket of a process that has exited."""
    try:
        with warm.connect(path, ANSWER_LIMIT) as conn:
            conn.sendall(frames.encode(word))
            return warm.receive(conn)
    except ConnectionRefusedError:  # it was killed, or the socket belongs to another host
        if warm.may_remove(path):
            with contextlib.suppress(OSError):
                path.unlink()
    except (OSError, frames.FrameError):
        pass
    return None


def _list(folder: Path) -> int:
    rows = [("PID", "TORCH", "MODULES", "MEMORY", "JOBS", "ENDS IN", "WHERE")]
    for path, found in _live_processes(folder):
        ends = f"{found.left / 60:.0f} min" if found.left >= 90 else f"{found.left:.0f} s"
        rows.append((
            str(found.pid), found.torch, str(found.modules),
            _memory(found.pid), str(found.served), ends,
            _usable_for(path),
        ))  # fmt: skip
    if len(rows) == 1:
        print("no warm process")
        return EXIT_OK
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    return EXIT_OK


def _usable_for(path: Path) -> str:
    """For which jobs from this shell the warm process at `path` is used, or why for none."""
    for one_rank, words in ((False, "here"), (True, "here, for jobs of one rank")):
        environ = _environ(one_rank=one_rank)
        used = warm.find(environ)
        if used is None:
            return f"not here: {env.WARM_SERVER}={warm.OFF}"
        if path == used:
            reason = warm.refusal(path, environ)
            return f"not here: {reason}" if reason else words
    return "another environment, cgroup or namespace"


def _memory(pid: int) -> str:
    """The proportional set size (PSS) of the process: memory shared with jobs counts in part."""
    import psutil

    try:
        return f"{psutil.Process(pid).memory_full_info().pss / 2**20:.0f} MB"
    except psutil.Error:
        return "unknown"


def _stop(folder: Path, notify: Callable[[str], None]) -> int:
    pids = []
    for path, found in _live_processes(folder):
        _send(path, spawning.Leave())
        pids.append(found.pid)
    if left := [pid for pid in pids if not _await_exit(pid)]:
        notify(f"error: still running: {', '.join(map(str, left))}")
        return EXIT_FAILED
    notify(f"{len(pids)} ended" if pids else "no warm process")
    return EXIT_OK


def _await_exit(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError), open(os.pidfd_open(pid), "rb", 0) as pidfd:
        return bool(select.select([pidfd], [], [], ANSWER_LIMIT)[0])
    return True
