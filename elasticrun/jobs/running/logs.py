"""`elasticrun logs`: the output of a job's ranks, from files on this host or in its run folder.

It also works after the job has ended. By default it prints the last lines of each rank in the
newest attempt; `--all` prints every attempt, in order. Failed ranks come first, in order of
failure. Before any rank exists, and if ranks have no files, it prints the launcher's output.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from elasticrun.agent.logs import log_index
from elasticrun.agent.logs.log_index import LoggedAttempt, LoggedRun
from elasticrun.cli.flags import Parser
from elasticrun.cli.settings import UsageError
from elasticrun.config import EXIT_USAGE
from elasticrun.host.log import columns_of, cut_to, open_line
from elasticrun.host.runs import index
from elasticrun.host.runs.layout import AGENTS, CONSOLE, ENDED, RunFolder
from elasticrun.jobs.manage.listing import add_output, parse_age
from elasticrun.jobs.running.attempts import AttemptTitles, RankFiles, attempt_ends, attempt_titles
from elasticrun.jobs.running.master_lookup import JOB
from elasticrun.wire.types import write_ranges

TAIL: Final = 20
"""Default number of lines from each file."""

STREAMS: Final = ("stdout.log", "stderr.log")

BLOCK: Final = 256 * 1024

FARTHEST: Final = 64 * 1024 * 1024
"""Bytes from the end of a file within which its last lines are searched."""

LOGS_KEPT_IF: Final = "the job has --run-dir, or --log-dir with --tee or --redirects"

LONG_WAIT: Final = 50
"""Polls after which `-f` prints that it waits for the first rank: a job may be in a Slurm queue for
days."""

POLL_EVERY: Final = 0.2
"""Seconds between two polls of followed files."""

BARS_EVERY: Final = 10
"""Polls between two printed states of a progress bar, if no line of the output can be
overwritten."""


@dataclass(frozen=True, slots=True)
class LogQuery:
    """What the user wants to see."""

    job: str
    follow: bool
    tail: int  # lines from each file; 0: all
    everything: bool  # all attempts
    rank: int | None
    node: str  # a node's name, or its host's; "": all nodes
    since: float  # seconds since 1970: only files written to after this time
    as_json: bool
    grep: re.Pattern[bytes] | None

    def matches(self, line: bytes) -> bool:
        """Whether to show the line."""
        return self.grep is None or self.grep.search(line) is not None

    def selects(self, run: LoggedRun) -> bool:
        """Whether to show the ranks of this agent."""
        return self.node in ("", run.node, run.host)

    def write(self, rank: int, path: Path, lines: Iterable[bytes]) -> None:
        """Write lines of a rank's file, prefixed with the rank, or as JSON. `rank`: -1 for the
        launcher, whose lines have no prefix."""
        for text in lines:
            if self.as_json:
                row = {
                    "life": path.parent.parent.name if rank >= 0 else "",
                    "rank": rank,
                    "stream": path.name.removesuffix(".log"),
                    "line": text.decode(errors="replace"),
                }
                text = json.dumps(row).encode()
            elif rank >= 0:
                text = b"[%d] %s" % (rank, text)
            self.put(path, text + b"\n")

    def write_unfinished(self, rank: int, path: Path, text: bytes, *, is_bar: bool) -> None:
        """Write the beginning of an unfinished line, or a state of a progress bar."""
        text = b"[%d] %s" % (rank, text)
        self.put(path, cut_to(text, columns_of(1)) if is_bar else text, ends=False)

    def put(self, path: Path, text: bytes, *, ends: bool = True) -> None:
        """Write to standard output, after ending an unfinished line of another file there. `ends`:
        whether `text` ends a line."""
        text = open_line(1).bytes_to_write(path, text, ends=ends, columns=columns_of(1))
        sys.stdout.buffer.write(text)


def main(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Run `elasticrun logs`. Returns 1 if there is nothing to show. Raises UsageError."""
    query = _parse_query(argv)
    variables = os.environ if environ is None else environ
    folder, unknown = _folder(variables, query.job)
    try:
        found = _runs(variables, query, folder)
        tries = 0
        while query.follow and folder is not None and _is_to_begin(folder, found):
            threading.Event().wait(POLL_EVERY)  # until a rank writes
            tries += 1
            if tries == LONG_WAIT:
                note = f"elasticrun logs: waiting for a rank of job {query.job} to start"
                print(note, file=sys.stderr)
            found = _runs(variables, query, folder)
    except OSError as wrong:
        print(f"elasticrun logs: the user's folder cannot be read: {wrong}", file=sys.stderr)
        return 1
    if found and folder is None:
        folder, _ = _folder(variables, found[0].job_id)
    console = folder.path / CONSOLE if folder is not None else None
    if not found and console is not None and console.exists() and console.stat().st_size:
        _name_job(query, folder)
        query.write(-1, console, _read(console, query)[1])
        return 0
    if not found:
        what = f"job {query.job}" if query.job else "any job of yours"
        words = (
            f"there are no log files of {what} on this host; ranks have log files if {LOGS_KEPT_IF}"
        )
        if folder is not None and folder.state() in ("submitted", "waiting"):
            words = f"{what} has not started; see `elasticrun status {query.job}`"
        print(f"elasticrun logs: {unknown or words}", file=sys.stderr)
        return 1
    if query.node:
        meant = log_index.find_run(found, query.node)
        if meant is None:
            print(
                f"elasticrun logs: {log_index.no_node_message(query.node, found)}", file=sys.stderr
            )
            return 1
        query = replace(query, node=query.node if query.node == meant.host else meant.node)
    ranks = {rank for run in found for attempt in run.lives for rank in attempt.ranks.values()}
    if query.rank is not None and query.rank not in ranks and not query.follow:
        there = write_ranges(ranks) or "none"
        words = f"no rank {query.rank} has log files here; ranks with files: {there}"
        print(f"elasticrun logs: {words}", file=sys.stderr)
        return 1
    _name_job(query, folder)
    offsets = _show(found, query, folder)
    if offsets and not query.follow and all(path.stat().st_mtime < query.since for path in offsets):
        print("elasticrun logs: no rank has written in that time", file=sys.stderr)
        return 1
    if query.follow:
        _follow(found, query, offsets, partial(_runs, variables, query, folder), folder)
    return 0


def _is_to_begin(folder: RunFolder, found: Sequence[LoggedRun]) -> bool:
    """Whether no rank of the current start, or of the one to come, has begun: then the agents in
    `found` are of an earlier start. On other hosts it is unknown whether they have exited."""
    state = folder.state()
    if state in ("saved", "submitted", "waiting"):
        return True
    return state not in ENDED and not any(run.is_alive for run in found)


def _name_job(query: LogQuery, folder: RunFolder | None) -> None:
    """Say on standard error whose output this is, unless the user typed the job's whole name."""
    job = folder.job() if folder is not None else None
    if folder is None or job is None or query.as_json:
        return
    if query.job not in folder.names and os.sep not in query.job:
        print(f"== job {job.name} ({folder.state()}) ==", file=sys.stderr, flush=True)


def _folder(environ: Mapping[str, str], job: str) -> tuple[RunFolder | None, str]:
    """The run folder of the named job, or None and the reason if there is no unique one."""
    if not job:
        return None, ""
    try:
        return index.find(index.runs_root(environ), job, newest=True), ""
    except (OSError, index.NoRun) as why:
        if os.path.isdir(os.path.join(job, AGENTS)):  # the master ran elsewhere: no job.json
            return RunFolder(Path(job)), ""
        return None, str(why)


def _parse_query(argv: Sequence[str]) -> LogQuery:
    made = Parser(
        prog="elasticrun logs",
        description="Print the output of a job's ranks from their log files on this host.",
        epilog=f"Ranks have log files if {LOGS_KEPT_IF}. Failed ranks come first.",
    )
    text = f"{JOB}; the newest one here"
    made.add_argument("job", nargs="?", metavar="JOB", default="", help=text)
    text = "keep printing new lines until the job ends, across suspend and resume"
    made.add_argument("-f", "--follow", action="store_true", help=text)
    text = f"the last N lines of each file, 0 for all [{TAIL}; with --all: 0]"
    made.add_argument("-t", "--tail", metavar="N", type=int, default=None, help=text)
    made.add_argument("--rank", metavar="R", type=int, default=None, help="only this rank")
    text = "output of all attempts, in order, instead of the newest"
    made.add_argument("--all", action="store_true", help=text)
    text = "only ranks on this node: its name, its host's name, or its index"
    made.add_argument("-i", "--node", "--instance", metavar="X", default="", help=text)
    text = "only files written to within this time: 90s, 5m, 12h, 7d"
    made.add_argument("--since", metavar="AGE", default="", help=text)
    add_output(made)
    text = "only lines that match this regular expression"
    made.add_argument("--grep", metavar="RE", default="", help=text)
    ns = made.parse_args(argv)
    tail = (0 if ns.all else TAIL) if ns.tail is None else ns.tail
    if tail < 0:
        raise UsageError(f"--tail={tail}: expected a number of lines", EXIT_USAGE)
    try:
        grep = re.compile(os.fsencode(ns.grep)) if ns.grep else None
    except re.error as wrong:
        raise UsageError(
            f"--grep={ns.grep}: invalid regular expression: {wrong}", EXIT_USAGE
        ) from None
    since = time.time() - parse_age(ns.since, "--since") if ns.since else 0.0
    as_json = ns.output == "json"
    return LogQuery(ns.job, ns.follow, tail, ns.all, ns.rank, ns.node, since, as_json, grep)


def _runs(environ: Mapping[str, str], query: LogQuery, folder: RunFolder | None) -> list[LoggedRun]:
    """The agents of the newest start of the job, or of every start with --all. They are recorded in
    its run folder, or else on this host, where only the newest start is used, because an earlier
    job may have had the same name."""
    job, known = query.job, log_index.runs_of(folder.path) if folder is not None else []
    if known and query.everything:
        return known
    if folder is not None and not known:
        record = folder.job()
        job = record.id if record is not None and record.id else job
    known = known or [run for run in log_index.runs(environ) if job in ("", run.job_id)]
    own = [run for run in known if run.job_id == known[0].job_id]
    return _by_start(own)[-1] if own else []


def _by_start(runs: Iterable[LoggedRun]) -> list[list[LoggedRun]]:
    """The agents of each start of the job, in order. An agent that begins after the last line of
    all earlier agents belongs to the next start."""
    starts: list[list[LoggedRun]] = []
    last = 0.0
    for run in sorted(runs, key=lambda run: run.began):
        if not starts or run.began > last:
            starts.append([])
        starts[-1].append(run)
        last = max(last, float("inf") if run.is_seen else _last_written(run))
    return starts


def _last_written(run: LoggedRun) -> float:
    times = [run.began]
    for attempt in run.lives[-1:]:
        times += [path.stat().st_mtime for path in Path(run.path, attempt.folder).glob("*/*.log")]
    return max(times)


def _attempts(
    runs: Iterable[LoggedRun], folder: RunFolder | None, *, everything: bool
) -> list[tuple[str, AttemptTitles]]:
    """The attempts in order, or only the newest: a title and the ranks, failed ranks first, in
    order of failure."""
    found: dict[tuple[int, str], list[tuple[LoggedRun, LoggedAttempt]]] = {}
    for start, agents in enumerate(_by_start(runs)):
        for run in agents:
            for attempt in run.lives:
                found.setdefault((start, attempt.folder), []).append((run, attempt))
    began_of = {name: min(attempt.began for _, attempt in parts) for name, parts in found.items()}
    ordered = sorted(found, key=lambda name: began_of[name])
    starts = [(found[name][0][1].attempt, began_of[name]) for name in ordered]
    why = dict(zip(ordered, attempt_ends(folder, starts), strict=True))
    shown = []
    for name in ordered if everything else ordered[-1:]:
        ranks = [
            RankFiles(rank, Path(run.path, attempt.folder, str(local_rank)))
            for run, attempt in found[name]
            for local_rank, rank in attempt.ranks.items()
        ]
        began = time.strftime("%F %T", time.localtime(began_of[name]))
        shown.append((f"{name[1]}, {began}", attempt_titles(ranks, why[name])))
    return shown


def _show(runs: Iterable[LoggedRun], query: LogQuery, folder: RunFolder | None) -> dict[Path, int]:
    """Print the existing output. Returns how far each file was read."""
    offsets: dict[Path, int] = {}
    attempts = _attempts(filter(query.selects, runs), folder, everything=query.everything)
    for title, attempt in attempts:
        if len(attempts) > 1:
            _title(title, query)
        if attempt.why and query.rank is None:
            _title(attempt.why, query)
        for files in attempt.ranks:
            if query.rank not in (None, files.rank):
                continue
            if heading := attempt.titles.get(files.rank):
                _title(heading, query)
            for stream in STREAMS:
                path = files.folder / stream
                try:
                    offsets[path], lines = _read(path, query)
                    late = path.stat().st_mtime >= query.since
                except OSError:
                    continue  # this stream has no file
                query.write(files.rank, path, lines if late else ())
    sys.stdout.flush()
    return offsets


def _title(text: str, query: LogQuery) -> None:
    if not query.as_json:
        sys.stdout.buffer.write(f"== {text} ==\n".encode(errors="replace"))


def _read(path: Path, query: LogQuery) -> tuple[int, Iterable[bytes]]:
    """The offset at which following the file continues, and the wanted lines. Raises OSError."""
    end = _whole_lines(path) if query.follow else path.stat().st_size
    whole = not query.tail or query.grep is not None
    start = 0 if whole else _start_of_tail(path, end, query.tail)
    lines = (line for line in _lines(path, start, end) if query.matches(line))
    return end, deque(lines, maxlen=query.tail) if query.tail else lines


def _whole_lines(path: Path) -> int:
    """The end of the last complete line, if one ends near the end of the file; else the file's
    size."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - BLOCK))
        newline = file.read(size - start).rfind(b"\n")
    return start + newline + 1 if newline >= 0 or start == 0 else size


def _start_of_tail(path: Path, end: int, lines: int) -> int:
    """An offset before which the last `lines` lines do not begin, at most about FARTHEST bytes
    before `end`."""
    start, found = end, 0
    with path.open("rb") as file:
        while start > max(0, end - FARTHEST) and found <= lines:
            size = min(BLOCK, start)
            start -= size
            file.seek(start)
            found += file.read(size).count(b"\n")
    return start


def _lines(path: Path, start: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while file.tell() < end and (line := file.readline(min(BLOCK, end - file.tell()))):
            yield _newest_state(line.rstrip(b"\r\n"))


def _newest_state(line: bytes) -> bytes:
    """The newest state of a progress bar; any other line unchanged."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _follow(
    runs: list[LoggedRun],
    query: LogQuery,
    offsets: dict[Path, int],
    find_runs: Callable[[], list[LoggedRun]],
    folder: RunFolder | None,
) -> None:
    """Print new lines until the job ends, including those of later attempts. A job that has saved
    is expected to be started again."""
    unfinished: dict[Path, bytes] = {}
    last_unfinished: dict[Path, bytes] = {}
    for _, attempt in _attempts(runs, None, everything=True):
        for path in (files.folder / stream for files in attempt.ranks for stream in STREAMS):
            if path not in offsets and path.exists():
                offsets[path] = path.stat().st_size  # of an earlier attempt
    waiting, waits = threading.Event(), False
    for turn in itertools.count():
        state = folder.state() if folder is not None else ""
        ending = state in ENDED if folder is not None else not any(run.is_alive for run in runs)
        saved = state == "saved"
        runs = [run for run in find_runs() if run.began >= min(old.began for old in runs)] or runs
        for _, attempt in _attempts(filter(query.selects, runs), None, everything=True):
            for files in attempt.ranks:
                for stream in STREAMS if query.rank in (None, files.rank) else ():
                    path = files.folder / stream
                    _print_new(files, path, offsets, unfinished, query)
                    bars = not turn % BARS_EVERY
                    if not ending:
                        _print_unfinished(files.rank, path, unfinished, last_unfinished, query)
                    _finish_line(files.rank, path, unfinished, query, ending=ending, bars=bars)
        sys.stdout.flush()
        if ending and not saved:
            break
        if saved and not waits:
            note = "elasticrun logs: the job has saved and left; waiting for its next start"
            print(note, file=sys.stderr)
        waits = saved
        waiting.wait(POLL_EVERY)


def _print_new(
    files: RankFiles,
    path: Path,
    offsets: dict[Path, int],
    unfinished: dict[Path, bytes],
    query: LogQuery,
) -> None:
    """Print the complete lines that were added to one file; `unfinished` keeps the rest."""
    try:
        with path.open("rb") as file:
            file.seek(offsets.get(path, 0))
            while data := file.read(BLOCK):
                offsets[path] = file.tell()
                *lines, rest = (unfinished.get(path, b"") + data).split(b"\n")
                if len(rest) > BLOCK:
                    lines, rest = [*lines, rest], b""
                unfinished[path] = rest
                query.write(files.rank, path, filter(query.matches, map(_newest_state, lines)))
    except OSError:
        return  # not there


def _print_unfinished(
    rank: int,
    path: Path,
    unfinished: dict[Path, bytes],
    last_unfinished: dict[Path, bytes],
    query: LogQuery,
) -> None:
    """Show an unfinished line that has not grown since the last poll, or on a terminal the newest
    state of a progress bar. With `--grep` and in JSON only complete lines are shown."""
    rest = unfinished.get(path, b"")
    before, last_unfinished[path] = last_unfinished.get(path, b""), rest
    is_bar = b"\r" in rest
    if query.as_json or query.grep is not None or not rest.strip():
        return
    if is_bar and columns_of(1):
        _, _, left = rest.rpartition(b"\r")
        query.write_unfinished(rank, path, _newest_state(rest), is_bar=True)
        unfinished[path] = b"\r" + left
    elif not is_bar and rest == before:
        query.write_unfinished(rank, path, rest, is_bar=False)


def _finish_line(
    rank: int,
    path: Path,
    unfinished: dict[Path, bytes],
    query: LogQuery,
    *,
    ending: bool,
    bars: bool,
) -> None:
    """Print a line without a newline: all of it once the job is ending; before that, if `bars`, the
    newest complete state of a progress bar."""
    rest = unfinished.get(path, b"")
    line, left = rest, b""
    if not ending:
        line, bar, left = rest.rpartition(b"\r")
        if not (bars and bar) or (columns_of(1) and not query.as_json and query.grep is None):
            return
    unfinished[path] = left
    query.write(rank, path, filter(query.matches, filter(None, [_newest_state(line)])))
