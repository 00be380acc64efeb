"""The job master of the simulated world: the real brain with a fake shell around it.

The shell does what the real one owes: it carries effects out one by one, in their order, and what
follows a record waits until that is durable, while events are taken in. It may die between any two
acts (an order to one session is an act, a record is one), and what was not carried out is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from elasticrun.core.events import (
    Detached,
    Hangup,
    JobEffect,
    JobEvent,
    JobOver,
    Note,
    Overslept,
    Record,
    Replied,
    Send,
    Tick,
)
from elasticrun.core.job.job import Job
from elasticrun.core.persisted import Facts
from elasticrun.wire.messages import JobSpec
from tests.simulator.network import Stream

if TYPE_CHECKING:
    from tests.simulator.world import World


def act_name(effect: JobEffect) -> str:
    """The word by which scripts name an act: record, start, stop, end, welcome, hangup, ..."""
    what = effect.order if isinstance(effect, Send) else effect
    return type(what).__name__.lower()


class Master:
    def __init__(
        self, world: World, spec: JobSpec | None, term: int, facts: Facts | None = None
    ) -> None:
        self.world = world
        self.job = Job(spec, term, world.mint, facts)
        self.streams: dict[int, Stream] = {}
        self.alive = True
        self.stalled = False
        self.over: JobOver | None = None
        self._held: list[JobEvent] = []  # what came in during a stall
        self._outbox: deque[JobEffect] = deque()
        self._writing = False
        self._tick_at: float | None = None
        self._slots, self._slots_at = 0, 0.0
        self._slot_seconds: float | None = None
        self._schedule_tick()

    def step(self, event: JobEvent) -> None:
        if not self.alive:
            return
        if self.stalled:
            self._held.append(event)
            return
        for effect in self.job.step(event, self.world.clock.now):
            self._outbox.extend(_acts(effect))
        self._count_slots()
        self._perform_all()
        if isinstance(event, Detached):
            self.streams.pop(event.session, None)
        if self.alive:
            if self.world.check is not None:
                self.world.check(self, event)
            self._schedule_tick()

    def _count_slots(self) -> None:
        """Every second of every slot is in the job's ledger once, as counted here beside it."""
        if self.world.check is None:
            return
        now, found = self.world.clock.now, self.job.goodput()
        if found is None:
            return
        assert sum(round(row.seconds * 1e6) for row in found.rows) == round(
            found.slot_seconds * 1e6
        ), f"the rows of the ledger do not add up: {found}"
        if self._slot_seconds is None:
            self._slot_seconds = found.slot_seconds
        else:
            self._slot_seconds += self._slots * (now - self._slots_at)
        told = f"{found.slot_seconds} slot-seconds in the ledger, {self._slot_seconds} were held"
        assert abs(found.slot_seconds - self._slot_seconds) < 1e-3 + 1e-9 * now, told
        status = self.job.status()
        here = [one for one in status.nodes if one.state in ("alive", "suspect")]
        over = status.phase == "ended"
        self._slots = 0 if over else sum(one.local_world_size for one in here)
        self._slots_at = now

    # ------------------------------------------------------------ effects

    def _perform_all(self) -> None:
        while self._outbox and self.alive and not self._writing:
            effect = self._outbox.popleft()
            if not self.world.may_act(effect):
                self.world.kill_master()
                return
            delay = self.world.record_delay() if isinstance(effect, Record) else 0.0
            if delay:
                self._write(effect, delay)
                return
            self._perform(effect)

    def _write(self, effect: JobEffect, delay: float) -> None:
        """The disk takes its time."""

        def written() -> None:
            self._writing = False
            if self.alive:
                self._perform(effect)
                self._perform_all()

        self._writing = True
        self.world.clock.after(delay, written)

    def _perform(self, effect: JobEffect) -> None:
        if isinstance(effect, Send):
            for session in effect.sessions:
                if session in self.streams:
                    self.streams[session].order(effect.order)
        elif isinstance(effect, Hangup):
            if effect.session in self.streams:
                self.streams[effect.session].close_from_master()
        elif isinstance(effect, Note):
            self.world.trace("master", effect.text)
        elif isinstance(effect, Replied):
            word = "done" if effect.reply.ok else "refused"
            self.world.trace("reply", f"{word}: {effect.reply.reason}")
        elif isinstance(effect, Record):
            self.world.recorded(effect.facts)
        elif isinstance(effect, JobOver):
            self.over = effect
            self.world.over = effect
        self.world.acted(effect)

    # ------------------------------------------------------------ time

    def _schedule_tick(self) -> None:
        when = self.job.next_deadline()
        if when is None or when == self._tick_at:
            return
        self._tick_at = when

        def tick() -> None:
            if self._tick_at == when:
                self._tick_at = None
                self.step(Tick())

        self.world.clock.at(when, tick)

    def wake(self, slept: float) -> None:
        """The loop turns again after a stall."""
        self.stalled = False
        self.step(Overslept(slept))
        held, self._held = self._held, []
        for event in held:
            if not isinstance(event, Tick):
                self.step(event)
        self.step(Tick())

    def die(self) -> None:
        """kill -9: every stream breaks."""
        self.alive = False
        self._outbox.clear()
        for stream in self.streams.values():
            stream.close_from_master()


def _acts(effect: JobEffect) -> Iterator[JobEffect]:
    """An order to many sessions is many acts: a master may die between two of them."""
    if isinstance(effect, Send):
        for session in effect.sessions:
            yield Send((session,), effect.order)
    else:
        yield effect
