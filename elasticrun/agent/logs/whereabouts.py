"""Where the log files of this user's jobs are: a small file for each agent's run, for `elasticrun
logs`: in `logs/` of the user's folder on this host, and, of a job with --run-dir, in `agents/` of
its run folder, which other hosts may see too. No job needs it to run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from elasticrun.core.words import index_of, names, nearest
from elasticrun.host.runs.layout import AGENTS, replace_file
from elasticrun.host.system.processes import ProcessId
from elasticrun.host.user_folder import user_folder
from elasticrun.wire.messages import MAX_NODES
from elasticrun.wire.types import dumps, loads

MOST_RUNS: Final = 100
"""Runs that are remembered; a new one takes the place of the oldest."""

MOST_LIVES: Final = 1000
"""Lives of one run, the newest."""

MAX_BYTES: Final = 4 * 1024 * 1024
"""A longer file is not one of ours."""


@dataclass(frozen=True, slots=True)
class LoggedLife:
    """One life of an agent's ranks."""

    folder: str  # below the run's: attempt_0, attempt_0.1, attempt_1, ...
    attempt: int
    began: float  # seconds since 1970
    ranks: dict[int, int]  # the job's ranks by local rank


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """What one agent's ranks have written."""

    job_id: str
    path: str
    agent: ProcessId
    began: float  # seconds since 1970
    lives: tuple[LoggedLife, ...] = ()
    node: str = ""  # the agent's, in the job

    def first_rank(self) -> int:
        """Of the newest life's ranks the first; many where there is none."""
        return min(self.lives[-1].ranks.values(), default=MAX_NODES) if self.lives else MAX_NODES

    @property
    def host(self) -> str:
        """The name of its agent's host."""
        return self.agent.host

    @property
    def is_seen(self) -> bool:
        """Whether its agent runs, and that is known from here."""
        return self.agent.is_alive() is True

    @property
    def is_alive(self) -> bool:
        """Whether more may come; of an agent that cannot be seen from here it may."""
        return self.agent.is_alive() is not False


class LogNotes:
    """One agent's file, in each of the two places. Blocks on a disk."""

    def __init__(self, environ: Mapping[str, str], job_id: str, run_dir: str = "") -> None:
        self.node = ""
        self._environ = environ
        self._run_dir = run_dir
        self._run = LoggedRun(job_id, "", ProcessId.own(), time.time())

    def add(self, folder: str, attempt: int, ranks: Mapping[int, int]) -> None:
        """One more life, whose files are in this folder. OSError."""
        path, name = os.path.split(os.path.abspath(folder))
        life = LoggedLife(name, attempt, time.time(), dict(ranks))
        lives = (*self._run.lives, life)[-MOST_LIVES:]
        self._run = replace(self._run, path=path, lives=lives, node=self.node)
        kept = [user_folder(self._environ) / "logs"]
        kept += [Path(self._run_dir) / AGENTS] if self._run_dir else []
        for place in kept:
            self._write(place)

    def _write(self, kept: Path) -> None:
        kept.mkdir(mode=0o700, exist_ok=True)
        name = f"{int(self._run.began * 1e6):020d}-{self._run.agent.pid}.json"
        replace_file(kept / name, dumps(self._run).encode())
        most = MAX_NODES if kept.name == AGENTS else MOST_RUNS
        for old in sorted(kept.glob("*.json"))[:-most]:
            with contextlib.suppress(OSError):
                old.unlink()


def one_of(known: Sequence[LoggedRun], word: str) -> LoggedRun | None:
    """The agent of the node that a person means: by its name, its host's, or its index."""
    for one in known:
        if word in (one.node, one.host):
            return one
    nodes = {one.node: one for one in sorted(known, key=LoggedRun.first_rank)}
    at = index_of(word)
    return [*nodes.values()][int(at)] if at.isdecimal() and int(at) < len(nodes) else None


def no_node(word: str, known: Sequence[LoggedRun]) -> str:
    """The sentence where there is none."""
    found = sorted({one.node or one.host for one in known})
    return f"there is no node {word}{nearest(word, found)}: there is {names(found)}"


def runs(environ: Mapping[str, str]) -> list[LoggedRun]:
    """All whose files are there yet, the newest first. OSError without such a folder."""
    return _runs(user_folder(environ) / "logs")


def runs_of(run_dir: Path) -> list[LoggedRun]:
    """The same, of the agents of the job in one run folder."""
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
