"""What the agent's brain knows, and what it says of it. The rules are in `worker_group`."""

from __future__ import annotations

from msgspec.structs import replace

from elasticrun.config import DEPARTURE_GRACE, EXIT_FAILED, MASTER_LOST_TIMEOUT, SPAWN_TIMEOUT
from elasticrun.core.deadlines import Deadlines
from elasticrun.core.events import AgentEffect, Exit, Note, Say, Signalled, SignalRanks
from elasticrun.core.rounds.failures import cause_first, is_alike
from elasticrun.core.worker.ranks import LocalRanks, StoreShelf
from elasticrun.core.worker.states import ENDINGS, GroupStatus, State
from elasticrun.wire.messages import (
    MAX_FAILURES,
    Departing,
    Failure,
    Finished,
    Join,
    Leaving,
    Probe,
    Probed,
    RanksFailed,
    Report,
    RoundReport,
    Running,
    Start,
    Stopped,
    Stopping,
)
from elasticrun.wire.types import RoundName


class GroupBase:
    """The state of one node's worker group, its picture, and its reports."""

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
        """All durations in seconds. `restart_grace`: from SIGTERM to SIGKILL when the ranks are to
        start again; `shutdown_timeout`: the same when the agent ends. `exit_barrier_timeout`: how
        long a node whose ranks are done stays for the others (None: as long as the job runs).
        `master_lost_timeout` holds until a master tells its own. `departure_grace`: from a death
        signal until this node leaves, where its ranks can save a step before. `host` names this
        node in the failures that the brain writes itself."""
        self._restart_grace = restart_grace
        self._shutdown_timeout = shutdown_timeout
        self._exit_barrier = exit_barrier_timeout
        self._master_lost_timeout = master_lost_timeout
        self._departure_grace = departure_grace

        self._state = State.PREPARING
        self._start: Start | None = None
        self._ranks = LocalRanks(nproc, host)
        self._stores = StoreShelf()
        self._outcome: Exit | None = None
        self._probe_order: Probe | None = None  # under way
        self._probed: Probed | None = None  # the last answer, until a round begins
        self._persists: dict[str, float] = {}  # attempts to persist -> when they are given up
        self._departing: Signalled | None = None  # the signal that came, until this node leaves
        self._repeats = (0, 0.0)  # this signal, until then, is the one it departs by, said again
        self._asked = -1  # the step that the ranks are to save
        self._written = -1  # the newest step of the present round that is in storage
        self._left_with: int | None = None  # told to go between two rounds: the newest step here
        self._parked_until: float | None = None  # it is to stay until then, or is there already
        self._cut_short = False  # a rank of this life has ended before its time
        self._deadlines: Deadlines[str] = Deadlines()
        self._begun = False
        self._term = 0
        self._obeying = True
        self._link_lost = ""
        self._reason = ""
        self._wait_ends: float | None = None  # when the wait that the master ordered is over
        self._out: list[AgentEffect] = []

    def next_deadline(self) -> float | None:
        """When `step(Tick(), now)` is due at the latest; 0.0 (long past) before the first step."""
        return self._deadlines.next() if self._begun else 0.0

    def status(self) -> GroupStatus:
        """A picture of this node."""
        return GroupStatus(
            state=self._state,
            reason=self._link_lost or self._reason,
            round=self._start.round if self._start else None,
            pids=tuple(pid for _, pid in sorted(self._ranks.live.items()) if pid),
            restart_count=self._start.restart_count if self._start else 0,
            offered_store=self._stores.offer,
            master_lost=self._link_lost,
            wait_ends=self._wait_due(),
        )

    def _wait_due(self) -> float | None:
        if self._state is State.JOINED:
            return self._wait_ends
        return self._deadlines.when("departing" if self._state is State.RUNNING else "kill")

    @property
    def term(self) -> int:
        """The term of the last master that was obeyed, for Hello; 0 if there was none."""
        return self._term

    @property
    def master_lost_timeout(self) -> float:
        """Seconds for which ranks go on with no master to be heard, as the last one told."""
        return self._master_lost_timeout

    @property
    def is_parked(self) -> bool:
        """Whether this node is excluded and stays, or is about to."""
        return self._parked_until is not None

    def attached(self) -> RoundReport | None:
        """The last round this node had a place in, for Hello; what became of it follows on
        LinkBack. None if it never had one, or will have none any more."""
        start = self._start
        if start is None or self.is_parked:
            return None
        return RoundReport(
            round=start.round,
            group_rank=start.group_rank,
            group_world_size=start.group_world_size,
            first_rank=start.first_rank,
            world_size=start.world_size,
            restart_count=start.restart_count,
            store=start.store,
            restore=start.restore,
            rewound_from=start.rewound_from,
        )

    # ------------------------------------------------------------ small change

    def _prepare(self) -> None:
        self._out += self._stores.prepare()

    def _rejoin(self) -> None:
        """No rank lives here: join as soon as there is a store to offer."""
        self._state = State.PREPARING
        if self._stores.offer is None:
            self._reason = "the store for the next round is being made ready"
            self._prepare()
        else:
            self._state = State.JOINED
            self._offer()

    def _offer(self) -> None:
        """Say that this node is ready, with the store that it offers; nothing without one."""
        if self._stores.offer is not None:
            self._say(Join(self._stores.offer))

    def _failures(self) -> tuple[Failure, ...]:
        return tuple(self._ranks.failures.values())

    def _exit(self, outcome: Exit) -> None:
        """End the agent; no rank lives here any more. It stays for the snapshots of this node that
        are being written out: there may be no other copy of them."""
        if self._persists:
            self._hold(outcome)
        else:
            self._over(outcome)

    def _hold(self, outcome: Exit) -> None:
        self._state = State.HOLDING
        self._outcome = outcome
        self._deadlines.clear()
        self._deadlines.arm("holding", max(self._persists.values()))
        self._reason = f"{outcome.reason}; this node stays until its part of a checkpoint is saved"
        self._note(self._reason)

    def _over(self, outcome: Exit) -> None:
        lost = self._deadlines.when("master-lost")
        self._deadlines.clear()
        if self._parked_until is None:
            self._state = State.OVER
            self._out.append(self._with_own(outcome))
            return
        self._deadlines.arm("parked", self._parked_until)
        if lost is not None:
            self._deadlines.arm("master-lost", lost)
        self._outcome = outcome
        if self._state is not State.PARKED:
            self._state = State.PARKED
            self._out += self._stores.clear()
            self._note(f"{outcome.reason}; it stays parked until the job ends", "warning")
        self._reason = f"parked: {outcome.reason}"

    def _with_own(self, outcome: Exit) -> Exit:
        """With ranks of this node that have failed just as the first one did, which the master had
        not heard of when it ended the job."""
        told = outcome.failures
        known = {failure.rank for failure in told}
        own = [f for f in self._failures() if f.rank not in known and told and is_alike(f, told[0])]
        return replace(outcome, failures=(*told, *own)) if own else outcome

    def _give_up(self, code: int, sentence: str) -> None:
        """End at once, whatever lives here: nothing more can be done about it."""
        self._parked_until = None
        self._say(Leaving(sentence, 0))
        self._over(Exit(code, sentence, cause_first(self._failures()), 0))

    def _not_spawned(self) -> None:
        if self._state is State.STARTING:
            late = f"{SPAWN_TIMEOUT:g} s ago and has not started all of them"
            self._give_up(EXIT_FAILED, f"the fork server was asked for the ranks {late}")

    def _say(self, report: Report) -> None:
        self._out.append(Say(report))

    def _say_all(self, now: float) -> None:
        """All that a master must know that may have heard none of it."""
        if self._state is State.PARKED:
            return
        if self._state in ENDINGS and self._outcome is not None and not self.is_parked:
            self._say(Leaving(self._outcome.reason, self._outcome.signum))
        self._say_failures()
        if self._state is State.RUNNING:
            self._say_running()
            self._say_departing()
        elif self._state in (State.STOPPING, State.SWEEPING, State.ENDING, State.CLEARING):
            self._say_stopping(now)
        elif self._state is State.FINISHED and self._start is not None:
            self._say(Finished(self._start.round))
        elif self._state in (State.PREPARING, State.JOINED, State.PROBING):
            self._say_stopped()
            if self._state is not State.PREPARING:
                self._offer()
            if self._probed is not None:
                self._say(self._probed)

    def _say_running(self) -> None:
        if self._start is not None:
            pids = tuple(pid for _, pid in sorted(self._ranks.pids.items()))
            self._say(Running(self._start.round, pids))

    def _say_departing(self) -> None:
        event = self._departing
        if event is not None and self._start is not None:
            reason, at = f"received {event.name}", (event.step, event.margin)
            self._say(Departing(self._start.round, reason, event.signum, *at, self._asked))

    def _say_failures(self) -> None:
        if self._start is not None and self._ranks.failures:
            failures = self._failures()[:MAX_FAILURES]
            self._say(RanksFailed(self._start.round, failures))

    def _say_stopping(self, now: float) -> None:
        if self._start is not None:
            kill, stuck = self._deadlines.when("kill"), self._deadlines.when("stuck")
            until = kill if kill is not None else stuck
            self._say(Stopping(self._start.round, max(0.0, (until or now) - now)))

    def _say_stopped(self) -> None:
        if self._start is not None:
            self._say(Stopped(self._start.round))

    def _note(self, text: str, level: str = "info") -> None:
        self._out.append(Note(text, level))

    def _signal(self, signum: int) -> None:
        targets = self._ranks.targets(signum)
        if targets:
            self._out.append(SignalRanks(targets, signum))


def newer(one: RoundName, other: RoundName) -> bool:
    """Whether `one` is of a later round than `other`."""
    return (one.term, one.number) > (other.term, other.number)
