"""The agent's states, the picture that it gives of itself, and rules ("in these states, at these
events, this method") as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elasticrun.core.reasons import Reason
from elasticrun.wire.types import Endpoint, RoundName


class State(StrEnum):
    """What this node is doing; the order is that of a life."""

    PREPARING = "preparing"  # no rank lives here; the store to offer is not ready yet
    JOINED = "joined"  # no rank lives here; the master knows, and has our store
    PROBING = "probing"  # no rank lives here; this machine and its links are being probed
    STARTING = "starting"  # ranks were ordered, not all of them run yet
    RUNNING = "running"  # every rank was started, at least one still runs
    STOPPING = "stopping"  # ranks have been told to end; the next round follows
    SWEEPING = "sweeping"  # every rank has ended; what they left behind is being removed
    FINISHED = "finished"  # every rank ended with 0; the job may still need this node
    ENDING = "ending"  # ranks have been told to end; then the agent ends
    CLEARING = "clearing"  # every rank has ended; after the sweep the agent ends
    HOLDING = "holding"  # as before its end, but a snapshot of this node is still being written out
    OVER = "over"  # the agent was told to exit


ENDINGS = (State.ENDING, State.CLEARING, State.HOLDING)
"""How the agent will end is known; the first reason stands."""


class UnexpectedEvent(RuntimeError):
    """An event that cannot happen in this state: the runtime and the state machine disagree."""

    def __init__(self, state: State, event: str) -> None:
        super().__init__(f"a worker group that is {state.value} cannot be told {event}")


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """The local worker group as one picture."""

    state: State
    reason: str  # why it waits, empty if it does not; the text of `why`
    round: RoundName | None
    pids: tuple[int, ...]  # of the ranks that live, by local rank
    restart_count: int
    offered_store: Endpoint | None
    master_lost: str  # why the master cannot be reached, empty if it can
    wait_ends: float | None = None
    """When the wait of `reason` is over at the latest, if it is known. RUNNING waits only for ranks
    to save a step before this node leaves."""
    why: Reason | None = None


Method = Callable[[Any, float], None]
"""Takes the event or order, and the time."""

Rules = tuple[tuple[tuple[State, ...], tuple[type, ...], Method], ...]


def tabulate(rules: Rules) -> dict[tuple[State, type], Method]:
    """Every pair that is listed; two rules for one pair are an error."""
    table: dict[tuple[State, type], Method] = {}
    for states, kinds, method in rules:
        for state in states:
            for kind in kinds:
                if (state, kind) in table:
                    raise ValueError(f"two rules for {state.value} and {kind.__name__}")
                table[state, kind] = method
    return table
