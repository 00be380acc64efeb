"""What a component of the core asks for: components return wishes, the job grants them.

The union is closed.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticrun.core.reasons import Excluded, Reason
from elasticrun.core.rounds.failures import Ending
from elasticrun.wire.messages import Failure


@dataclass(frozen=True, slots=True)
class Reopen:
    """End the running round and form another one, without charging a restart."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Fail:
    """Count this failure of a node's rank as if the node had reported it."""

    node: str
    failure: Failure
    is_blamed: bool
    """Whether the node is at fault."""


@dataclass(frozen=True, slots=True)
class EndJob:
    """End the job."""

    ending: Ending
    reason: Reason


@dataclass(frozen=True, slots=True)
class RecordSoon:
    """Record the facts soon: one has changed, but no order depends on it."""


@dataclass(frozen=True, slots=True)
class Exclude:
    """Exclude a node from the job, which ends its round."""

    node: str
    how: Excluded


@dataclass(frozen=True, slots=True)
class Mention:
    """Mention this in the incident, if one ends the current round."""

    reason: Reason


Wish = Reopen | Fail | EndJob | RecordSoon | Exclude | Mention
