"""A node leaves: which step its ranks are at, and which one all ranks are asked to save.

Both stand in the control pages of segments: a rank writes the one at each step, and reads the
other. So nobody waits for anybody.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from elasticrun.agent.snapshots.segments import Held
from elasticrun.config import AgentConfig
from elasticrun.core.events import Signalled
from elasticrun.shm.segment import NONE
from elasticrun.wire import messages as m, snapshots as s
from elasticrun.wire.messages import MAX_MARGIN

LEAST_MARGIN: Final = 2
"""Steps from the newest one to the one that is asked for, at least."""

WORD: Final = 0.5
"""Seconds in which word of it comes to every rank, with much to spare."""

LEAST_TIME: Final = 0.1
"""Seconds from which on a pace is believed."""

MOST_MISSED: Final = 64
"""Steps that ranks may say they have missed; the master names a few at most."""

MAY_PUT_OFF: Final = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Death signals that ranks put off until their state is saved."""


class Departing:
    """Of the present life of the ranks. `current`: their segments, by local rank; `held`: all
    that lie here."""

    def __init__(
        self,
        config: AgentConfig,
        current: Mapping[int, Held],
        held: Callable[[], Iterable[Held]],
        say: Callable[[m.Report], None],
    ) -> None:
        self._current = current
        self._held = held
        self._say = say
        self._start: m.Start | None = None
        self._asked = NONE
        self._told: dict[int, m.Missed] = {}  # by the step that was asked for
        self._silent: set[int] = set()  # local ranks that save nothing more
        self._first: tuple[float, int] | None = None  # commit: when, of which step
        self._began: tuple[float, int] | None = None  # training: when, after which step
        self._putting_off: dict[int, frozenset[int]] = {}
        names = set(MAY_PUT_OFF).intersection(config.signals_to_handle)
        self.signals = tuple(sorted(signal.Signals[name].value for name in names))
        """Those that ranks are to put off."""
        if config.departure_grace <= 0:
            self.signals = ()

    def begin(self, start: m.Start) -> None:
        """A new life of the ranks."""
        self._start = start
        self._asked = NONE
        self._told.clear()
        self._silent.clear()
        self._first = self._began = None
        self._putting_off.clear()

    # ------------------------------------------------------------ ranks

    def began(self, step: int) -> None:
        """A rank goes on from this step."""
        if self._began is None:
            self._began = (time.monotonic(), step)

    def committed(self, step: int) -> None:
        """A rank has taken a snapshot."""
        if self._first is None:
            self._first = (time.monotonic(), step)

    def puts_off(self, local_rank: int, signals: tuple[int, ...]) -> None:
        """This rank puts off these signals: they do not end it any more."""
        self._putting_off[local_rank] = frozenset(signals)

    def is_put_off(self, local_rank: int, signum: int) -> bool:
        return signum in self._putting_off.get(local_rank, ())

    def lost(self, local_rank: int) -> None:
        """It does not speak with this agent any more: training is over in it, or it is."""
        self._silent.add(local_rank)

    def missed(self, said: s.Missed) -> None:
        """A rank could not save the step that was asked for."""
        start = self._start
        if start is None or said.asked < 0 or said.asked in self._told:
            return
        if len(self._told) < MOST_MISSED:
            report = self._told[said.asked] = m.Missed(start.round, said.asked, max(0, said.step))
            self._say(report)

    # ------------------------------------------------------------ the node

    def step(self) -> int:
        """The newest that a rank is at; -1: none of them can save its state."""
        steps = [
            held.segment.current
            for local_rank, held in self._current.items()
            if not held.gone and local_rank not in self._silent
        ]
        first = -1 if self._first is None else self._first[1]
        return max([first, *steps]) if steps else -1

    def newest(self) -> int:
        """The newest that a rank of this life has come to, also one that has ended; -1: unknown."""
        steps = (held.segment.current for held in self._current.values() if not held.gone)
        return max(steps, default=NONE)

    def margin(self) -> int:
        """Steps in which word comes to every rank, at the pace that they have kept."""
        since = self._first or self._began
        if since is None:
            return LEAST_MARGIN
        began, first = since
        seconds = max(time.monotonic() - began, LEAST_TIME)
        steps = math.ceil(WORD * (self.step() - first) / seconds)
        return min(max(LEAST_MARGIN, steps), MAX_MARGIN)

    def signalled(self, signum: int, *, death: bool) -> Signalled:
        """What the brain is told of a signal to this agent."""
        name = signal.Signals(signum).name
        step = self.step() if death else NONE
        held = max((one.step for held in self._held() for one in held.snapshots()), default=NONE)
        return Signalled(signum, name, death, step, self.margin(), held)

    def ask(self, order: m.SaveAt) -> None:
        """All ranks save their first step from this one on. The same order again, of a master that
        may not have heard that one could not, is answered again."""
        if self._start is not None and order.round == self._start.round:
            self._asked = order.step
            for held in self._current.values():
                self._write(held)
            if order.step in self._told:
                self._say(self._told[order.step])

    def show(self, held: Held) -> None:
        """A rank is given this segment: write it there."""
        self._silent.discard(held.local_rank)
        self._write(held)

    def _write(self, held: Held) -> None:
        if not held.gone:
            held.segment.save_at = self._asked
