"""What the agent's brain does where its node is excluded and is to stay (--quarantine): PARKED.

No rank lives here, and the machine stays taken, so that no scheduler gives it to a replacement.
Ranks and snapshots that are still here are ended and written out first, as before an end. A parked
node ends with the job and its exit code; else, with that of a bad node, at a refusal, at a death
signal, when its time is over, or when no master answers for too long. A master that is new has to
say so again (`link_rules.CONFIRM`): one without a record knows of no exclusion.

What the agent's brain makes of orders about snapshots: it passes them on, and counts attempts to
persist, since the agent must not end under one: it may hold the only copy of a shard.

An attempt begins with Persist and ends with PersistOver, or when the time is over that the order
gave it: a master that is gone, or was replaced, ends none.

What the agent's brain makes of signals to it. A death signal means that this node leaves.

Where its ranks have a Checkpointer it first *departs*: the master is told, names a step that all
ranks of the round save, and the ranks here run on until that step is written out. Then, or when
`departure_grace` is over, or at a second death signal, the node leaves: its ranks are ended, and
the master hears `Leaving`. Where no rank could save anything now, but earlier ones have left
snapshots here, it goes at once and stays only until these are written out, if it has the only copy
of something; between two rounds that is all there is to save. Nobody is charged for any of it.
Slurm says SIGTERM twice within milliseconds, at a time limit and where another job takes the place:
that is one signal.

A scheduler may signal every process at once. Then ranks end by themselves once they have saved;
what they have saved is waited for all the same, WAIT_FOR_SAVED at most, or until the master has
begun to write it: from then on HOLDING sees to it.
"""

from __future__ import annotations

from msgspec.structs import replace

from elasticrun.core import events as fx
from elasticrun.core.rounds.failures import Ending, code_for, code_of
from elasticrun.core.worker.base import GroupBase
from elasticrun.core.worker.rules import SIGTERM, EndingRules
from elasticrun.core.worker.states import ENDINGS, State
from elasticrun.wire import messages as m
from elasticrun.wire.signals import SAID_AGAIN


class ParkingRules(EndingRules):
    """The rules of PARKED; the table in `worker_group` says when each applies."""

    def _park(self, order: m.Park, now: float) -> None:
        """Any state but OVER."""
        if self._state in ENDINGS and not self.is_parked:
            return  # it ends for a reason of its own
        outcome = fx.Exit(code_of(Ending.EXCLUDED), order.reason, (), 0)
        self._parked_until = now + order.seconds
        if self._state is State.PARKED:
            self._over(outcome)
        else:
            self._conclude(outcome, now)

    def _unpark(self, outcome: fx.Exit) -> None:
        """It is to end: at once, or as soon as what is still here has ended."""
        self._parked_until = None
        self._outcome = outcome
        if self._state is State.PARKED:
            self._exit(outcome)

    def _park_ends(self, why: str, signum: int = 0) -> None:
        """It need not, or cannot, stay any longer. While ranks are still ended here: not after."""
        outcome = self._outcome
        assert outcome is not None
        if self._state is State.PARKED:
            self._say(m.Leaving(why, signum))
        self._unpark(replace(outcome, reason=f"{outcome.reason}; {why}", signum=signum))

    def _signalled_parked(self, event: fx.Signalled, now: float) -> None:
        if event.death:
            self._park_ends(f"received {event.name}", event.signum)

    def _store_parked(self, event: fx.StoreReady, now: float) -> None:
        """One that was on its way: no round will use it."""
        self._out.append(fx.ReleaseStore(event.store))


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


RESCUE = "rescue"
"""Stands for an attempt to persist that the master may begin when a node leaves without having
saved a step."""

RESCUE_WITHIN = 2.0
"""Seconds in which the master begins it."""

WAIT_FOR_SAVED = 6.0
"""Seconds in which a step that ranks have saved before they ended is begun to be written; a little
more than `breakpoint_save.WAIT_FOR_ALL`."""


class DepartingRules(ParkingRules, HoldingRules):
    """The rules of signals and departures; the table in `worker_group` says when each applies."""

    def _signalled(self, event: fx.Signalled, now: float) -> None:
        """Any state but HOLDING, PARKED and OVER."""
        self._ranks.signalled(event.signum, now)
        if event.death and self.is_parked:
            self._park_ends(f"received {event.name}", event.signum)
        if not event.death or self._state in (State.ENDING, State.CLEARING):
            if self._ranks.live:
                self._signal(event.signum)
        elif self._state is State.RUNNING and event.step >= 0 and self._can_depart():
            self._depart(event, now)
        elif self._is_said_again(event, now):
            pass
        elif event.held >= 0 and self._can_depart() and self._state is not State.FINISHED:
            self._may_be_said_again(event, now)
            if self._state is not State.RUNNING:
                self._left_with = event.held
            self._leave_unsaved(event, now)
        else:
            self._leave(event, now)  # also at a second one: at once

    def _can_depart(self) -> bool:
        return self._departing is None and self._departure_grace > 0

    def _may_be_said_again(self, event: fx.Signalled, now: float) -> None:
        if event.signum == SIGTERM:
            self._repeats = (SIGTERM, now + SAID_AGAIN)

    def _depart(self, event: fx.Signalled, now: float) -> None:
        self._departing = event
        self._may_be_said_again(event, now)
        self._asked = -1
        self._deadlines.arm("departing", now + self._departure_grace)
        what = "this node leaves when its ranks have saved a step"
        self._reason = f"received {event.name}: {what}"
        limit = f"in {self._departure_grace:g} s at most"
        self._note(f"{self._reason}, {limit}; a second signal ends it at once")
        self._say_departing()

    def _leave(self, event: fx.Signalled, now: float) -> None:
        reason = f"received {event.name}"
        why = f"step {self._written} is saved" if self._has_saved() else reason
        self._note(f"{why}: the ranks are told, and this node leaves")
        self._say(m.Leaving(reason, event.signum))
        code = code_for(self._failures(), Ending.SAVED if self._has_saved() else Ending.LEFT)
        self._conclude(fx.Exit(code, reason, (), event.signum), now, event.signum)

    # ------------------------------------------------------------ while it departs

    def _save_at(self, order: m.SaveAt, now: float) -> None:
        if self._start is not None and order.round == self._start.round:
            self._asked = order.step
            self._obey(order, now)

    def _has_saved(self) -> bool:
        """Whether the step that the ranks were to save before they leave is in storage; or, where
        the signal came between two rounds, all that they had."""
        step = self._asked if self._left_with is None else self._left_with
        return 0 <= step <= self._written

    def _persist_over(self, order: m.PersistOver, now: float) -> None:
        event, start = self._departing, self._start
        present = start is not None and order.round == start.round
        if order.ok and (present or self._left_with is not None):
            self._written = max(self._written, order.step)
            if self._has_saved():
                self._ends_as_saved()
        super()._persist_over(order, now)
        if event is None or start is None or self._state is not State.RUNNING:
            return
        settled = order.ok or not order.attempt  # else another attempt may follow
        if settled and order.round == start.round and 0 <= self._asked <= order.step:
            self._leave(event, now) if order.ok else self._leave_unsaved(event, now)

    def _ends_as_saved(self) -> None:
        """What a node that leaves for a signal was to save is in storage, as it hears by now."""
        if self._outcome is not None and self._outcome.signum:
            code = code_for(self._failures(), Ending.SAVED)
            self._outcome = replace(self._outcome, code=code)

    def _exited_departing(self, event: fx.RankExited, cause: fx.Signalled, now: float) -> None:
        """A rank has ended while this node departs."""
        self._ranks.signalled(cause.signum, now)  # ranks may have put it off
        if event.code == 0 and event.failure is None:
            if not self._ranks.live and not self._cut_short:
                self._finish(now)
                return
        else:
            failure = self._ranks.failed(event, now)
            self._cut_short = True
            if failure.kind is not m.FailureKind.STOPPED:
                self._ranks.failures[event.local_rank] = failure
                self._say_failures()
                self._leave_unsaved(cause, now)
                return
        if not self._ranks.live:
            due = self._deadlines.when("departing")
            soon = now + WAIT_FOR_SAVED if self._asked >= 0 else now
            self._deadlines.arm("departing", soon if due is None else min(due, soon))

    def _departure_due(self, now: float) -> None:
        if self._departing is None:
            return
        if self._ranks.live:
            waited = f"no step was saved within {self._departure_grace:g} s"
            self._note(f"{waited}: this node leaves without", "warning")
        self._leave_unsaved(self._departing, now)

    def _leave_unsaved(self, event: fx.Signalled, now: float) -> None:
        """What the ranks had before is written out, where this node has the only copy: it stays
        until it has heard of that."""
        if not self._persists:
            self._persists[RESCUE] = now + RESCUE_WITHIN
        self._leave(event, now)

    def _held_long_enough(self, now: float) -> None:
        if self._persists.keys() == {RESCUE}:  # the master had no need of it
            self._persists.clear()
            self._leave_if_free()
        else:
            super()._held_long_enough(now)

    def _persist(self, order: m.Persist, now: float) -> None:
        self._persists.pop(RESCUE, None)
        super()._persist(order, now)
