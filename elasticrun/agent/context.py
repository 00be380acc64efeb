"""What the parts of a node share, and the lifecycle callbacks of a part."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from elasticrun.config import Identity, Launch, Place
from elasticrun.core import events as fx
from elasticrun.wire.types import mint_incarnation

if TYPE_CHECKING:
    from elasticrun.agent.boot import Reaper
    from elasticrun.agent.link.identity import Slot
    from elasticrun.agent.link.link import Link
    from elasticrun.host.log import StderrWriter
    from elasticrun.wire.messages import Start


class NodePart(Protocol):
    """A part of the node that is called when ranks start, stop and exit."""

    def round_began(self, start: Start) -> None:
        """Called just before the ranks of this round start."""

    def ranks_stopping(self) -> None:
        """Called when the ranks are being stopped, or when the first of them has failed."""

    def ranks_gone(self, *, done: bool) -> None:
        """Called when all ranks have exited. `done`: all with 0; the round may continue on other
        nodes."""

    def close(self) -> None:
        """Called when the agent ends; no process of a rank is left."""


class DeviceMemory(Protocol):
    """Knows which processes hold memory of this node's devices."""

    async def wait_until_free(self, exited: Collection[int]) -> None:
        """Wait, for a limited time, until none of these exited processes holds any."""


@dataclass
class NodeContext:
    """What the parts of a node share. Some values are set only after the agent has started."""

    launch: Launch
    place: Place
    identity: Identity
    """Its node id is known only after the agent's start."""
    deliver: Callable[[fx.AgentEvent], None]
    """Sends an event to the node's state machine."""
    fatal: Callable[[str], None]
    """Ends the node with this sentence as the reason."""
    reaper: Reaper
    writer: StderrWriter
    called: bool = False
    """True if a Python program started this agent; failures then reach that program as
    exceptions."""
    variables: dict[str, str] = field(default_factory=dict)
    """Extra variables of every rank and probe; the node adds its planted faults."""
    slot: Slot | None = None
    """Reserves the node id; None if the user gave the id, or before it is known."""
    incarnation: str = field(default_factory=mint_incarnation)
    host: str = ""
    """The host name shown to users."""
    address: str = ""
    """The address that other nodes dial."""
    link: Link = field(init=False, repr=False)
    memory: DeviceMemory | None = None
    """Knows whose memory of devices is not free; None: nobody does."""
    parts: list[NodePart] = field(default_factory=list)
    """In the order in which their callbacks run."""

    def release_slot(self) -> None:
        """Give up the reservation of this node's id. Blocks on the disk."""
        if self.slot is not None:
            self.slot.release()
            self.slot = None
