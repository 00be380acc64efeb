"""What the parts of a node share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticrun.config import AgentConfig
from elasticrun.core import events as fx

if TYPE_CHECKING:
    from elasticrun.agent.boot import Reaper
    from elasticrun.agent.link.link import Link
    from elasticrun.host.log import StderrWriter


@dataclass
class NodeContext:
    """What the parts of a node share. What is found out later is an attribute."""

    config: AgentConfig
    deliver: Callable[[fx.AgentEvent], None]
    """Tells the node's state machine."""
    fatal: Callable[[str], None]
    """Ends the node with this sentence."""
    reaper: Reaper
    writer: StderrWriter
    host: str = ""
    """This host's name for people."""
    address: str = ""
    """What other nodes dial."""
    link: Link = field(init=False, repr=False)
