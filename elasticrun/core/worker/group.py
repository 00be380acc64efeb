"""The agent's state machine: the lifecycle of the local ranks, as a table.

A node goes PREPARING -> JOINED -> STARTING -> RUNNING -> STOPPING -> SWEEPING and back to PREPARING
or JOINED; or to FINISHED. At the end it reaches OVER, through ENDING and CLEARING if ranks are
still alive. From PREPARING and JOINED it may go to PROBING and back. `rules` defines what each
event does in each state. An event that is not listed for a state cannot occur there, and raises.

Guarantees:
* No rank of a round is started before every process of the previous round is gone, and the master
  receives `Stopped` only then: this is the fence on which the next round relies.
* Ranks always get SIGTERM first, and SIGKILL after their grace period. A rank that survives SIGKILL
  for STUCK_AFTER is reported, and the agent exits with EXIT_BAD_NODE.
* The store for the next round is requested as soon as the current one has begun, so no restart
  waits for it. At most one store is ready and unused.
* A fork server that does not start the ranks within SPAWN_TIMEOUT ends the agent.
* Without a reachable master the ranks keep running for at most `master_lost_timeout`. That bound is
  one half of a fence: a master that hears no node waits a little longer before it begins a new
  round.
* The agent does not exit while a snapshot of this node is being written (HOLDING), for as long as
  the order allowed; a further death signal ends it at once. This gives its ranks no extra time.
* Everything sent while the link was down is sent again when it is back (`LinkBack`): the round's
  failures, that it was stopped, that this node is ready. The master accepts duplicate reports.

Two components have their own state and rules: `leaving` (signals, and checkpoints that are being
written) and `probing`.

The runtime must send one `Tick` at the start (a new group has a deadline in the past: it asks for
the first store), `RankExited` for every rank it was asked to start, including those that could not
be started (with a Failure of kind SPAWN), and `RanksSwept` for every `SweepRanks`.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from elasticrun.config import (
    DEPARTURE_GRACE,
    EXIT_FAILED,
    EXIT_OK,
    MASTER_LOST_TIMEOUT,
    SPAWN_TIMEOUT,
    STUCK_AFTER,
)
from elasticrun.core import events as fx, reasons
from elasticrun.core.deadlines import Deadlines
from elasticrun.core.reasons import NoMaster, Reason, read, said, text
from elasticrun.core.rounds.failures import (
    SIGKILL,
    Ending,
    cause_first,
    code_for,
    code_of,
    is_alike,
)
from elasticrun.core.worker.leaving import Draining, ending, why_of
from elasticrun.core.worker.probing import LocalProbe
from elasticrun.core.worker.ranks import SIGTERM, LocalRanks, StoreSlot
from elasticrun.core.worker.states import (
    ENDINGS,
    GroupStatus,
    Rules,
    State,
    UnexpectedEvent,
    tabulate,
)
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName

SWEEP_GRACE = 5.0
"""Minimum time after SIGTERM for descendants with sessions of their own; wandb's helper needs up to
4.7 s to flush. Never more than the grace period of the ranks themselves."""


class WorkerGroup:
    """The local ranks of one node."""

    def __init__(
        self,
        *,
        nproc: int,
        restart_grace: float,
        shutdown_timeout: float,
        exit_barrier_timeout: float | None = None,
        master_lost_timeout: float = MASTER_LOST_TIMEOUT,
        departure_grace: float = DEPARTURE_GRACE,
        host: str = "",
    ) -> None:
        """All durations in seconds. `restart_grace`: from SIGTERM to SIGKILL if the ranks will
        restart; `shutdown_timeout`: the same if the agent ends. `exit_barrier_timeout`: how long a
        node whose ranks are done waits for the others (None: as long as the job runs).
        `master_lost_timeout` applies until a master sends its own. `departure_grace`: from a death
        signal until this node leaves, if its ranks can save a step first. `host` names this node in
        the failures created here."""
        self._restart_grace = restart_grace
        self._shutdown_timeout = shutdown_timeout
        self._exit_barrier = exit_barrier_timeout
        self.master_lost_timeout = master_lost_timeout
        """Seconds for which ranks keep running without a reachable master; the last master's
        value."""
        self.term = 0
        """Term of the last master that was obeyed, for Hello; 0 if there was none."""

        self.state = State.PREPARING
        self.reason: Reason | None = None  # why this node waits
        self.start: m.Start | None = None
        """The last place it received, for Hello; its state follows on LinkBack."""
        self.outcome: fx.Exit | None = None  # how the agent will exit, once known
        self.ranks = LocalRanks(nproc, host)
        self.stores = StoreSlot()
        self.leaving = Draining(self, departure_grace)
        self.probing = LocalProbe(self)
        self.deadlines: Deadlines[str] = Deadlines()
        self.out: list[fx.AgentEffect] = []
        self._table = tabulate(self.rules())
        self._kinds = {kind for _, kind in self._table}
        self._begun = False
        self._obeying = True
        self._link_lost: NoMaster | None = None
        self._wait_ends: float | None = None  # when the wait that the master ordered ends

    @property
    def obeys(self) -> bool:
        """Whether the connected master is at least as recent as any earlier one."""
        return self._obeying

    def is_changed_by(self, order: m.Order) -> bool:
        """Whether this order has a rule here. The runtime passes any other to the component that
        carries it out, as long as this node obeys its master."""
        return type(order) in self._kinds

    def next_deadline(self) -> float | None:
        """When `step(Tick(), now)` is due at the latest; 0.0 (long past) before the first step."""
        return self.deadlines.next() if self._begun else 0.0

    def status(self) -> GroupStatus:
        """The state of this node."""
        ends = self.deadlines.when("departing" if self.state is State.RUNNING else "kill")
        why = self._link_lost or self.reason
        return GroupStatus(
            state=self.state,
            reason=text(why),
            round=self.start.round if self.start else None,
            pids=tuple(pid for _, pid in sorted(self.ranks.live.items()) if pid),
            restart_count=self.start.info.restart_count if self.start else 0,
            offered_store=self.stores.offer,
            master_lost=text(self._link_lost),
            wait_ends=self._wait_ends if self.state is State.JOINED else ends,
            why=why,
        )

    def step(self, event: fx.AgentEvent, now: float) -> list[fx.AgentEffect]:
        """Process one event at monotonic time `now`; return the effects in order."""
        self.out = []
        if not self._begun:
            self._begun = True
            self.out += self.stores.prepare()
        if isinstance(event, fx.Tick):
            self._due(now)
            return self.out
        what = event.order if isinstance(event, fx.Ordered) else event
        if isinstance(event, fx.Ordered) and not self._obeying and not isinstance(what, m.Welcome):
            return self.out
        method = self._table.get((self.state, type(what)))
        if method is None:
            raise UnexpectedEvent(self.state, type(what).__name__)
        method(what, now)
        return self.out

    def _due(self, now: float) -> None:
        for key in self.deadlines.pop_due(now):
            if self.state is State.OVER:
                return
            match key:
                case "kill":
                    self.signal(SIGKILL)
                    self.deadlines.arm("stuck", now + STUCK_AFTER)
                case "stuck":
                    left = ", ".join(map(str, self.ranks.live.values())) or "descendants of ranks"
                    self._give_up(code_of(Ending.STUCK), reasons.Stuck(left, STUCK_AFTER))
                case "exit-barrier":
                    self.say(m.Leaving("its ranks are done and its exit barrier is over", 0))
                    self.exit(ending(EXIT_OK, reasons.RanksDone(waits=False)))
                case "spawn" if self.state is State.STARTING:
                    self._give_up(EXIT_FAILED, reasons.SpawnLate(SPAWN_TIMEOUT))
                case "master-lost":
                    self._master_lost(now)
                case "departing":
                    self.leaving.due(now)
                case "holding":
                    self.leaving.held_long_enough()

    # ------------------------------------------------------------ stores

    def _store_ready(self, event: fx.StoreReady, now: float) -> None:
        self.out += self.stores.ready(event.store)
        if self.state is State.PREPARING:
            self._rejoin()
        elif self.state is State.PROBING:
            self._offer()

    def _store_lost(self, event: fx.StoreLost, now: float) -> None:
        if event.store == self.stores.hosted:
            self.stores.hosted = None
            self.note(f"the store at {event.store} ended while its round runs", "warning")
        elif event.store == self.stores.offer:
            if self.stores.lost_offer():
                self.conclude(ending(EXIT_FAILED, reasons.StoresEnd()), now)
                return
            if self.state is State.JOINED:
                self.state = State.PREPARING
            self.out += self.stores.prepare()

    def _rejoin(self) -> None:
        """No rank is alive here: join as soon as there is a store to offer."""
        self.state = State.PREPARING
        if self.stores.offer is None:
            self.reason = reasons.StoreComing()
            self.out += self.stores.prepare()
        else:
            self.state = State.JOINED
            self._offer()

    def _offer(self) -> None:
        """Report that this node is ready, with the store it offers; no-op without one."""
        if self.stores.offer is not None:
            self.say(m.Join(self.stores.offer))

    # ------------------------------------------------------------ the master and the link

    def _welcome(self, order: m.Welcome, now: float) -> None:
        if order.term < self.term:
            self._obeying = False
            reason = text(reasons.OlderMaster(order.term, self.term))
            self.note(f"{reason}: it is not obeyed", "warning")
            self._link_gone(fx.LinkLost(reason), now)
            return
        is_new = 0 < self.term < order.term
        self.term = order.term
        self._obeying = True
        self.leaving.master_answers(now, is_new=is_new)
        if self._link_lost:
            self.note("the master answers again", "warning")
        self._link_lost = None
        self.deadlines.disarm("master-lost")
        self.master_lost_timeout = order.master_lost_timeout

    def _wait(self, order: m.Wait, now: float) -> None:
        self._wait_ends = now + order.left if order.left else None
        if order.reason != text(self.reason):
            self.note(order.reason)
        self.reason = read(order.reason, order.code)

    def _link_gone(self, event: fx.LinkLost, now: float) -> None:
        # a node that is ending for its own reason no longer needs a master
        lost = NoMaster(event.reason)
        if not self._link_lost and self.state not in ENDINGS:
            goes_on = f"this node goes on for {self.master_lost_timeout:g} s"
            self.note(f"no master answers ({event.reason}); {goes_on}", "warning", lost)
            self.deadlines.arm("master-lost", now + self.master_lost_timeout)
        self._link_lost = lost
        self.leaving.master_lost(now)

    def _link_back(self, event: fx.LinkBack, now: float) -> None:
        """Send everything that a master may have missed. Whether the connection lasts shows in its
        Welcome."""
        if self.state in ENDINGS and self.outcome is not None:
            self.say(m.Leaving(self.outcome.reason, self.outcome.signum))
        self._say_failures()
        match self.state:
            case State.RUNNING:
                self._say_running()
                self.leaving.say_departing()
            case State.STOPPING | State.SWEEPING | State.ENDING | State.CLEARING:
                self._say_stopping(now)
            case State.FINISHED:
                self.report(m.Finished)
            case State.PREPARING | State.JOINED | State.PROBING:
                self.report(m.Stopped)
                if self.state is not State.PREPARING:
                    self._offer()
                if self.probing.answer is not None:
                    self.say(self.probing.answer)

    def _master_lost(self, now: float) -> None:
        waited = reasons.NoMasterFor(self.master_lost_timeout)
        if self.state is State.FINISHED:
            self.conclude(ending(EXIT_OK, replace(waited, done=True)), now)
        else:
            failures = cause_first(self.failures())
            outcome = ending(code_for(failures, Ending.NO_MASTER), waited, failures)
            # the master relies on this grace period: it is part of the fence (rounds/rendezvous)
            self.conclude(outcome, now, grace=self._restart_grace)

    # ------------------------------------------------------------ rounds

    def is_present(self, round_: RoundName) -> bool:
        """Whether this is the last round in which this node received a place."""
        return self.start is not None and round_ == self.start.round

    def _is_newer(self, order: m.Start) -> bool:
        """Whether it begins a later round than the current one."""
        if self.start is None:
            return True
        now = self.start.round
        return (order.round.term, order.round.number) > (now.term, now.number)

    def _started(self, order: m.Start, now: float) -> None:
        """JOINED, PREPARING or PROBING: take the place that the master assigns."""
        if not self._is_newer(order):
            return  # an order that crossed our Stopped
        self.probing.call_off()
        self.probing.answer = None
        self.out += self.stores.release()
        self.start = order
        self.ranks.failures.clear()
        if order.host_store and order.store != self.stores.offer:
            self.note(f"round {order.round} was to use a store that has ended", "warning")
            self.say(m.Stopped(order.round))
            self._rejoin()
            return
        self.stores.use(host=order.host_store)
        self.ranks.begin(order.first_rank)
        self.leaving.new_round()
        self.reason = None
        self.state = State.STARTING
        self.deadlines.arm("spawn", now + SPAWN_TIMEOUT)
        self.out.append(fx.SpawnRanks(order, attempt=order.round.number - 1))
        self.out += self.stores.prepare()

    def _restarted(self, order: m.Start, now: float) -> None:
        """A Start while ranks of a round are alive here: the same one again, or one that must
        wait."""
        if self.start is not None and self._is_newer(order):
            begun = said(reasons.OtherRound(str(order.round), begun=True))
            self._stop(m.Stop(self.start.round, *begun), now)

    def _stop(self, order: m.Stop, now: float) -> None:
        """STARTING, RUNNING or FINISHED: stop the ranks of this round, then join the next."""
        if not self.is_present(order.round):
            return
        if self.leaving.cause is not None:
            self.leaving.leave_unsaved(self.leaving.cause, now)
            return
        self.reason = read(order.reason, order.code)
        if self.state is State.FINISHED:
            self.deadlines.disarm("exit-barrier")
            self._sweep(State.SWEEPING, now)
        else:
            self.note(f"stopping the ranks: {order.reason}")
            self._begin_stop(State.STOPPING, SIGTERM, self._restart_grace, now)

    def _spawned(self, event: fx.RankSpawned, now: float) -> None:
        """STARTING."""
        self.ranks.spawned(event.local_rank, event.pid)
        if len(self.ranks.pids) == self.ranks.nproc:
            self.state = State.RUNNING
            self.deadlines.disarm("spawn")
            self._say_running()

    def _spawned_late(self, event: fx.RankSpawned, now: float) -> None:
        """STOPPING or ENDING: the rank was requested before the order to stop arrived."""
        self.ranks.spawned(event.local_rank, event.pid)
        if event.local_rank in self.ranks.live:
            signum = SIGKILL if "stuck" in self.deadlines else SIGTERM
            self.ranks.targets(signum)
            self.out.append(fx.SignalRanks((event.local_rank,), signum))

    def _exited(self, event: fx.RankExited, now: float) -> None:
        """STARTING or RUNNING."""
        self.ranks.live.pop(event.local_rank, None)
        if self.leaving.cause is not None:
            self.leaving.exited(event, self.leaving.cause, now)
            return
        if event.code == 0 and event.failure is None:
            if not self.ranks.live:
                self.finish(now)
            return
        self.failed(event.local_rank, self.ranks.failed(event, now))
        self.reason = reasons.FailedHere()
        self._begin_stop(State.STOPPING, SIGTERM, self._restart_grace, now)

    def _exited_stopping(self, event: fx.RankExited, now: float) -> None:
        """STOPPING or ENDING: exits with 0 are no success, deaths by our signals no failure."""
        self.ranks.live.pop(event.local_rank, None)
        if event.code != 0 or event.failure is not None:
            failure = self.ranks.failed(event, now)
            # a rank that failed by itself before our signal has left its traceback
            if failure.kind is not m.FailureKind.STOPPED or failure.traceback:
                self.failed(event.local_rank, failure)
        if not self.ranks.live:
            ending = self.state is State.ENDING
            self._sweep(State.CLEARING if ending else State.SWEEPING, now)

    def failed(self, local_rank: int, failure: m.Failure) -> None:
        """Record a rank's failure, and report all failures to the master."""
        self.ranks.failures[local_rank] = failure
        self._say_failures()

    def finish(self, now: float) -> None:
        self.state = State.FINISHED
        self.reason = reasons.RanksDone(waits=True)
        self.out.append(fx.RanksGone(done=True))
        self.report(m.Finished)
        if self._exit_barrier is not None:
            self.deadlines.arm("exit-barrier", now + self._exit_barrier)

    def _spawner_lost(self, event: fx.SpawnerLost, now: float) -> None:
        """The spawner's ranks and stores died with it, and all their descendants."""
        self.note(f"the fork server ended: {event.reason}", "error")
        self.stores.lose_spawner()
        self.deadlines.disarm("kill")
        self.deadlines.disarm("stuck")
        if self.state is State.FINISHED:
            self.out += self.stores.prepare()
        elif self.state in _CALM:
            if self.state is State.PROBING:
                self.probing.lost(event.reason)
            self._rejoin()
        else:
            if self.ranks.lose_spawner(event):
                self._say_failures()
            if self.leaving.cause is not None:
                self.leaving.leave_unsaved(self.leaving.cause, now)
                return
            self.out.append(fx.RanksGone())
            self.report(m.Stopped)
            self._after_sweep()

    # ------------------------------------------------------------ stopping ranks, ending the agent

    def _begin_stop(self, state: State, signum: int, grace: float, now: float) -> None:
        """Signal the ranks that are alive and report how long they have; sweep if there are
        none."""
        if self.state in _LIVE:
            self.out.append(fx.RanksStopping())
        self.state = state
        if not self.ranks.live:
            self._sweep(State.CLEARING if state is State.ENDING else State.SWEEPING, now)
            return
        self.signal(signum)
        if "kill" not in self.deadlines and "stuck" not in self.deadlines:
            self.deadlines.arm("kill", now + grace)
        self._say_stopping(now)

    def _sweep(self, state: State, now: float) -> None:
        """Every rank has exited: end leftover processes, within the rest of the grace period."""
        self.state = state
        base = self._restart_grace if state is State.SWEEPING else self._shutdown_timeout
        kill = self.deadlines.when("kill")
        rest = base if kill is None else kill - now
        if "stuck" in self.deadlines:  # they were killed
            rest = 0.0
        grace = max(rest, min(SWEEP_GRACE, base))
        self.deadlines.disarm("kill")
        self.deadlines.arm("stuck", now + grace + STUCK_AFTER)
        self.out.append(fx.SweepRanks(grace))
        # the master waits a little longer than the reported time (SURVIVOR_SLACK of
        # rounds/rendezvous), so a sweep is reported only if that is not enough
        if grace > rest + 1.0:
            self.report(m.Stopping, grace)

    def _swept(self, event: fx.RanksSwept, now: float) -> None:
        """SWEEPING or CLEARING."""
        self.deadlines.disarm("stuck")
        if event.stuck:
            pids = ", ".join(map(str, event.stuck))
            self._give_up(code_of(Ending.STUCK), reasons.Stuck(pids))
            return
        self.out.append(fx.RanksGone())
        self.report(m.Stopped)
        self._after_sweep()

    def _after_sweep(self) -> None:
        if self.outcome is not None:
            self.exit(self.outcome)
        else:
            self._rejoin()

    def _end(self, order: m.End, now: float) -> None:
        if order.exit_code == code_of(Ending.SAVED):
            self.leaving.ends_as_saved(order.saved)
        if order.goodput:
            self.note(order.goodput, "notice")
        end = (read(order.reason, order.code), order.failures, order.saved)
        self.conclude(ending(order.exit_code, *end), now)

    def _refused(self, order: m.Refused, now: float) -> None:
        self.conclude(ending(order.exit_code, read(order.reason, order.code)), now)

    def conclude(
        self, outcome: fx.Exit, now: float, signum: int = SIGTERM, grace: float | None = None
    ) -> None:
        """End the agent with `outcome` once no rank is alive here; the first outcome counts."""
        if self.state in ENDINGS:
            return
        self.probing.call_off()
        self.leaving.cause = None
        self.deadlines.disarm("departing")
        self.deadlines.disarm("exit-barrier")  # it must not end a node that is HOLDING
        self.outcome = outcome
        self.reason = why_of(outcome)
        if self.state is State.SWEEPING:
            self.state = State.CLEARING
        elif self.ranks.live or self.state is State.RUNNING:
            grace = self._shutdown_timeout if grace is None else grace
            self._begin_stop(State.ENDING, signum, grace, now)
        else:
            self.exit(outcome)

    def exit(self, outcome: fx.Exit) -> None:
        """End the agent; no rank is alive here any more. It stays while snapshots of this node are
        being written, because there may be no other copy of them."""
        if not self.leaving.writes:
            self.over(outcome)
            return
        self.state = State.HOLDING
        self.outcome = outcome
        self.deadlines.clear()
        self.leaving.hold()
        self.reason = reasons.Then(why_of(outcome), reasons.HoldsCheckpoint())
        self.note(text(self.reason))

    def over(self, outcome: fx.Exit) -> None:
        """Nothing is left to wait for: the agent exits."""
        self.deadlines.clear()
        self.state = State.OVER
        self.out.append(self._with_own(outcome))

    def _with_own(self, outcome: fx.Exit) -> fx.Exit:
        """Add ranks of this node that failed in the same way as the first failure, but which the
        master had not heard of when it ended the job."""
        told = outcome.failures
        known = {failure.rank for failure in told}
        own = [f for f in self.failures() if f.rank not in known and told and is_alike(f, told[0])]
        return replace(outcome, failures=(*told, *own)) if own else outcome

    def _give_up(self, code: int, why: Reason) -> None:
        """End at once, even if processes are alive here: nothing more can be done about it."""
        self.say(m.Leaving(text(why), 0))
        self.over(ending(code, why, cause_first(self.failures())))

    # ------------------------------------------------------------ reports and notes

    def failures(self) -> tuple[m.Failure, ...]:
        """Failures of the local ranks, in the order in which they were reaped."""
        return tuple(self.ranks.failures.values())

    def say(self, report: m.Report) -> None:
        self.out.append(fx.Say(report))

    def report(self, kind: Callable[..., m.Report], *values: object) -> None:
        """Send a report about the last round in which this node had a place, if there was one."""
        if self.start is not None:
            self.say(kind(self.start.round, *values))

    def _say_running(self) -> None:
        self.report(m.Running, tuple(pid for _, pid in sorted(self.ranks.pids.items())))

    def _say_failures(self) -> None:
        if self.ranks.failures:
            self.report(m.RanksFailed, self.failures()[: m.MAX_FAILURES])

    def _say_stopping(self, now: float) -> None:
        kill, stuck = self.deadlines.when("kill"), self.deadlines.when("stuck")
        until = kill if kill is not None else stuck
        self.report(m.Stopping, max(0.0, (until or now) - now), self.ranks.ended)

    def note(self, said: str, level: str = "info", why: Reason | None = None) -> None:
        """Log a line for the operator. `why`: a reason that names an unreachable peer."""
        self.out.append(fx.Note(said, level, why=why))

    def signal(self, signum: int) -> None:
        if targets := self.ranks.targets(signum):
            self.out.append(fx.SignalRanks(targets, signum))

    def _ignore(self, what: object, now: float) -> None:
        """Ignore a known or outdated event."""

    # ------------------------------------------------------------ the table

    def rules(self) -> Rules:
        """Which event does what in which state."""
        leaving, probing = self.leaving, self.probing
        rules: Rules = (
            ((*_HERE, State.HOLDING), (fx.StoreReady,), self._store_ready),
            ((*_HERE, State.HOLDING), (fx.StoreLost,), self._store_lost),
            (_HERE, (fx.SpawnerLost,), self._spawner_lost),
            (_HERE, (fx.Signalled,), leaving.signalled),
            (_ALIVE, (fx.LinkLost,), self._link_gone),
            (_ALIVE, (fx.LinkBack,), self._link_back),
            (_ALIVE, (m.Welcome,), self._welcome),
            (_ALIVE, (m.End,), self._end),
            (_ALIVE, (m.Refused,), self._refused),
            (_HERE, (m.Wait,), self._wait),
            ((State.HOLDING,), (fx.SpawnerLost,), leaving.saver_lost),
            ((State.HOLDING,), (fx.Signalled,), leaving.signalled_holding),
            ((State.HOLDING,), (m.Wait, m.Start, m.Stop), self._ignore),
            (_ALIVE, (m.Persist,), leaving.persist),
            (_ALIVE, (m.PersistOver,), leaving.persist_over),
            (_ALIVE, (m.SaveAt,), leaving.save_at),
            (_CALM, (m.Start,), self._started),
            (_CALM, (m.Stop,), self._ignore),
            (_LIVE, (m.Start,), self._restarted),
            ((*_LIVE, State.FINISHED), (m.Stop,), self._stop),
            ((State.STARTING,), (fx.RankSpawned,), self._spawned),
            (_LIVE, (fx.RankExited,), self._exited),
            (_DYING, (fx.RankSpawned,), self._spawned_late),
            (_DYING, (fx.RankExited,), self._exited_stopping),
            (_DYING + _SWEPT, (m.Start, m.Stop), self._ignore),
            ((State.FINISHED,), (m.Start,), self._ignore),
            (_SWEPT, (fx.RanksSwept,), self._swept),
            (_IDLE, (m.Probe,), probing.probe),
            ((State.PROBING,), (m.Probe,), probing.probe_newer),
            ((State.PROBING,), (fx.ProbeEnded,), probing.probe_ended),
            (_IDLE, (fx.ProbeEnded,), self._ignore),
            (_BUSY, (m.Probe, fx.ProbeEnded), self._ignore),
        )
        kinds = tuple(dict.fromkeys(kind for _, kinds, _ in rules for kind in kinds))
        return (*rules, ((State.OVER,), kinds, self._ignore))


_IDLE = (State.PREPARING, State.JOINED)
_CALM = (*_IDLE, State.PROBING)
_LIVE = (State.STARTING, State.RUNNING)
_DYING = (State.STOPPING, State.ENDING)
_SWEPT = (State.SWEEPING, State.CLEARING)
_HERE = tuple(state for state in State if state not in (State.HOLDING, State.OVER))
_ALIVE = (*_HERE, State.HOLDING)
_BUSY = tuple(state for state in _ALIVE if state not in _CALM)
