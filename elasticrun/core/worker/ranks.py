"""The ranks of one round on one node: which are alive, which failed, and which our signals stopped.
Also the node's c10d stores: at most one ready and unused, at most one in use."""

from __future__ import annotations

from msgspec.structs import replace

from elasticrun.core.events import AgentEffect, PrepareStore, RankExited, ReleaseStore, SpawnerLost
from elasticrun.core.rounds.failures import SIGKILL, classify, signal_of
from elasticrun.wire.messages import Failure, FailureKind
from elasticrun.wire.types import Endpoint, write_ranges

SIGTERM = 15

SIGNAL_MEMORY = 5.0
"""A rank that dies of a signal within this many seconds of the agent receiving the same signal was
stopped by the sender of both (schedulers signal every process at once)."""


class LocalRanks:
    """Records facts about the ranks; `group` decides what follows from them."""

    def __init__(self, nproc: int, host: str) -> None:
        """`host` names this node in the failures created here."""
        self.nproc = nproc
        self._host = host
        self._first_rank = 0
        self._sent: set[int] = set()  # signals sent to ranks of this round
        self._is_stopping = False
        self._received: dict[int, float] = {}  # signal -> when the agent last received it
        self.live: dict[int, int] = {}
        """Local ranks that have not been reaped -> pid, 0 until they were spawned."""
        self.pids: dict[int, int] = {}
        """All ranks of the round that were spawned -> pid."""
        self.failures: dict[int, Failure] = {}
        """By local rank, in the order in which they were reaped."""
        self.ended: tuple[int, ...] = ()
        """Local ranks that exited with 0 before any was signalled or recalled."""
        self.armed: set[int] = set()
        """Local ranks that can be recalled (`recall`)."""
        self.failing: set[int] = set()
        """Local ranks whose exception leaves their recoverable function: they are about to exit."""
        self.recalled: set[int] = set()
        """Local ranks that were recalled, or fail by themselves, and have not left yet; they are
        not signalled."""
        self.kept: dict[int, int] = {}
        """Local ranks that have left their round and wait for the next one -> pid."""

    def new_round(self, first_rank: int) -> None:
        """Reset for a new round, in which nothing has been spawned yet. Kept ranks are armed."""
        self.armed = set(self.kept)
        self.failing.clear()
        self.recalled.clear()
        self.kept.clear()
        self._is_stopping = False
        self._first_rank = first_rank
        self._sent.clear()
        self.ended = ()
        self.live = dict.fromkeys(range(self.nproc), 0)
        self.pids.clear()
        self.failures.clear()

    def spawned(self, local_rank: int, pid: int) -> None:
        self.pids[local_rank] = pid
        if local_rank in self.live:
            self.live[local_rank] = pid

    def signalled(self, signum: int, now: float) -> None:
        self._received[signum] = now

    def record_signal(self, signum: int) -> tuple[int, ...]:
        """Record that this signal is sent, and return the ranks that can receive it now."""
        self._note_ended()
        self._sent.add(signum)
        some = sorted(self.live.items())
        return tuple(rank for rank, pid in some if pid and rank not in self.recalled)

    def recall(self) -> tuple[int, ...]:
        """Mark the living ranks that are armed or failing as recalled. Return those that must be
        recalled: a failing one leaves by itself."""
        self._note_ended()
        self.recalled = (self.armed | self.failing) & self.live.keys()
        return tuple(sorted(self.recalled - self.failing))

    def left(self, local_rank: int) -> bool:
        """Record that a rank has left its round. Return False if it is not recalled any more."""
        if local_rank not in self.recalled:
            return False
        self.recalled.discard(local_rank)
        self.kept[local_rank] = self.live.pop(local_rank)
        return True

    def count_kept_as_live(self) -> None:
        """The node ends: count kept ranks as alive, so they are stopped like any other."""
        self.live |= self.kept
        self.kept.clear()

    def _note_ended(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self.ended = self._exited_with_0()

    def failed(self, event: RankExited, now: float) -> Failure:
        """The failure of a rank that did not exit with 0: as the runtime reports it, adjusted for
        signals that were sent or received here."""
        signum = signal_of(event.code)
        received = self._received.get(signum)
        ours = signum in self._sent or (received is not None and now - received <= SIGNAL_MEMORY)
        failure = event.failure or self._failure_of(event.local_rank, event.code)
        if ours and failure.kind is not FailureKind.OOM:
            failure = replace(failure, kind=FailureKind.STOPPED)
        ended = set(self._exited_with_0()) - {event.local_rank}
        if failure.kind is FailureKind.PEER_LOST and ended and not self._is_stopping:
            through = write_ranges(self._first_rank + rank for rank in ended)
            failure = replace(failure, ended_before=through)
        return failure

    def _exited_with_0(self) -> tuple[int, ...]:
        """Local ranks that have been reaped and neither failed nor are kept."""
        others = self.live.keys() | self.failures.keys() | self.kept.keys()
        return tuple(sorted(set(self.pids) - others))

    def lose_spawner(self, event: SpawnerLost) -> bool:
        """All ranks died with their spawner: record that. Return whether any was alive."""
        lost = bool(self.live)
        for rank in sorted(self.live):
            account = replace(
                self._failure_of(rank, -SIGKILL),
                kind=FailureKind.SPAWNER,
                time_us=event.time_us,
                message=f"the fork server ended: {event.reason}",
            )
            self.failures.setdefault(rank, account)
        self.live.clear()
        return lost

    def _failure_of(self, local_rank: int, code: int) -> Failure:
        return Failure(
            host=self._host,
            rank=self._first_rank + local_rank,
            local_rank=local_rank,
            pid=self.pids.get(local_rank, 0),
            exitcode=code,
            time_us=0,
            kind=classify(code, "", stopping=False, oom=False),
            message="",
            traceback="",
            error_file="",
        )


MAX_LOSSES = 5
"""Number of consecutive stores that may exit unused before the agent gives up."""


class StoreSlot:
    """Which store is offered, which one the round uses, and whether one is being prepared."""

    def __init__(self) -> None:
        self.offer: Endpoint | None = None
        """The store that is ready and unused; None: there is none."""
        self.hosted: Endpoint | None = None
        """Our store that the current round uses; None: it uses another node's."""
        self._preparing = False
        self._losses = 0

    def prepare(self) -> list[AgentEffect]:
        """Request a store, unless there is one or one was requested."""
        if self._preparing or self.offer is not None:
            return []
        self._preparing = True
        return [PrepareStore()]

    def ready(self, store: Endpoint) -> list[AgentEffect]:
        self._preparing = False
        if self.offer is not None:
            return [ReleaseStore(store)]
        self.offer = store
        return []

    def lost_offer(self) -> bool:
        """The store on offer exited on its own; return whether that keeps happening."""
        self.offer = None
        self._losses += 1
        return self._losses >= MAX_LOSSES

    def release(self) -> list[AgentEffect]:
        """The round that used our store is over: stop that store."""
        old, self.hosted = self.hosted, None
        return [] if old is None else [ReleaseStore(old)]

    def use(self, *, host: bool) -> None:
        """A round begins; `host`: it uses the store that we offered."""
        self._losses = 0
        if host:
            self.hosted, self.offer = self.offer, None

    def lose_spawner(self) -> None:
        """All store hosts died with their spawner."""
        self.offer = self.hosted = None
        self._preparing = False
