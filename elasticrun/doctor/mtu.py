"""Packet sizes on the two ends of the way to the master."""

from __future__ import annotations

from typing import Final

from elasticrun.doctor.ports import straight
from elasticrun.doctor.verdict import ok, warning
from elasticrun.system.network import mtu_to
from elasticrun.wire.messages import Reached
from elasticrun.wire.types import Finding

CHECK: Final = "packet size"


def examine(reached: Reached, dialled: str) -> list[Finding]:
    """`dialled`: the master's address in numbers; "" if it is not known."""
    own = mtu_to(dialled) if dialled else 0
    if not own or not reached.mtu or not straight(reached, dialled):
        return [ok(CHECK, "it is not known on both ends of the way to the master")]
    if own == reached.mtu:
        return [ok(CHECK, f"packets of {own} bytes (MTU) on both ends of the way to the master")]
    seen = (
        f"this host sends packets of {own} bytes (MTU) to the master's host {reached.host}, which "
        f"sends {reached.mtu}"
    )
    todo = "give all interfaces of one network the same MTU: large messages hang where they differ"
    return [warning(CHECK, seen, todo)]
