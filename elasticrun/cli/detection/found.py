"""The input and output of scheduler detection, and the default rendezvous port: the same on every
node of a job.

The port is derived from the job's id alone. It lies outside Linux's ephemeral range (32768 to
60999), whose ports may be assigned to any process, and away from torchrun's 29400 and 29500. Two
jobs on one host can still get the same port. They never mix: a job's master refuses agents with
another job's id (`wire.auth`), and a refused agent exits with that sentence. `--rdzv-endpoint`
selects another port.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

PORTS: Final = range(20_000, 29_000)

_STEPS_APART: Final = 1_009
"""Distance between the ports of two steps of a job; larger than the usual distance between jobs of
one host."""


def port_of_number(job: int, step: int = 0) -> int:
    """The port for a job with a number: len(PORTS) consecutive job numbers have different ports."""
    return PORTS[(job + step * _STEPS_APART) % len(PORTS)]


def port_of_name(name: str) -> int:
    """The port for a job that only has a name."""
    return PORTS[zlib.crc32(name.encode()) % len(PORTS)]


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts that the environment does not contain.

    terminal: standard input is a terminal, so a user is present. hostname: this host's name; fqdn:
    with its domain, as far as the host knows (in a pod: with the subdomain)."""

    terminal: bool = False
    hostname: str = ""
    fqdn: str = ""


class Given(NamedTuple):
    """A value and its source, as `--dry-run` shows it: "$SLURM_NODEID"."""

    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Found:
    """This node's place according to its scheduler; None for unknown values.

    family: the scheduler's display name ("Slurm"). seen: what this process is there, as the
    beginning of a sentence ("task 2 of 4 in Slurm step 123.0"). nodes: the job's number of nodes.
    node_rank: this node's rank. nproc: accelerators of this node. job_id, host, port: the job's
    name, and the address of the node with rank 0. attempt: how often the scheduler has started the
    job, from 1.

    why_alone: why a bare command is a job of one node here; "" if it is a job of all nodes. use:
    the flags that would make it a job of all nodes, "" if there are none. crowd: several of the
    scheduler's tasks run on each node, and one of them must be the agent. second: this process is
    one of those tasks, and not the agent. external: the master is hosted elsewhere."""

    family: str
    seen: str
    nodes: Given | None = None
    node_rank: Given | None = None
    nproc: Given | None = None
    job_id: Given | None = None
    host: Given | None = None
    port: Given | None = None
    attempt: int = 1
    attempt_source: str = ""
    why_alone: str = ""
    use: str = ""
    crowd: bool = False
    second: bool = False
    external: bool = False


def number(environ: Mapping[str, str], *names: str) -> Given | None:
    """The first of these variables that holds an integer, 0 or more, of at most 12 digits."""
    for name in names:
        text = environ.get(name, "").strip()
        if text.isascii() and text.isdigit() and len(text) <= 12:
            return Given(str(int(text)), f"${name}")
    return None


def as_int(given: Given | None) -> int:
    """The number; 0 for None."""
    return int(given.value) if given is not None else 0


def not_a_number(environ: Mapping[str, str], name: str) -> str:
    """Why a variable that holds a number of nodes or a node's index is unusable."""
    value = environ.get(name, "").strip()
    if not value:
        return f"{name} is not set"
    return f"{name}={value if len(value) <= 40 else value[:37] + '...'} is not a number"


def text(environ: Mapping[str, str], *names: str) -> Given | None:
    """The first of these variables that is set and not empty."""
    for name in names:
        found = environ.get(name, "").strip()
        if found:
            return Given(found, f"${name}")
    return None


TERMINAL = "standard input is a terminal"
"""The reason why an interactive command stays on one node, whatever the scheduler has set up."""


class Machine(NamedTuple):
    """Facts about this machine for resolving; tests provide their own.

    `cores()` counts the cores that this process may use. `accelerators(word)` counts the devices
    that `gpu`, `xpu`, `auto` or a private backend's name means, and returns None for a word that
    the installed torch does not know; if counting takes long, the user sees a note. `facts()` gives
    scheduler detection its input besides the environment; without it nothing is detected.
    `shared(folder)` names the network file system of a folder, "" for a local one. `debugged`: a
    debugger attaches to the processes that this one starts.
    """

    cores: Callable[[], int]
    accelerators: Callable[[str], int | None]
    entry_points: Callable[[str], Iterable[str]]  # names in a group
    facts: Callable[[], HostFacts] | None = None
    shared: Callable[[str], str] = lambda folder: ""
    user: str = ""
    debugged: bool = False
