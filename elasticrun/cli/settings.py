"""What the user asked for, what a scheduler says in the place of flags that nobody gave, and which
of them a value came from.

What follows from a scheduler is `cli.place`'s. Most commands run where none is, and must not wait
until detection is imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from elasticrun.cli.flags import Flag
from elasticrun.cli.table import FLAGS

if TYPE_CHECKING:
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
    from elasticrun.cli import place

    return place.settle(asked, machine, machine.facts())


_BY_DEST: dict[str, Flag] = {flag.dest: flag for flag in FLAGS}


class Asked:
    """A namespace of parsed flags and the environment beside it.

    The namespace may be torch's own or accelerate's: a flag that it lacks has our default.
    `filled`: what detection has put in the place of flags that nobody gave.
    """

    def __init__(
        self,
        ns: argparse.Namespace,
        environ: Mapping[str, str],
        filled: Mapping[str, Filled] | None = None,
    ) -> None:
        self.ns = ns
        self.environ = environ
        self.filled = filled or {}

    def value(self, dest: str) -> Any:
        """The value of a flag, whatever its type."""
        if dest in self.filled:
            return self.filled[dest].value
        flag = _BY_DEST[dest]
        default = False if flag.kind is None else flag.default
        return getattr(self.ns, dest, default)

    def text(self, dest: str) -> str:
        """The value of a flag that is a text ("" where there is none)."""
        value = self.value(dest)
        return "" if value is None else str(value)

    def number(self, dest: str) -> int:
        """The value of a flag that is a whole number."""
        return int(self.value(dest))

    def switch(self, dest: str) -> bool:
        """Whether a switch is on."""
        return bool(self.value(dest))

    def source(self, dest: str) -> str:
        """Where a value comes from: a spelling on the command line, a variable, or "default"."""
        if dest in self.filled:
            return self.filled[dest].source
        given: Mapping[str, str] = getattr(self.ns, "given", {})
        if dest in given:
            return given[dest]
        flag = _BY_DEST[dest]
        name = flag.variable_in(self.environ)
        if name and self.environ[name]:
            return f"${name}"
        default: Any = list(flag.default) if isinstance(flag.default, tuple) else flag.default
        if self.value(dest) != (bool(default) if flag.kind is None else default):
            return "the caller"  # a namespace that no parser of ours has made
        return "default"

    def explicitly(self, dest: str) -> bool:
        """Whether somebody gave it: the user by a flag or a variable, a namespace of another maker,
        or the scheduler."""
        return self.source(dest) != "default"


class Setting(NamedTuple):
    """A row of what is shown to people: a flag without its dashes, its value as text, and where
    that comes from."""

    name: str
    value: str
    source: str


def setting(asked: Asked, dest: str) -> Setting:
    """The row of a flag; a value of None or no items is shown as ""."""
    value = asked.value(dest)
    shown = "" if value is None or value == [] else str(value)
    return Setting(_BY_DEST[dest].name[2:], shown, asked.source(dest))
