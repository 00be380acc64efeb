"""What a look at this machine found: one check, what was seen, what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
