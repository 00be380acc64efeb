"""What is known of one node: its membership word, and what `core.membership` says of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from elasticrun.core.silences import Silences


class Health(StrEnum):
    """The membership word of a node."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"
    PARKED = "parked"  # it left because it is excluded, and stays attached without ranks


@dataclass(slots=True)
class Member:
    """What is known of one node id."""

    node: str
    host: str
    incarnation: str
    session: int | None  # the stream it is heard on; None: none stands
    last_heard: float
    health: Health = Health.ALIVE
    reason: str = ""  # why it is not ALIVE
    broke_at: float = 0.0  # when its stream broke, while SUSPECT
    silent: float = 0.0  # for how long nothing had come on it then, while others were heard
    quiet: float = 0.0  # the same, whoever was heard
    corroborated: bool = False
    silences: Silences = field(default_factory=Silences)
    unseen: bool = False  # known from the record, not heard by this master yet


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to a stream that wants to be a node's."""

    refusal: str = ""  # a sentence; empty: admitted
    newer: bool = False  # another life of this node was known
    superseded: bool = False  # an older life of the node had not been given up: it is over now
    silent_since: float = 0.0  # ... and when its stream broke
    returned: bool = False  # this very incarnation had been given up as dead
    old_session: int | None = None  # a stream that this one replaces
    forgotten: str = ""  # a node that had gone, forgotten to make room


@dataclass(frozen=True, slots=True)
class Death:
    """A node that was given up, and why."""

    node: str
    reason: str
    session: int | None  # a stream that stood nevertheless: close it
    since: float = 0.0  # when its stream broke, or when it was last heard
