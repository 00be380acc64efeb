"""The job as one page: what `elasticrun status` and the status page are sent.

They are messages like those of `messages.py`, which shows them under its own name too.
"""

from __future__ import annotations

from msgspec import Struct

from elasticrun.wire.health import ExcludedNode
from elasticrun.wire.ids import RoundName


class NodeStatus(Struct, frozen=True):
    """One node, as the status page shows it."""

    node: str
    host: str
    address: str
    state: str  # the membership word: alive, suspect, dead, left, parked
    activity: str  # joining, at-the-door, starting, running, stopping, finished, spare
    reason: str  # why it waits, empty if it does not
    group_rank: int  # -1: has no place in the current round
    first_rank: int
    local_world_size: int
    pids: tuple[int, ...]
    health: str = ""  # what its last probe measured, or why it is suspected; "" if not probed


class JobStatus(Struct, frozen=True):
    """The job as one page: what a person asks first, and why anything waits."""

    job_id: str
    phase: str  # gathering, running, stopping, ended
    reason: str
    round: RoundName | None
    world_size: int
    restart_count: int
    restarts_left: int
    max_restarts: int
    min_nodes: int
    max_nodes: int
    nodes: tuple[NodeStatus, ...]
    last_failure: str
    outcome: str
    excluded: tuple[ExcludedNode, ...] = ()
    check: str = ""  # what the last network check found, in a sentence; "" if there was none
    snapshot: str = ""  # newest whole step, newest written one, what is under way; "" if none is
    step: int = -1  # the newest that ranks have told of; -1: none
    step_age: float = 0.0  # seconds since it was heard
    age: float = 0.0  # seconds since the job's first master on this host began
