"""Records the paths of log files for `elasticrun logs`: one small file per agent run.

The file is in `logs/` of the user's folder on this host. A job with --run-dir has another one in
`agents/` of its run folder, which other hosts may see too. No job needs these files to run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from elasticrun.core.words import did_you_mean, index_of, names
from elasticrun.host.runs.layout import AGENTS, replace_file
from elasticrun.host.system.processes import ProcessId
from elasticrun.host.user_folder import user_folder
from elasticrun.wire.messages import MAX_NODES
from elasticrun.wire.types import dumps, loads

MAX_RUNS: Final = 100
"""Number of runs that are remembered in the user's folder; a new one replaces the oldest."""

MAX_ATTEMPTS: Final = 1000
"""Number of attempts that are remembered per run: the newest ones."""

MAX_BYTES: Final = 4 * 1024 * 1024
"""A longer file is not one of ours."""


@dataclass(frozen=True, slots=True)
class LoggedAttempt:
    """The log folder of one attempt of an agent's ranks."""

    folder: str  # below the run's: attempt_0, attempt_0.1, attempt_1, ...
    attempt: int
    began: float  # seconds since 1970
    ranks: dict[int, int]  # global ranks by local rank


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The log folders of one agent's ranks."""

    job_id: str
    path: str
    agent: ProcessId
    began: float  # seconds since 1970
    lives: tuple[LoggedAttempt, ...] = ()
    node: str = ""  # the agent's node in the job

    def first_rank(self) -> int:
        """The lowest rank of the newest attempt; MAX_NODES without an attempt."""
        return min(self.lives[-1].ranks.values(), default=MAX_NODES) if self.lives else MAX_NODES

    @property
    def host(self) -> str:
        """The name of the agent's host."""
        return self.agent.host

    @property
    def is_seen(self) -> bool:
        """Whether this host can see that the agent runs."""
        return self.agent.is_alive() is True

    @property
    def is_alive(self) -> bool:
        """Whether more output may come; also true for an agent that this host cannot see."""
        return self.agent.is_alive() is not False


class LogNotes:
    """Writes one agent's file in each of the two places. Blocks on a disk."""

    def __init__(self, environ: Mapping[str, str], job_id: str, run_dir: str = "") -> None:
        self.node = ""
        self._environ = environ
        self._run_dir = run_dir
        self._run = LoggedRun(job_id, "", ProcessId.own(), time.time())

    def add(self, folder: str, attempt: int, ranks: Mapping[int, int]) -> None:
        """Record an attempt whose files are in this folder, and forget the oldest runs. Raises
        OSError."""
        path, name = os.path.split(os.path.abspath(folder))
        entry = LoggedAttempt(name, attempt, time.time(), dict(ranks))
        entries = (*self._run.lives, entry)[-MAX_ATTEMPTS:]
        self._run = replace(self._run, path=path, lives=entries, node=self.node)
        kept = [user_folder(self._environ) / "logs"]
        kept += [Path(self._run_dir) / AGENTS] if self._run_dir else []
        for place in kept:
            self._write(place)

    def _write(self, kept: Path) -> None:
        kept.mkdir(mode=0o700, exist_ok=True)
        name = f"{int(self._run.began * 1e6):020d}-{self._run.agent.pid}.json"
        replace_file(kept / name, dumps(self._run).encode())
        most = MAX_NODES if kept.name == AGENTS else MAX_RUNS
        for old in sorted(kept.glob("*.json"))[:-most]:
            with contextlib.suppress(OSError):
                old.unlink()


def find_run(known: Sequence[LoggedRun], word: str) -> LoggedRun | None:
    """The agent that a user names by its node's name, its host's name, or the index of the node;
    None if there is none."""
    for one in known:
        if word in (one.node, one.host):
            return one
    nodes = {one.node: one for one in sorted(known, key=LoggedRun.first_rank)}
    at = index_of(word)
    return [*nodes.values()][int(at)] if at.isdecimal() and int(at) < len(nodes) else None


def no_node_message(word: str, known: Sequence[LoggedRun]) -> str:
    """The error sentence if no node matches."""
    found = sorted({one.node or one.host for one in known})
    return f"there is no node {word}{did_you_mean(word, found)}: there is {names(found)}"


def runs(environ: Mapping[str, str]) -> list[LoggedRun]:
    """All runs whose files still exist, the newest first. Raises OSError if this user has no usable
    folder."""
    return _runs(user_folder(environ) / "logs")


def runs_of(run_dir: Path) -> list[LoggedRun]:
    """Like `runs`, for the agents of the job in one run folder."""
    return _runs(run_dir / AGENTS)


def _runs(kept: Path) -> list[LoggedRun]:
    files = sorted(kept.glob("*.json"), reverse=True)
    return [run for file in files if (run := _read(file)) and os.path.isdir(run.path)]


def _read(file: Path) -> LoggedRun | None:
    try:
        with file.open() as text:
            return loads(text.read(MAX_BYTES), LoggedRun)
    except (OSError, ValueError):
        return None
