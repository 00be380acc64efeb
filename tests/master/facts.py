"""Facts as a master records them, of any size."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from elasticrun.core.persisted import Facts, RendezvousFacts, Seat
from elasticrun.wire.messages import RoundInfo
from elasticrun.wire.types import Endpoint, RoundName
from tests.master.people import SPEC


def round_facts(number: int = 1, nodes: int = 2, **changes: Any) -> RendezvousFacts:
    """A round of so many nodes with two ranks each."""
    seats = tuple(
        Seat(f"node-{i:05d}", f"{i:016x}", i, 2 * i, 2, 2 * i, 2 * nodes) for i in range(nodes)
    )
    made = RendezvousFacts(
        round=RoundInfo(RoundName(1, number, f"{number:08x}"), 2 * nodes),
        store=Endpoint("10.0.0.1", 40_000),
        store_node="node-00000",
        seats=seats,
        age=1.5,
    )
    return structs.replace(made, **changes)


def facts(number: int = 1, nodes: int = 2, **changes: Any) -> Facts:
    """All of a job in its round `number`."""
    made = Facts(
        spec=SPEC,
        term=1,
        number=number,
        rendezvous=round_facts(number, nodes),
        order=tuple(f"node-{i:05d}" for i in range(nodes)),
    )
    return structs.replace(made, **changes)
