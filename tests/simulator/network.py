"""Streams between agents and the master: in order within a stream, in any order between streams.

A stream delivers each direction first in, first out, with a delay for every message; what is on its
way when it breaks is lost. The two ends learn of a break at different times, and either end may
take long: that is what a cut cable looks like.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from elasticrun.core.events import Attached, Detached, Heard
from elasticrun.wire.messages import Hello, Order, Report
from tests.simulator.clock import Clock


class AgentEnd(Protocol):
    def ordered(self, stream: Stream, order: Order) -> None: ...

    def link_broke(self, stream: Stream, reason: str) -> None: ...


class MasterEnd(Protocol):
    def step(self, event: Attached | Heard | Detached) -> None: ...


class Stream:
    """One `Attend` stream. `cut` loses everything in both directions and tells nobody."""

    def __init__(
        self,
        session: int,
        clock: Clock,
        delay: Callable[[], float],
        agent: AgentEnd,
        master: MasterEnd,
    ) -> None:
        self.session = session
        self._clock = clock
        self._delay = delay
        self._agent = agent
        self._master = master
        self.agent_open = True
        self.master_open = False  # until the Hello has arrived
        self.cut = False
        self.fuse = 0  # so many messages pass before it is reset; 0: it is not
        self._up_free = self._down_free = 0.0

    def hello(self, hello: Hello) -> None:
        def arrive() -> None:
            self.master_open = True
            self._master.step(Attached(self.session, hello))

        self._up(arrive)

    def report(self, report: Report) -> None:
        def arrive() -> None:
            if self.master_open:
                self._master.step(Heard(self.session, report))

        self._up(arrive)

    def order(self, order: Order) -> None:
        def arrive() -> None:
            if self.agent_open:
                self._agent.ordered(self, order)

        self._down(arrive)

    def close_from_agent(self, *, clean: bool) -> None:
        """The agent closed it or is gone; the master learns of it after what was said before."""
        self.agent_open = False
        self._up(lambda: self.break_at_master(clean=clean))

    def close_from_master(self) -> None:
        """The master hung up, or is gone; the agent learns of it after what was told before."""
        self.master_open = False
        self._down(lambda: self.break_at_agent("the stream was closed"))

    def break_at_master(
        self, *, clean: bool = False, silent: float = 0.0, quiet: float = 0.0
    ) -> None:
        """The master's side is told that it broke, after so long a silence (see `Detached`)."""
        if self.master_open:
            self.master_open = False
            self._master.step(Detached(self.session, clean, silent, quiet))

    def break_at_agent(self, reason: str) -> None:
        """The agent's side is told that it broke."""
        if self.agent_open:
            self.agent_open = False
            self._agent.link_broke(self, reason)

    def reset(self) -> None:
        """Something on the way resets it: both ends are told, what is on its way is lost."""
        self.cut = True
        self._clock.after(self._delay(), self.break_at_master)
        self._clock.after(self._delay(), lambda: self.break_at_agent("connection reset"))

    def _deliver(self, arrive: Callable[[], None]) -> None:
        if self.cut:
            return
        arrive()
        if self.fuse > 0:
            self.fuse -= 1
            if not self.fuse:
                self.reset()

    def _up(self, arrive: Callable[[], None]) -> None:
        self._up_free = max(self._up_free, self._clock.now + self._delay())
        self._clock.at(self._up_free, lambda: self._deliver(arrive))

    def _down(self, arrive: Callable[[], None]) -> None:
        self._down_free = max(self._down_free, self._clock.now + self._delay())
        self._clock.at(self._down_free, lambda: self._deliver(arrive))
