"""Records that most processes of a job speak of: rounds and endpoints, the user's program, and what
a check of a machine has found. Ranks and the fork server import this."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from elasticrun.wire.bounds import INT64, Name, Whole

SAID_AGAIN: Final = 1.0
"""Seconds after a SIGTERM in which another one is the same: Slurm says it twice within
milliseconds, to every process, at a time limit and where another job takes the place. (A second ^C
is meant.)"""


@dataclass(frozen=True, slots=True)
class RoundName:
    """The whole name of a round; every fence compares all three parts.

    A number alone is ambiguous once a master has come back empty and counted again, so a
    round also carries the master's term and a nonce that nobody could have guessed.
    """

    term: int
    number: Annotated[int, Whole(1, INT64)]  # grows by one with every round of the job
    nonce: Name

    def __str__(self) -> str:
        return f"{self.number} ({self.term}/{self.nonce})"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host (name or address, IPv6 without brackets) and a TCP port."""

    host: Name
    port: Annotated[int, Whole(1, 65535)]

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def mint_incarnation() -> str:
    """A name for one life of an agent; random, because clocks and pids can go backwards."""
    return os.urandom(8).hex()


def mint_nonce() -> str:
    """Eight hex digits that tell two rounds of one number apart."""
    return os.urandom(4).hex()


class EntryKind(StrEnum):
    """How the user's program is started in a rank."""

    SCRIPT = "script"  # python -u target args...
    MODULE = "module"  # python -u -m target args...
    COMMAND = "command"  # target args...  (--no-python)
    RUN_PATH = "run-path"  # runpy.run_path(target) in a multiprocessing child
    FUNCTION = "function"  # a function of elastic_launch's caller


@dataclass(frozen=True, slots=True)
class Entry:
    """The user's program: what to run and its arguments, `${local_rank}` not yet filled in."""

    kind: EntryKind
    target: str
    args: tuple[str, ...] = ()


class State(StrEnum):
    """How a check came out. A warning never stops a job; a failure does with `--precheck`."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check of one machine.

    check: which check, some plain words ("disk, log folder", "shared memory"); one check may have
    several findings. seen: what was found, in a sentence, with the figure and the limit.
    todo: what the operator can do; empty where nothing is to be done.
    """

    check: str
    state: State
    seen: str
    todo: str = ""
