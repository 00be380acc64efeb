"""Planted faults: what ELASTICRUN_FAULT asks of which node. Pure; off unless the variable is set.

`probe-fail@n2,slow=3x@n5` is a list of faults, each with the id of the node that shall have it
(`--node-id`; `rank-N` in a static job) or `*` for every node:

probe-fail[=compute|comm|wrong]   its probes fail: in the matmul, in the all_reduce (the default),
                                  or by a matmul whose result is wrong
probe-hang[=compute|meet|comm]    its probes stop for ever in that phase (the default is comm)
slow=3x                           its matmuls and all_reduces take three times as long (and 10 ms
                                  longer at the least, so that it shows on a busy machine), and so
                                  does its own part of every step that `elasticrun.training` is told
                                  of

They are for tests, and for people who want to see what happens; the agent says loudly that they
are there. A rank and a probe are given those of their own node (`own_words`), without the node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from elasticrun.wire.env import FAULT

EVERY_NODE: Final = "*"

MAX_SLOW: Final = 100.0
"""A factor above this is a typing error: nobody waits for it."""

MAX_FAULTS: Final = 1000
"""Faults in one list."""


class FaultKind(StrEnum):
    """What is planted."""

    PROBE_FAIL = "probe-fail"
    PROBE_HANG = "probe-hang"
    SLOW = "slow"


VALUES: Final[Mapping[FaultKind, tuple[str, ...]]] = {
    FaultKind.PROBE_FAIL: ("comm", "compute", "wrong"),
    FaultKind.PROBE_HANG: ("comm", "compute", "meet"),
}
"""What may stand behind `=`; the first one is the default."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault. `node` is a node id, or `*`; "" in the words for one node's processes."""

    kind: FaultKind
    value: str  # one of VALUES, or the factor of a slow one: `3x`
    node: str

    @property
    def words(self) -> str:
        """As it is written, without the node."""
        return f"{self.kind}={self.value}"


class BadFault(ValueError):
    """The list cannot be read; the text is one sentence that names the part."""


def read(text: str) -> tuple[Fault, ...]:
    """All faults of a list. Raises BadFault."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) > MAX_FAULTS:
        raise BadFault(f"{FAULT} lists {len(parts)} faults; at most {MAX_FAULTS} are planted")
    return tuple(_read_one(part) for part in parts)


def of_node(text: str, node: str) -> tuple[Fault, ...]:
    """Those of a list that concern this node, in their order. Raises BadFault."""
    return tuple(fault for fault in read(text) if fault.node in (node, EVERY_NODE))


def own_words(faults: Iterable[Fault]) -> str:
    """What processes of the node that has them are given (`wire.env.NODE_FAULT`, and
    `ProbePlan.fault`); "" for none."""
    return ",".join(fault.words for fault in faults)


def own(text: str) -> tuple[Fault, ...]:
    """Back from `own_words`; the faults have no node. What cannot be read is no fault: a training
    script must not end because of it."""
    found = []
    for part in text.split(",")[:MAX_FAULTS]:
        try:
            found.append(_one(part, part, ""))
        except BadFault:
            continue
    return tuple(found)


def value_of(faults: Iterable[Fault], kind: FaultKind) -> str:
    """The value of the first fault of this kind, "" if there is none."""
    return next((fault.value for fault in faults if fault.kind is kind), "")


def slowness(faults: Iterable[Fault]) -> float:
    """How many times as long the node's own work shall take; 1.0 without such a fault."""
    return _factor(value_of(faults, FaultKind.SLOW)) or 1.0


def _read_one(part: str) -> Fault:
    what, at, node = part.rpartition("@")
    if not at or not node.strip():
        raise BadFault(f"{FAULT}: {part[:60]!r} names no node: it is written name[=value]@node")
    return _one(what, part, node.strip())


def _one(what: str, part: str, node: str) -> Fault:
    name, equals, value = (word.strip() for word in what.partition("="))
    try:
        kind = FaultKind(name)
    except ValueError:
        known = ", ".join(FaultKind)
        raise BadFault(f"{FAULT}: {part[:60]!r} is no fault; there are {known}") from None
    if kind is FaultKind.SLOW:
        if not _factor(value):
            most = f"{MAX_SLOW:g}"
            raise BadFault(f"{FAULT}: {part[:60]!r} needs a factor from 1x to {most}x: slow=3x")
        return Fault(kind, value, node)
    values = VALUES[kind]
    if equals and value not in values:
        raise BadFault(f"{FAULT}: {part[:60]!r}: {kind} may be {', '.join(values)}")
    return Fault(kind, value or values[0], node)


def _factor(value: str) -> float:
    """0.0 for what is no factor."""
    try:
        factor = float(value.removesuffix("x"))
    except ValueError:
        return 0.0
    return factor if 1.0 <= factor <= MAX_SLOW else 0.0
