"""The agent's states, its status, the wishes of its components, and the type of its rules ("in
these states, for these events, this method")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elasticrun.core.events import Exit
from elasticrun.core.reasons import Reason
from elasticrun.wire.types import Endpoint, RoundName


class State(StrEnum):
    """What this node is doing, in the order of its lifecycle."""

    PREPARING = "preparing"  # no rank is alive here; the store to offer is not ready yet
    JOINED = "joined"  # no rank is alive here; the master knows this, and where our store listens
    PROBING = "probing"  # no rank is alive here; this machine and its links are being probed
    STARTING = "starting"  # ranks were ordered; not all of them run yet
    RUNNING = "running"  # every rank was started; at least one still runs
    STOPPING = "stopping"  # ranks are being stopped; the next round follows
    SWEEPING = "sweeping"  # every rank has exited; leftover processes are being ended
    FINISHED = "finished"  # every rank exited with 0; the job may still need this node
    ENDING = "ending"  # ranks are being stopped; then the agent exits
    CLEARING = "clearing"  # every rank has exited; after the sweep the agent exits
    HOLDING = "holding"  # ready to exit, but a snapshot of this node is still being written
    OVER = "over"  # the agent must exit


ENDINGS = (State.ENDING, State.CLEARING, State.HOLDING)
"""States in which the exit of the agent is decided; the first reason counts."""


class UnexpectedEvent(RuntimeError):
    """An event that cannot occur in this state: a bug in the runtime or the state machine."""

    def __init__(self, state: State, event: str) -> None:
        super().__init__(f"a worker group that is {state.value} cannot be told {event}")


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """The status of the local worker group."""

    state: State
    reason: str  # why it waits, "" if it does not; the text of `why`
    round: RoundName | None
    pids: tuple[int, ...]  # of the living ranks, by local rank
    restart_count: int
    offered_store: Endpoint | None
    master_lost: str  # why the master cannot be reached, "" if it can
    wait_ends: float | None = None
    """When the wait of `reason` ends at the latest, if known. RUNNING waits only for ranks to save
    a step before this node leaves."""
    why: Reason | None = None


@dataclass(frozen=True, slots=True)
class LeaveNode:
    """End the agent with this outcome once no rank is alive here; the ranks get `signum`."""

    outcome: Exit
    signum: int


@dataclass(frozen=True, slots=True)
class FinishRanks:
    """Every rank of this node has exited with 0."""


@dataclass(frozen=True, slots=True)
class ExitNow:
    """There is nothing left to wait for: the agent exits with its outcome."""


@dataclass(frozen=True, slots=True)
class StopRanks:
    """A rank here has failed: stop the others, then join the next round."""


@dataclass(frozen=True, slots=True)
class SweepNow:
    """No rank is alive or in the round any more: end leftover processes."""


GroupWish = LeaveNode | FinishRanks | ExitNow | StopRanks | SweepNow
"""What a component asks for; the group grants it after the component has appended its effects."""


Method = Callable[[Any, float], GroupWish | None]
"""Takes the event or order, and the time. A method of a component returns its wish, if any."""

Rules = tuple[tuple[tuple[State, ...], tuple[type, ...], Method], ...]


def tabulate(rules: Rules) -> dict[tuple[State, type], Method]:
    """The method for each state and event; raises ValueError if a pair has two rules."""
    table: dict[tuple[State, type], Method] = {}
    for states, kinds, method in rules:
        for state in states:
            for kind in kinds:
                if (state, kind) in table:
                    raise ValueError(f"two rules for {state.value} and {kind.__name__}")
                table[state, kind] = method
    return table
