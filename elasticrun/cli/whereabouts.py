"""Whether a scheduler has put this node somewhere; what follows from it is `cli.scheduler`'s.

Most commands run where no scheduler is, and must not wait until detection is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from elasticrun.cli.asked import Asked
    from elasticrun.cli.devices import Machine
    from elasticrun.detection.found import Found

MARKS: Final = (
    "SLURM_JOB",
    "KUBERNETES_SERVICE_HOST",
    "JOB_COMPLETION_INDEX",
    "LWS_",
    "VC_TASK_INDEX",
    "VK_TASK_INDEX",
    "DLROVER_MASTER_ADDR",
    "SKYPILOT_",
)
"""How the names of variables begin without one of which no scheduler is to be seen."""


class Filled(NamedTuple):
    """The value of a flag, and what it was taken from."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What follows from the scheduler for this command.

    filled: flags by their dest. shown: the same, for people alone: what counts in the place of
    these flags although it has not become one of them. note: one line about what was seen and
    what is made of it, "" where nothing is to be said. idle: this process has nothing to do, and
    why. by: the flag or variable that says where nodes meet, "" where none does."""

    found: Found | None = None
    filled: Mapping[str, Filled] = field(default_factory=dict)
    note: str = ""
    idle: str = ""
    by: str = ""
    shown: Mapping[str, Filled] = field(default_factory=dict)


NOWHERE: Final = Whereabouts()


def look(asked: Asked, machine: Machine) -> Whereabouts:
    """What the scheduler says, as far as the flags leave room. UsageError for a bad --nnodes."""
    if machine.facts is None or not any(name.startswith(MARKS) for name in asked.environ):
        return NOWHERE
    from elasticrun.cli import scheduler

    return scheduler.settle(asked, machine, machine.facts())
