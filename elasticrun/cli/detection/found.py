"""What detection takes and what it gives; and the port at which a job's nodes meet where nobody has
named one: the same on every node.

The port follows from the job's id alone, and lies outside Linux' ephemeral range (32768 to 60999),
from which any process may have been given one, and away from 29400 and 29500, which are torchrun's.
Two jobs of one host can be told the same port all the same. They never mix: the master of a job
lets in nobody with another job's id (`wire.auth`), and who is refused ends with that sentence;
`--rdzv-endpoint` names another port.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

PORTS: Final = range(20_000, 29_000)

_STEPS_APART: Final = 1_009
"""How far the ports of two steps of one job are apart; further than jobs of one host mostly are."""


def port_of_number(job: int, step: int = 0) -> int:
    """Of a job that has a number: the next len(PORTS) jobs all have others."""
    return PORTS[(job + step * _STEPS_APART) % len(PORTS)]


def port_of_name(name: str) -> int:
    """Of a job that has a name only."""
    return PORTS[zlib.crc32(name.encode()) % len(PORTS)]


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the environment does not say.

    terminal: standard input is one, so a person sits there. hostname: this host's own name; fqdn:
    the same with its domain, as far as the host knows (in a pod: with the subdomain)."""

    terminal: bool = False
    hostname: str = ""
    fqdn: str = ""


class Given(NamedTuple):
    """A value and where it comes from, as `--dry-run` shows it: "$SLURM_NODEID"."""

    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Found:
    """This node's place as its scheduler tells it; None where it does not.

    family: the scheduler, for people ("Slurm"). seen: what this process is there, as the beginning
    of a sentence ("task 2 of 4 in Slurm step 123.0"). nodes: how many there are. node_rank: which
    one this is. nproc: accelerators of this node. job_id, host, port: the job's name, and where the
    node with rank 0 can be reached. attempt: how often the scheduler has started the job, from 1.

    why_alone: why a bare command is a job of one node here; "" where it is one of all nodes.
    use: the flags that would make it one of all nodes, "" where there are none.
    crowd: several of the scheduler's tasks run on each node, and one of them has to be the agent.
    second: this is another one of them.
    external: somebody else hosts the master."""

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
    """The first of these variables that holds a whole number, 0 or more, of sane length."""
    for name in names:
        text = environ.get(name, "").strip()
        if text.isascii() and text.isdigit() and len(text) <= 12:
            return Given(str(int(text)), f"${name}")
    return None


def amount(given: Given | None) -> int:
    """The number, 0 where there is none."""
    return int(given.value) if given is not None else 0


def not_a_number(environ: Mapping[str, str], name: str) -> str:
    """Why a variable that counts nodes, or is the number of one, says nothing."""
    told = environ.get(name, "").strip()
    if not told:
        return f"{name} is not set"
    return f"{name}={told if len(told) <= 40 else told[:37] + '...'} is not a number"


def text(environ: Mapping[str, str], *names: str) -> Given | None:
    """The first of these variables that is set and not empty."""
    for name in names:
        found = environ.get(name, "").strip()
        if found:
            return Given(found, f"${name}")
    return None


TERMINAL = "standard input is a terminal"
"""Why a person's command stays on one node, whatever the scheduler has set up around it."""


class Machine(NamedTuple):
    """What resolving needs to know of this machine; tests hand in one of their own.

    `cores()` counts the cores this process may use. `accelerators(word)` counts the devices that
    `gpu`, `xpu`, `auto` or a private backend's name means, and returns None for a word that no
    installed torch knows; `say` hears one sentence when that takes long. `facts()` is what the
    detection of schedulers needs beside the environment; without it nothing is detected.
    `shared(folder)` names the network file system of a folder, "" for one of this host's.
    """

    cores: Callable[[], int]
    accelerators: Callable[[str], int | None]
    entry_points: Callable[[str], Iterable[str]]  # names in a group
    facts: Callable[[], HostFacts] | None = None
    shared: Callable[[str], str] = lambda folder: ""
    user: str = ""
