"""What the agent's brain makes of orders about snapshots: it passes them on, and counts attempts to
persist, since the agent must not end under one: it may hold the only copy of a shard.

An attempt begins with Persist and ends with PersistOver, or when the time is over that the order
gave it: a master that is gone, or was replaced, ends none.
"""

from __future__ import annotations

from msgspec.structs import replace

from elasticrun.core import effects as fx
from elasticrun.core.group_base import GroupBase
from elasticrun.core.group_states import State
from elasticrun.wire import messages as m

MAX_PERSISTS = 16
"""Attempts that are counted; the master has one at a time, and begins the next when it is over."""


class HoldingRules(GroupBase):
    """The rules of attempts and of HOLDING; the table in `worker_group` says when each applies."""

    def _persist(self, order: m.Persist, now: float) -> None:
        self._forget_late(now)
        if order.attempt not in self._persists and len(self._persists) >= MAX_PERSISTS:
            self._note(f"attempt {order.attempt} is one too many at a time: left out", "warning")
            return
        self._persists.setdefault(order.attempt, now + order.limit)
        self._rearm()
        self._out.append(fx.Obey(order))

    def _persist_over(self, order: m.PersistOver, now: float) -> None:
        self._persists.pop(order.attempt, None)
        start = self._start
        if order.ok and start is not None and order.step < start.rewound_from:
            self._start = replace(start, rewound_from=-1)  # storage tells by itself from now on
        self._out.append(fx.Obey(order))
        self._forget_late(now)
        self._rearm()
        self._leave_if_free()

    def _obey(self, order: m.Order, now: float) -> None:
        self._out.append(fx.Obey(order))

    # ------------------------------------------------------------ HOLDING

    def _signalled_holding(self, event: fx.Signalled, now: float) -> None:
        if event.death and not self._is_said_again(event, now):
            self._note(f"received {event.name}: this node does not wait any longer", "warning")
            self._parked_until = None
            self._persists.clear()
            self._leave_if_free()

    def _is_said_again(self, event: fx.Signalled, now: float) -> bool:
        """Whether this is the signal by which this node departs, and not a second one."""
        signum, until = self._repeats
        return event.signum == signum and now < until

    def _saver_lost(self, event: fx.SpawnerLost, now: float) -> None:
        """The process that was writing is gone with its spawner; the shell tells the master, which
        calls the attempt over or begins another one."""
        self._stores.lose_spawner()

    def _held_long_enough(self, now: float) -> None:
        self._note("the checkpoint was not saved in its time; this node goes", "warning")
        self._persists.clear()
        self._leave_if_free()

    # ------------------------------------------------------------ small change

    def _forget_late(self, now: float) -> None:
        for attempt in [one for one, until in self._persists.items() if until <= now]:
            del self._persists[attempt]

    def _rearm(self) -> None:
        if self._state is State.HOLDING and self._persists:
            self._deadlines.arm("holding", max(self._persists.values()))

    def _leave_if_free(self) -> None:
        if self._state is State.HOLDING and not self._persists:
            assert self._outcome is not None
            self._over(self._outcome)
