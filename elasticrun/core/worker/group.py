"""The agent's state machine: the lifecycle of the local ranks, as a table.

A node goes PREPARING -> JOINED -> STARTING -> RUNNING -> STOPPING -> SWEEPING and back to PREPARING
or JOINED; or to FINISHED. At the end it reaches OVER, through ENDING and CLEARING if ranks are
still alive. From PREPARING and JOINED it may go to PROBING and back. `rules` defines what each
event does in each state. An event that is not listed for a state cannot occur there, and raises.

Guarantees:
* No rank of a round is started before every process of the previous round is gone, and the master
  receives `Stopped` only then: this is the fence on which the next round relies.
* A rank that has left its round and keeps its process counts as gone (`recall`).
* Ranks always get SIGTERM first, and SIGKILL after their grace period. A rank that survives SIGKILL
  for STUCK_AFTER is reported, and the agent exits with EXIT_BAD_NODE.
* The store for the next round is requested as soon as the current one has begun, so no restart
  waits for it. At most one store is ready and unused.
* A fork server that does not start the ranks within SPAWN_TIMEOUT ends the agent.
* Without a reachable master the ranks keep running for at most `master_lost_timeout`. That bound is
  one half of a fence: a master that hears no node waits a little longer before it begins a new
  round.
* The agent does not exit while a snapshot of this node is being written (HOLDING), but at most for
  as long as the order allowed; another death signal ends it at once. Ranks get no extra time.
* Everything sent while the link was down is sent again when it is back (`LinkBack`): the round's
  failures, that it was stopped, that this node is ready. The master accepts duplicate reports.

Three components have their own state and rules: `leaving` (signals, and checkpoints that are being
written), `probing` and `recall` (ranks that keep their process). They share `context` with the
group and do not know the group: a method returns a wish (`states.GroupWish`), and `step` grants it.

The runtime must send one `Tick` at the start (a new group has a deadline in the past: it asks for
the first store), `RankExited` for every rank it was asked to start, including those that could not
be started (with a Failure of kind SPAWN), and `RanksSwept` for every `SweepRanks`.
"""

from __future__ import annotations

from typing import assert_never

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
from elasticrun.core.reasons import NoMaster, Reason, read, text, text_and_code
from elasticrun.core.rounds.failures import (
    SIGKILL,
    Ending,
    cause_first,
    code_for,
    code_of,
    is_alike,
)
from elasticrun.core.worker.context import GroupContext
from elasticrun.core.worker.leaving import Draining, ending, why_of
from elasticrun.core.worker.probing import LocalProbe
from elasticrun.core.worker.ranks import SIGTERM
from elasticrun.core.worker.recall import Recall
from elasticrun.core.worker.states import (
    ENDINGS,
    ExitNow,
    FinishRanks,
    GroupStatus,
    GroupWish,
    LeaveNode,
    Rules,
    State,
    StopRanks,
    SweepNow,
    UnexpectedEvent,
    tabulate,
)
from elasticrun.wire import messages as m

SWEEP_GRACE = 5.0
"""Minimum time after SIGTERM for descendants with sessions of their own; wandb's helper needs up to
4.7 s to flush. Never more than the grace period of the ranks themselves."""


class WorkerGroup:
    """The state machine of the local ranks of one node."""

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
        """All durations are in seconds. `restart_grace`: from SIGTERM to SIGKILL if the ranks will
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

        self._ctx = ctx = GroupContext(nproc, host)
        self._leaving = Draining(ctx, departure_grace)
        self._probing = LocalProbe(ctx)
        self._recall = Recall(ctx)
        self._table = tabulate(self.rules())
        self._kinds = {kind for _, kind in self._table}
        self._has_begun = False
        self._obeying = True
        self._link_lost: NoMaster | None = None  # set while no master is reachable
        self._wait_ends: float | None = None  # when the wait that the master ordered ends

    @property
    def start(self) -> m.Start | None:
        """The last place that this node received, for Hello; its state follows on LinkBack."""
        return self._ctx.start

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
        return self._ctx.deadlines.next() if self._has_begun else 0.0

    def status(self) -> GroupStatus:
        """The status of this node."""
        ctx = self._ctx
        ends = ctx.deadlines.when("departing" if ctx.state is State.RUNNING else "kill")
        why = self._link_lost or ctx.reason
        return GroupStatus(
            state=ctx.state,
            reason=text(why),
            round=ctx.start.round if ctx.start else None,
            pids=tuple(pid for _, pid in sorted(ctx.ranks.live.items()) if pid),
            restart_count=ctx.start.info.restart_count if ctx.start else 0,
            offered_store=ctx.stores.offer,
            master_lost=text(self._link_lost),
            wait_ends=self._wait_ends if ctx.state is State.JOINED else ends,
            why=why,
        )

    def step(self, event: fx.AgentEvent, now: float) -> list[fx.AgentEffect]:
        """Process one event at monotonic time `now`; return the effects in order."""
        ctx = self._ctx
        ctx.out = []
        if not self._has_begun:
            self._has_begun = True
            ctx.out += ctx.stores.prepare()
        if isinstance(event, fx.Tick):
            self._due(now)
            return ctx.out
        what = event.order if isinstance(event, fx.Ordered) else event
        if isinstance(event, fx.Ordered) and not self._obeying and not isinstance(what, m.Welcome):
            return ctx.out
        method = self._table.get((ctx.state, type(what)))
        if method is None:
            raise UnexpectedEvent(ctx.state, type(what).__name__)
        self._grant(method(what, now), now)
        return ctx.out

    def _grant(self, wish: GroupWish | None, now: float) -> None:
        """Grant the wish of a component, if there is one."""
        match wish:
            case LeaveNode():
                self._conclude(wish.outcome, now, wish.signum)
            case FinishRanks():
                self._finish(now)
            case StopRanks():
                self._stop_others(now)
            case SweepNow():
                self._sweep(State.SWEEPING, now)
            case ExitNow():
                assert self._ctx.outcome is not None
                self._over(self._ctx.outcome)
            case None:
                pass
            case _:
                assert_never(wish)

    def _due(self, now: float) -> None:
        ctx = self._ctx
        for key in ctx.deadlines.pop_due(now):
            if ctx.state is State.OVER:
                return
            match key:
                case "kill":
                    ctx.signal(SIGKILL)
                    ctx.deadlines.arm("stuck", now + STUCK_AFTER)
                case "stuck":
                    left = ", ".join(map(str, ctx.ranks.live.values())) or "descendants of ranks"
                    self._give_up(code_of(Ending.STUCK), reasons.Stuck(left, STUCK_AFTER))
                case "recall":
                    self._recall.expired()
                case "exit-barrier":
                    ctx.send(m.Leaving("its ranks are done and its exit barrier is over", 0))
                    self._exit(ending(EXIT_OK, reasons.RanksDone(waits=False)))
                case "spawn" if ctx.state is State.STARTING:
                    self._give_up(EXIT_FAILED, reasons.SpawnLate(SPAWN_TIMEOUT))
                case "master-lost":
                    self._master_lost(now)
                case "departing":
                    self._grant(self._leaving.due(now), now)
                case "holding":
                    self._grant(self._leaving.held_long_enough(), now)

    # ------------------------------------------------------------ stores

    def _store_ready(self, event: fx.StoreReady, now: float) -> None:
        ctx = self._ctx
        ctx.out += ctx.stores.ready(event.store)
        if ctx.state is State.PREPARING:
            self._rejoin()
        elif ctx.state is State.PROBING:
            self._offer()

    def _store_lost(self, event: fx.StoreLost, now: float) -> None:
        ctx = self._ctx
        if event.store == ctx.stores.hosted:
            ctx.stores.hosted = None
            ctx.note(f"the store at {event.store} ended while its round runs", "warning")
        elif event.store == ctx.stores.offer:
            if ctx.stores.lost_offer():
                self._conclude(ending(EXIT_FAILED, reasons.StoresEnd()), now)
                return
            if ctx.state is State.JOINED:
                ctx.state = State.PREPARING
            ctx.out += ctx.stores.prepare()

    def _rejoin(self) -> None:
        """No rank is alive here: join as soon as there is a store to offer."""
        ctx = self._ctx
        ctx.state = State.PREPARING
        if ctx.stores.offer is None:
            ctx.reason = reasons.StoreComing()
            ctx.out += ctx.stores.prepare()
        else:
            ctx.state = State.JOINED
            self._offer()

    def _offer(self) -> None:
        """Report that this node is ready, with the store it offers; no-op without one."""
        ctx = self._ctx
        if ctx.stores.offer is not None:
            ctx.send(m.Join(ctx.stores.offer))

    # ------------------------------------------------------------ the master and the link

    def _welcome(self, order: m.Welcome, now: float) -> None:
        ctx = self._ctx
        if order.term < self.term:
            self._obeying = False
            reason = text(reasons.OlderMaster(order.term, self.term))
            ctx.note(f"{reason}: its orders are ignored", "warning")
            self._link_gone(fx.LinkLost(reason), now)
            return
        is_new = 0 < self.term < order.term
        self.term = order.term
        self._obeying = True
        self._leaving.master_answers(now, is_new=is_new)
        if self._link_lost:
            ctx.note("the master answers again", "warning")
        self._link_lost = None
        ctx.deadlines.disarm("master-lost")
        self.master_lost_timeout = order.master_lost_timeout

    def _wait(self, order: m.Wait, now: float) -> None:
        ctx = self._ctx
        self._wait_ends = now + order.left if order.left else None
        if order.reason != text(ctx.reason):
            ctx.note(order.reason)
        ctx.reason = read(order.reason, order.code)

    def _link_gone(self, event: fx.LinkLost, now: float) -> None:
        ctx = self._ctx
        # a node that is ending for its own reason no longer needs a master
        lost = NoMaster(event.reason)
        if not self._link_lost and ctx.state not in ENDINGS:
            how_long = f"this node goes on for {self.master_lost_timeout:g} s"
            ctx.note(f"no master answers ({event.reason}); {how_long}", "warning", lost)
            ctx.deadlines.arm("master-lost", now + self.master_lost_timeout)
        self._link_lost = lost
        self._leaving.master_lost(now)

    def _link_back(self, event: fx.LinkBack, now: float) -> None:
        """Send everything that a master may have missed. Whether the connection lasts shows in its
        Welcome."""
        ctx = self._ctx
        if ctx.state in ENDINGS and ctx.outcome is not None:
            ctx.send(m.Leaving(ctx.outcome.reason, ctx.outcome.signum))
        ctx.report_failures()
        match ctx.state:
            case State.RUNNING:
                self._report_running()
                self._leaving.report_departure()
            case State.STOPPING | State.SWEEPING | State.ENDING | State.CLEARING:
                self._report_stopping(now)
            case State.FINISHED:
                ctx.report(m.Finished)
            case State.PREPARING | State.JOINED | State.PROBING:
                ctx.report(m.Stopped)
                if ctx.state is not State.PREPARING:
                    self._offer()
                if self._probing.answer is not None:
                    ctx.send(self._probing.answer)

    def _master_lost(self, now: float) -> None:
        waited = reasons.NoMasterFor(self.master_lost_timeout)
        if self._ctx.state is State.FINISHED:
            self._conclude(ending(EXIT_OK, replace(waited, done=True)), now)
        else:
            failures = cause_first(self._ctx.failures())
            outcome = ending(code_for(failures, Ending.NO_MASTER), waited, failures)
            # the master relies on this grace period: it is part of the fence (rounds/rendezvous)
            self._conclude(outcome, now, grace=self._restart_grace)

    # ------------------------------------------------------------ rounds

    def _is_newer(self, order: m.Start) -> bool:
        """Whether the order begins a later round than the current one."""
        if self._ctx.start is None:
            return True
        now = self._ctx.start.round
        return (order.round.term, order.round.number) > (now.term, now.number)

    def _started(self, order: m.Start, now: float) -> None:
        """JOINED, PREPARING or PROBING: take the place that the master assigns."""
        ctx = self._ctx
        if not self._is_newer(order):
            return  # an order that crossed our Stopped
        self._probing.call_off()
        self._probing.answer = None
        ctx.out += ctx.stores.release()
        ctx.start = order
        ctx.ranks.failures.clear()
        if order.host_store and order.store != ctx.stores.offer:
            ctx.note(f"round {order.round} was to use a store that has ended", "warning")
            ctx.send(m.Stopped(order.round))
            self._rejoin()
            return
        ctx.stores.use(host=order.host_store)
        kept = tuple(sorted(ctx.ranks.kept))
        ctx.ranks.new_round(order.first_rank)
        self._leaving.new_round()
        ctx.reason = None
        ctx.state = State.STARTING
        ctx.deadlines.arm("spawn", now + SPAWN_TIMEOUT)
        ctx.out.append(fx.SpawnRanks(order, order.round.number - 1, kept))
        if kept:
            many = "1 rank continues" if len(kept) == 1 else f"{len(kept)} ranks continue"
            ctx.note(f"{many} in the same process")
        ctx.out += ctx.stores.prepare()

    def _restarted(self, order: m.Start, now: float) -> None:
        """STARTING or RUNNING: a Start while ranks are alive here. If it is for a later round, stop
        these first; a repetition is ignored."""
        if self._ctx.start is not None and self._is_newer(order):
            newer = text_and_code(reasons.OtherRound(str(order.round), begun=True))
            self._stop(m.Stop(self._ctx.start.round, *newer), now)

    def _stop(self, order: m.Stop, now: float) -> None:
        """STARTING, RUNNING or FINISHED: stop the ranks of this round, then join the next."""
        ctx = self._ctx
        if not ctx.is_current_round(order.round):
            return
        if self._leaving.cause is not None:
            self._grant(self._leaving.leave_unsaved(self._leaving.cause, now), now)
            return
        ctx.reason = read(order.reason, order.code)
        if ctx.state is State.FINISHED:
            ctx.deadlines.disarm("exit-barrier")
            self._sweep(State.SWEEPING, now)
        else:
            ctx.note(f"stopping the ranks: {order.reason}")
            self._begin_stop(State.STOPPING, SIGTERM, self._restart_grace, now)

    def _spawned(self, event: fx.RankSpawned, now: float) -> None:
        """STARTING: a rank was spawned. With the last one, the state becomes RUNNING."""
        ctx = self._ctx
        ctx.ranks.spawned(event.local_rank, event.pid)
        if len(ctx.ranks.pids) == ctx.ranks.nproc:
            ctx.state = State.RUNNING
            ctx.deadlines.disarm("spawn")
            self._report_running()

    def _spawned_late(self, event: fx.RankSpawned, now: float) -> None:
        """STOPPING or ENDING: signal a rank that was ordered before the order to stop arrived."""
        ctx = self._ctx
        ctx.ranks.spawned(event.local_rank, event.pid)
        if event.local_rank in ctx.ranks.live and event.local_rank not in ctx.ranks.recalled:
            signum = SIGKILL if "stuck" in ctx.deadlines else SIGTERM
            ctx.ranks.record_signal(signum)
            ctx.out.append(fx.SignalRanks((event.local_rank,), signum))

    def _exited(self, event: fx.RankExited, now: float) -> None:
        """STARTING or RUNNING: a rank has exited. Stop the others if it failed."""
        ctx = self._ctx
        ctx.ranks.live.pop(event.local_rank, None)
        if self._leaving.cause is not None:
            self._grant(self._leaving.exited(event, self._leaving.cause, now), now)
            return
        if event.code == 0 and event.failure is None:
            if not ctx.ranks.live:
                self._finish(now)
            return
        ctx.failed(event.local_rank, ctx.ranks.failed(event, now))
        self._stop_others(now)

    def _raised(self, event: fx.RankRaised, now: float) -> GroupWish | None:
        """STARTING or RUNNING: an exception has left the recoverable function of a rank."""
        if self._leaving.cause is None:
            return self._recall.raised(event, now)
        self._recall.let_fail(event.local_rank)
        return None

    def _stop_others(self, now: float) -> None:
        """A local rank has failed: stop the others."""
        self._ctx.reason = reasons.FailedHere()
        self._begin_stop(State.STOPPING, SIGTERM, self._restart_grace, now)

    def _exited_stopping(self, event: fx.RankExited, now: float) -> None:
        """STOPPING or ENDING: an exit with 0 is no success, a death by our signals no failure."""
        ctx = self._ctx
        if ctx.ranks.kept.pop(event.local_rank, None) is not None:
            return
        ctx.ranks.live.pop(event.local_rank, None)
        ctx.ranks.recalled.discard(event.local_rank)
        self._recall.settle()
        if event.code != 0 or event.failure is not None:
            failure = ctx.ranks.failed(event, now)
            # a rank that failed by itself before our signal has left its traceback
            if failure.kind is not m.FailureKind.STOPPED or failure.traceback:
                ctx.failed(event.local_rank, failure)
        if not ctx.ranks.live:
            ending = ctx.state is State.ENDING
            self._sweep(State.CLEARING if ending else State.SWEEPING, now)

    def _finish(self, now: float) -> None:
        ctx = self._ctx
        ctx.state = State.FINISHED
        ctx.reason = reasons.RanksDone(waits=True)
        ctx.out.append(fx.RanksGone(done=True))
        ctx.report(m.Finished)
        if self._exit_barrier is not None:
            ctx.deadlines.arm("exit-barrier", now + self._exit_barrier)

    def _spawner_lost(self, event: fx.SpawnerLost, now: float) -> None:
        """The spawner has died, with its ranks and stores and all their descendants."""
        ctx = self._ctx
        ctx.note(f"the fork server ended: {event.reason}", "error")
        ctx.stores.lose_spawner()
        ctx.ranks.kept.clear()
        ctx.deadlines.disarm("kill")
        ctx.deadlines.disarm("recall")
        ctx.deadlines.disarm("stuck")
        if ctx.state is State.FINISHED:
            ctx.out += ctx.stores.prepare()
        elif ctx.state in _CALM:
            if ctx.state is State.PROBING:
                self._probing.lost(event.reason)
            self._rejoin()
        else:
            if ctx.ranks.lose_spawner(event):
                ctx.report_failures()
            if self._leaving.cause is not None:
                self._grant(self._leaving.leave_unsaved(self._leaving.cause, now), now)
                return
            ctx.out.append(fx.RanksGone())
            ctx.report(m.Stopped)
            self._after_sweep(now)

    # ------------------------------------------------------------ stopping ranks, ending the agent

    def _begin_stop(self, state: State, signum: int, grace: float, now: float) -> None:
        """Signal the ranks that are alive, and report how long they have; sweep if there are
        none."""
        ctx = self._ctx
        if ctx.state in _LIVE:
            ctx.out.append(fx.RanksStopping())
        ctx.state = state
        if not ctx.ranks.live:
            self._sweep(State.CLEARING if state is State.ENDING else State.SWEEPING, now)
            return
        if state is State.STOPPING:
            until = now + self._recall.begin(grace, self.master_lost_timeout, now)
        else:
            until = now + grace
            self._recall.cancel(grace, now)
        ctx.signal(signum)
        if "kill" not in ctx.deadlines and "stuck" not in ctx.deadlines:
            ctx.deadlines.arm("kill", until)
        self._report_stopping(now)

    def _sweep(self, state: State, now: float) -> None:
        """Every rank has exited: end leftover processes, within the rest of the grace period."""
        ctx = self._ctx
        ctx.state = state
        base = self._restart_grace if state is State.SWEEPING else self._shutdown_timeout
        kill = ctx.deadlines.when("kill")
        rest = base if kill is None else kill - now
        if "stuck" in ctx.deadlines:  # they were killed
            rest = 0.0
        grace = max(rest, min(SWEEP_GRACE, base))
        ctx.deadlines.disarm("kill")
        ctx.deadlines.disarm("recall")
        ctx.deadlines.arm("stuck", now + grace + STUCK_AFTER)
        ctx.out.append(fx.SweepRanks(grace))
        # the master waits a little longer than the reported time (SURVIVOR_SLACK of
        # rounds/rendezvous), so a sweep is reported only if that is not enough
        if grace > rest + 1.0:
            ctx.report(m.Stopping, grace)

    def _swept(self, event: fx.RanksSwept, now: float) -> None:
        """SWEEPING or CLEARING: no process of the ranks is left, except stuck ones."""
        ctx = self._ctx
        ctx.deadlines.disarm("stuck")
        if event.stuck:
            pids = ", ".join(map(str, event.stuck))
            self._give_up(code_of(Ending.STUCK), reasons.Stuck(pids))
            return
        ctx.out.append(fx.RanksGone())
        ctx.report(m.Stopped)
        self._after_sweep(now)

    def _after_sweep(self, now: float) -> None:
        outcome = self._ctx.outcome
        if outcome is None:
            self._rejoin()
        elif self._ctx.ranks.kept:
            self._end_ranks(outcome.signum or SIGTERM, self._shutdown_timeout, now)
        else:
            self._exit(outcome)

    def _end_ranks(self, signum: int, grace: float, now: float) -> None:
        """The node ends: stop every rank, kept ones too."""
        self._ctx.ranks.count_kept_as_live()
        self._begin_stop(State.ENDING, signum, grace, now)

    def _job_ended(self, order: m.End, now: float) -> None:
        if order.exit_code == code_of(Ending.SAVED):
            self._leaving.mark_outcome_saved(order.saved)
        if order.goodput:
            self._ctx.note(order.goodput, "notice")
        end = (read(order.reason, order.code), order.failures, order.saved)
        self._conclude(ending(order.exit_code, *end), now)

    def _refused(self, order: m.Refused, now: float) -> None:
        self._conclude(ending(order.exit_code, read(order.reason, order.code)), now)

    def _conclude(
        self, outcome: fx.Exit, now: float, signum: int = SIGTERM, grace: float | None = None
    ) -> None:
        """End the agent with `outcome` once no rank is alive here; the first outcome counts."""
        ctx = self._ctx
        if ctx.state in ENDINGS:
            return
        self._probing.call_off()
        self._leaving.cause = None
        ctx.deadlines.disarm("departing")
        ctx.deadlines.disarm("exit-barrier")  # it must not end a node that is HOLDING
        ctx.outcome = outcome
        ctx.reason = why_of(outcome)
        if ctx.state is State.SWEEPING:
            ctx.state = State.CLEARING
        elif ctx.ranks.live or ctx.ranks.kept or ctx.state is State.RUNNING:
            self._end_ranks(signum, self._shutdown_timeout if grace is None else grace, now)
        else:
            self._exit(outcome)

    def _exit(self, outcome: fx.Exit) -> None:
        """End the agent; no rank is alive here any more. It stays while snapshots of this node are
        being written, because there may be no other copy of them."""
        ctx = self._ctx
        if not self._leaving.writes:
            self._over(outcome)
            return
        ctx.state = State.HOLDING
        ctx.outcome = outcome
        ctx.deadlines.clear()
        self._leaving.hold()
        ctx.reason = reasons.Then(why_of(outcome), reasons.HoldsCheckpoint())
        ctx.note(text(ctx.reason))

    def _over(self, outcome: fx.Exit) -> None:
        """Nothing is left to wait for: the agent exits."""
        ctx = self._ctx
        ctx.deadlines.clear()
        ctx.state = State.OVER
        ctx.out.append(self._add_like_failures(outcome))

    def _add_like_failures(self, outcome: fx.Exit) -> fx.Exit:
        """Add ranks of this node that failed in the same way as the first failure, but which the
        master had not heard of when it ended the job."""
        failures = outcome.failures
        known = {failure.rank for failure in failures}
        own = [
            f
            for f in self._ctx.failures()
            if f.rank not in known and failures and is_alike(f, failures[0])
        ]
        return replace(outcome, failures=(*failures, *own)) if own else outcome

    def _give_up(self, code: int, why: Reason) -> None:
        """End at once, even if processes are alive here, because nothing more can be done."""
        self._ctx.send(m.Leaving(text(why), 0))
        self._over(ending(code, why, cause_first(self._ctx.failures())))

    # ------------------------------------------------------------ reports and notes

    def _report_running(self) -> None:
        self._ctx.report(m.Running, tuple(pid for _, pid in sorted(self._ctx.ranks.pids.items())))

    def _report_stopping(self, now: float) -> None:
        ctx = self._ctx
        kill, stuck = ctx.deadlines.when("kill"), ctx.deadlines.when("stuck")
        until = kill if kill is not None else stuck
        ctx.report(m.Stopping, max(0.0, (until or now) - now), ctx.ranks.ended)

    def _ignore(self, what: object, now: float) -> None:
        """Ignore an event that is a repetition or arrives too late."""

    # ------------------------------------------------------------ the table

    def rules(self) -> Rules:
        """Which event does what in which state."""
        leaving, probing, recall = self._leaving, self._probing, self._recall
        rules: Rules = (
            ((*_HERE, State.HOLDING), (fx.StoreReady,), self._store_ready),
            ((*_HERE, State.HOLDING), (fx.StoreLost,), self._store_lost),
            (_HERE, (fx.SpawnerLost,), self._spawner_lost),
            (_HERE, (fx.Signalled,), leaving.signalled),
            (_ALIVE, (fx.LinkLost,), self._link_gone),
            (_ALIVE, (fx.LinkBack,), self._link_back),
            (_ALIVE, (m.Welcome,), self._welcome),
            (_ALIVE, (m.End,), self._job_ended),
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
            (_LIVE, (fx.RankArmed,), recall.armed),
            (_NOT_LIVE, (fx.RankArmed,), recall.disarmed),
            (_LIVE, (fx.RankRaised,), self._raised),
            (_NOT_LIVE, (fx.RankRaised,), self._ignore),
            ((State.STOPPING,), (fx.RankLeft,), recall.left),
            (_NOT_STOPPING, (fx.RankLeft,), self._ignore),
            ((*_CALM, *_SWEPT), (fx.RankExited,), recall.kept_exited),
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
_NOT_LIVE = tuple(state for state in _ALIVE if state not in _LIVE)
_NOT_STOPPING = tuple(state for state in _ALIVE if state is not State.STOPPING)
_BUSY = tuple(state for state in _ALIVE if state not in _CALM)
