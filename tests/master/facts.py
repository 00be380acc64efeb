"""Facts as a master records them, of any size."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from elasticrun.core.persisted import Facts, RendezvousFacts, RoundFacts, Seat
from elasticrun.wire.messages import RoundInfo
from elasticrun.wire.types import Endpoint, RoundName
from tests.master.people import SPEC


def round_facts(number: int = 1, nodes: int = 2, **changes: Any) -> RoundFacts:
    """A round of so many nodes with two ranks each."""
    seats = tuple(
        Seat(f"node-{i:05d}", f"{i:016x}", i, 2 * i, 2, 2 * i, 2 * nodes) for i in range(nodes)
    )
    made = RoundFacts(
        info=RoundInfo(RoundName(1, number, f"{number:08x}"), 2 * nodes),
        store=Endpoint("10.0.0.1", 40_000),
        store_node="node-00000",
        seats=seats,
    )
    return structs.replace(made, **changes)


def facts(number: int = 1, nodes: int = 2, **changes: Any) -> Facts:
    """All of a job in its round `number`."""
    made = Facts(
        spec=SPEC,
        term=1,
        number=number,
        round=round_facts(number, nodes),
        rendezvous=RendezvousFacts(age=1.5),
        order=tuple(f"node-{i:05d}" for i in range(nodes)),
    )
    return structs.replace(made, **changes)
