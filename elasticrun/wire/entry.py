"""The user's program, as the command line, the agent and the spawner speak of it.

A module of its own, so that the job master, which has the configuration but starts no rank, does
not make the messages to a spawner, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
