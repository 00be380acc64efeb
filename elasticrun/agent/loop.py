"""The agent's loop: one queue of events, one brain, and the carrying out of its effects.

It sleeps until an event comes or the brain's next deadline; there is no other timer. Nothing that
it calls may block: disks, terminals and name servers have threads (`threads.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from elasticrun.config import EXIT_FAILED
from elasticrun.core.effects import (
    AgentEffect,
    AgentEvent,
    Exit,
    PrepareStore,
    RunProbe,
    SignalRanks,
    SpawnRanks,
    SweepRanks,
    Tick,
)
from elasticrun.operator_log import logger

MAX_FAULTS: Final = 3
"""So many effects that could not be carried out end the agent."""

AWAITED: Final = (PrepareStore, RunProbe, SignalRanks, SpawnRanks, SweepRanks)
"""Effects whose outcome the brain waits for: one that is not carried out would never come."""


class Brain(Protocol):
    """What the loop needs of `core.worker_group.WorkerGroup`."""

    def step(self, event: AgentEvent, now: float) -> list[AgentEffect]: ...

    def next_deadline(self) -> float | None: ...


class AgentLoop:
    """Feeds events to the brain in the order of `deliver`, until the brain says Exit."""

    def __init__(
        self,
        brain: Brain,
        perform: Callable[[AgentEffect], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._brain = brain
        self._perform = perform
        self._clock = clock
        self._inbox: deque[AgentEvent] = deque()
        self._wake = asyncio.Event()
        self._faults = 0
        self._exit: Exit | None = None

    def deliver(self, event: AgentEvent) -> None:
        """Queue an event; in the loop's thread."""
        self._inbox.append(event)
        self._wake.set()

    def end(self, outcome: Exit) -> None:
        """End without the brain: what it needs cannot be had."""
        if self._exit is None:
            self._exit = outcome
            self._wake.set()

    async def run(self) -> Exit:
        """Turn after turn until the outcome is known."""
        self.deliver(Tick())
        while True:
            while self._inbox and self._exit is None:
                self._turn(self._inbox.popleft())
            if self._exit is not None:
                return self._exit
            deadline = self._brain.next_deadline()
            wait = None if deadline is None else deadline - self._clock()
            if wait is not None and wait <= 0:
                self._inbox.append(Tick())
                await asyncio.sleep(0)  # events that came meanwhile are looked at as well
                continue
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), wait)
            except TimeoutError:
                self._inbox.append(Tick())

    def _turn(self, event: AgentEvent) -> None:
        try:
            effects = self._brain.step(event, self._clock())
        except Exception as error:
            # Never for bad input. What the brain knows may be wrong now: nothing is to follow it.
            logger.exception("a defect of elasticrun: %s", error)
            self._end_of_defect(f"{type(event).__name__} was not understood", error)
            return
        for effect in effects:
            if isinstance(effect, Exit):
                self._exit = effect
                return
            try:
                self._perform(effect)
            except Exception as error:
                self._faulted(effect, error)

    def _faulted(self, effect: AgentEffect, error: Exception) -> None:
        """A defect of ours in what the brain knows nothing of: the next effect is carried out."""
        name = type(effect).__name__
        logger.exception("a defect of elasticrun: %s could not be carried out", name)
        self._faults += 1
        if isinstance(effect, AWAITED) or self._faults >= MAX_FAULTS:
            self._end_of_defect(f"{name} could not be carried out", error)

    def _end_of_defect(self, what: str, error: Exception) -> None:
        sentence = f"a defect of elasticrun, please report it: {what} ({error!r})"
        self.end(Exit(EXIT_FAILED, sentence, (), 0))
