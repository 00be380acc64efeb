"""The agent's brain: the life of the local ranks, as a table.

A life of a node is PREPARING -> JOINED -> STARTING -> RUNNING -> STOPPING -> SWEEPING and again
PREPARING or JOINED; or FINISHED; and at the end, by way of ENDING and CLEARING where ranks still
live, OVER. From PREPARING and JOINED it may go to PROBING and back (`probing_rules`). `TABLE` below
says which event means what in which state. An event that is not listed for a state cannot happen
there, and raises.

What it promises
* No rank of a round is asked for before every process of the round before has been swept, and the
  master hears `Stopped` only then: this is the fence on which the next round rests.
* Ranks get SIGTERM first, always, and SIGKILL when their grace is over. A rank that outlives that
  by STUCK_AFTER is reported, and the agent ends with EXIT_BAD_NODE.
* The store for the next round is asked for as soon as the present one has begun, so no restart
  waits for it. At most one store is ready and unused.
* A fork server that does not start the ranks within SPAWN_TIMEOUT ends the agent.
* While no master answers the ranks go on, for `master_lost_timeout` at most. That bound is one
  half of a fence: a master that hears nobody waits a little longer before it begins a new round.
* The agent does not end while a snapshot of this node is being written out (HOLDING), for as long
  as the order gave it; a further death signal ends it at once. Its ranks get no second more.
* A node that is excluded and told to stay (PARKED) has no ranks, and ends with its job at least.
* Whatever was said while the link was down is said again when it is back (`LinkBack`): the round's
  failures, that it was stopped, that this node is ready. The master takes every report twice.

What the shell owes: one `Tick` at the start (a fresh group has a deadline in the past: it asks for
the first store), `RankExited` for every rank it was asked to start, also those that could not be
(with a Failure of kind SPAWN), and `RanksSwept` for every `SweepRanks`.
"""

from __future__ import annotations

from elasticrun.config import EXIT_FAILED, EXIT_OK, SPAWN_TIMEOUT, STUCK_AFTER
from elasticrun.core import events as fx
from elasticrun.core.rounds.failures import Ending, cause_first, code_for, code_of
from elasticrun.core.worker.base import newer
from elasticrun.core.worker.leaving import DepartingRules
from elasticrun.core.worker.ranks import SIGKILL
from elasticrun.core.worker.rules import SIGTERM, LinkRules
from elasticrun.core.worker.states import Rules, State, UnexpectedEvent, draw_table, tabulate
from elasticrun.wire import messages as m


class WorkerGroup(LinkRules, DepartingRules):
    """The local ranks of one node; see the module's head. What it knows is kept by `GroupBase`."""

    # ------------------------------------------------------------ the shape of a brain

    def step(self, event: fx.AgentEvent, now: float) -> list[fx.AgentEffect]:
        """Take in one event at monotonic time `now`; what is to be done, in order."""
        self._out = []
        if not self._begun:
            self._begun = True
            self._prepare()
        if isinstance(event, fx.Tick):
            self._due(now)
            return self._out
        what = event.order if isinstance(event, fx.Ordered) else event
        if isinstance(event, fx.Ordered) and not self._obeying and not isinstance(what, m.Welcome):
            return self._out
        method = TABLE.get((self._state, type(what)))
        if method is None:
            raise UnexpectedEvent(self._state, type(what).__name__)
        method(self, what, now)
        return self._out

    # ------------------------------------------------------------ stores

    def _store_ready(self, event: fx.StoreReady, now: float) -> None:
        self._out += self._stores.ready(event.store)
        if self._state is State.PREPARING:
            self._rejoin()
        elif self._state is State.PROBING:
            self._offer()

    def _store_lost(self, event: fx.StoreLost, now: float) -> None:
        if event.store == self._stores.hosted:
            self._stores.hosted = None
            self._note(f"the store at {event.store} ended while its round runs", "warning")
        elif event.store == self._stores.offer:
            self._stores.lost_offer()
            if self._stores.hopeless:
                self._conclude(
                    fx.Exit(EXIT_FAILED, "the store host ends again and again", (), 0), now
                )
                return
            if self._state is State.JOINED:
                self._state = State.PREPARING
            self._prepare()

    # ------------------------------------------------------------ orders

    def _started(self, order: m.Start, now: float) -> None:
        """JOINED, PREPARING or PROBING: take the place that the master gives."""
        if self._start is not None and not newer(order.round, self._start.round):
            return  # an order that crossed our m.Stopped
        self._call_off_probe()
        self._probed = None
        self._out += self._stores.release()
        self._start = order
        self._ranks.failures.clear()
        if order.host_store and order.store != self._stores.offer:
            self._note(f"round {order.round} was to use a store that has ended", "warning")
            self._say(m.Stopped(order.round))
            self._rejoin()
            return
        self._stores.use(host=order.host_store)
        self._ranks.begin(order.first_rank)
        self._cut_short = False
        self._asked = self._written = -1
        self._reason = ""
        self._state = State.STARTING
        self._deadlines.arm("spawn", now + SPAWN_TIMEOUT)
        self._out.append(fx.SpawnRanks(order, attempt=order.round.number - 1))
        self._prepare()

    def _restarted(self, order: m.Start, now: float) -> None:
        """A m.Start while ranks of a round live here: the same one again, or one that must wait."""
        if self._start is not None and newer(order.round, self._start.round):
            self._stop(m.Stop(self._start.round, f"round {order.round} has begun"), now)

    def _stop(self, order: m.Stop, now: float) -> None:
        """STARTING or RUNNING: end the ranks of this round and join the next."""
        if self._start is None or order.round != self._start.round:
            return
        if self._departing is not None:
            self._leave_unsaved(self._departing, now)
            return
        self._reason = order.reason
        self._note(f"stopping the ranks: {order.reason}")
        self._begin_stop(State.STOPPING, SIGTERM, self._restart_grace, now)

    def _stop_finished(self, order: m.Stop, now: float) -> None:
        if self._start is not None and order.round == self._start.round:
            if self._departing is not None:
                self._leave_unsaved(self._departing, now)
                return
            self._deadlines.disarm("exit-barrier")
            self._reason = order.reason
            self._sweep(State.SWEEPING, now)

    def _end(self, order: m.End, now: float) -> None:
        if order.exit_code == code_of(Ending.SAVED):
            self._ends_as_saved()
        self._told_to_end(fx.Exit(order.exit_code, order.reason, order.failures, 0), now)

    def _refused(self, order: m.Refused, now: float) -> None:
        self._told_to_end(fx.Exit(order.exit_code, order.reason, (), 0), now)

    def _told_to_end(self, outcome: fx.Exit, now: float) -> None:
        if self.is_parked:
            self._unpark(outcome)
        else:
            self._conclude(outcome, now)

    # ------------------------------------------------------------ ranks

    def _spawned(self, event: fx.RankSpawned, now: float) -> None:
        """STARTING."""
        self._ranks.spawned(event.local_rank, event.pid)
        if self._ranks.all_spawned:
            self._state = State.RUNNING
            self._deadlines.disarm("spawn")
            self._say_running()

    def _spawned_late(self, event: fx.RankSpawned, now: float) -> None:
        """STOPPING or ENDING: it was asked for before the order to stop came."""
        self._ranks.spawned(event.local_rank, event.pid)
        if event.local_rank in self._ranks.live:
            signum = SIGKILL if "stuck" in self._deadlines else SIGTERM
            self._ranks.targets(signum)
            self._out.append(fx.SignalRanks((event.local_rank,), signum))

    def _exited(self, event: fx.RankExited, now: float) -> None:
        """STARTING or RUNNING."""
        self._ranks.live.pop(event.local_rank, None)
        if self._departing is not None:
            self._exited_departing(event, self._departing, now)
            return
        if event.code == 0 and event.failure is None:
            if not self._ranks.live:
                self._finish(now)
            return
        self._ranks.failures[event.local_rank] = self._ranks.failed(event, now)
        self._say_failures()
        self._reason = "a rank failed here; the others are being stopped"
        self._begin_stop(State.STOPPING, SIGTERM, self._restart_grace, now)

    def _exited_stopping(self, event: fx.RankExited, now: float) -> None:
        """STOPPING or ENDING: exits with 0 are no success, deaths by our signals no failure."""
        self._ranks.live.pop(event.local_rank, None)
        if event.code != 0 or event.failure is not None:
            failure = self._ranks.failed(event, now)
            # one that had failed by itself before our signal came has left its traceback
            if failure.kind is not m.FailureKind.STOPPED or failure.traceback:
                self._ranks.failures[event.local_rank] = failure
                self._say_failures()
        if not self._ranks.live:
            ending = self._state is State.ENDING
            self._sweep(State.CLEARING if ending else State.SWEEPING, now)

    def _swept(self, event: fx.RanksSwept, now: float) -> None:
        """SWEEPING or CLEARING."""
        self._deadlines.disarm("stuck")
        if event.stuck:
            pids = ", ".join(map(str, event.stuck))
            left = f"processes that the kernel will not let die are left here: {pids}"
            self._give_up(code_of(Ending.STUCK), left)
            return
        self._say_stopped()
        self._after_sweep()

    def _after_sweep(self) -> None:
        if self._outcome is not None:
            self._exit(self._outcome)
        else:
            self._rejoin()

    def _spawner_lost(self, event: fx.SpawnerLost, now: float) -> None:
        """The spawner's ranks and stores are gone with it, and all that was below them."""
        self._note(f"the fork server ended: {event.reason}", "error")
        self._stores.lose_spawner()
        self._deadlines.disarm("kill")
        self._deadlines.disarm("stuck")
        if self._state is State.FINISHED:
            self._prepare()
        elif self._state in _CALM:
            if self._state is State.PROBING:
                self._probe_lost(event.reason)
            self._rejoin()
        else:
            if self._ranks.lose_spawner(event):
                self._say_failures()
            if self._departing is not None:
                self._leave_unsaved(self._departing, now)
                return
            self._say_stopped()
            self._after_sweep()

    # ------------------------------------------------------------ deadlines

    def _due(self, now: float) -> None:
        for key in self._deadlines.pop_due(now):
            if self._state is State.OVER:
                return
            if key == "kill":
                self._signal(SIGKILL)
                self._deadlines.arm("stuck", now + STUCK_AFTER)
            elif key == "stuck":
                pids = self._ranks.in_words("descendants of ranks")
                late = f"killed {STUCK_AFTER:g} s ago and still there: {pids}"
                self._give_up(code_of(Ending.STUCK), late)
            elif key == "exit-barrier":
                self._say(m.Leaving("its ranks are done and its exit barrier is over", 0))
                self._exit(fx.Exit(EXIT_OK, "all ranks of this node are done", (), 0))
            elif key == "spawn":
                self._not_spawned()
            elif key == "master-lost":
                self._master_lost(now)
            elif key == "departing":
                self._departure_due(now)
            elif key == "holding":
                self._held_long_enough(now)
            elif key == "parked":
                self._park_ends("it has been parked for long enough")
            elif key == "confirm":
                self._park_ends("the new master does not know that it is excluded")

    def _master_lost(self, now: float) -> None:
        waited = f"no master answered for {self._master_lost_timeout:g} s"
        if self.is_parked:
            self._park_ends(waited)
        elif self._state is State.FINISHED:
            reason = f"{waited}; the ranks of this node are done, the others' result is unknown"
            self._conclude(fx.Exit(EXIT_OK, reason, (), 0), now)
        else:
            failures = cause_first(self._failures())
            code = code_for(failures, Ending.NO_MASTER)
            outcome = fx.Exit(code, waited, failures, 0)
            # the master counts on this grace: it is part of the fence (core.rendezvous)
            self._conclude(outcome, now, grace=self._restart_grace)

    # ------------------------------------------------------------ nothing

    def _ignore(self, what: object, now: float) -> None:
        """Nothing to do here: known already, or of a time that is over."""


# -------------------------------------------------------------------- the table

_IDLE = (State.PREPARING, State.JOINED)
_CALM = (*_IDLE, State.PROBING)
_LIVE = (State.STARTING, State.RUNNING)
_DYING = (State.STOPPING, State.ENDING)
_SWEPT = (State.SWEEPING, State.CLEARING)
_STAYING = (State.HOLDING, State.PARKED)
_HERE = tuple(state for state in State if state not in (*_STAYING, State.OVER))
_ALIVE = (*_HERE, *_STAYING)
_BUSY = tuple(state for state in _ALIVE if state not in _CALM)

G = WorkerGroup
_BEFORE: Rules = (
    ((*_HERE, State.HOLDING), (fx.StoreReady,), G._store_ready),
    ((*_HERE, State.HOLDING), (fx.StoreLost,), G._store_lost),
    (_HERE, (fx.SpawnerLost,), G._spawner_lost),
    (_HERE, (fx.Signalled,), G._signalled),
    (_ALIVE, (fx.LinkLost,), G._link_lost_event),
    (_ALIVE, (fx.LinkBack,), G._link_back),
    (_ALIVE, (m.Welcome,), G._welcome),
    (_ALIVE, (m.End,), G._end),
    (_ALIVE, (m.Refused,), G._refused),
    (_ALIVE, (m.Park,), G._park),
    (_HERE, (m.Wait,), G._wait),
    (_STAYING, (fx.SpawnerLost,), G._saver_lost),
    ((State.HOLDING,), (fx.Signalled,), G._signalled_holding),
    (_STAYING, (m.Wait, m.Start, m.Stop), G._ignore),
    ((State.PARKED,), (fx.Signalled,), G._signalled_parked),
    ((State.PARKED,), (fx.StoreReady,), G._store_parked),
    ((State.PARKED,), (fx.StoreLost,), G._ignore),
    (_ALIVE, (m.Persist,), G._persist),
    (_ALIVE, (m.PersistOver,), G._persist_over),
    (_ALIVE, (m.Watermark, m.CommitCheckpoint, m.Holder, m.Replicate), G._obey),
    (_ALIVE, (m.SaveAt,), G._save_at),
    (_CALM, (m.Start,), G._started),
    (_CALM, (m.Stop,), G._ignore),
    (_LIVE, (m.Start,), G._restarted),
    (_LIVE, (m.Stop,), G._stop),
    ((State.STARTING,), (fx.RankSpawned,), G._spawned),
    (_LIVE, (fx.RankExited,), G._exited),
    (_DYING, (fx.RankSpawned,), G._spawned_late),
    (_DYING, (fx.RankExited,), G._exited_stopping),
    (_DYING + _SWEPT, (m.Start, m.Stop), G._ignore),
    ((State.FINISHED,), (m.Start,), G._ignore),
    (_SWEPT, (fx.RanksSwept,), G._swept),
    ((State.FINISHED,), (m.Stop,), G._stop_finished),
    (_IDLE, (m.Probe,), G._probe),
    ((State.PROBING,), (m.Probe,), G._probe_newer),
    ((State.PROBING,), (fx.ProbeEnded,), G._probe_ended),
    (_IDLE, (fx.ProbeEnded,), G._ignore),
    (_BUSY, (m.Probe, fx.ProbeEnded), G._ignore),
)  # fmt: skip
RULES: Rules = (
    *_BEFORE,
    ((State.OVER,), tuple(dict.fromkeys(k for _, kinds, _ in _BEFORE for k in kinds)), G._ignore),
)

TABLE = tabulate(RULES)


def draw() -> str:
    """The table as Markdown: a row an event, a column a state, the method that answers."""
    return draw_table(RULES)
