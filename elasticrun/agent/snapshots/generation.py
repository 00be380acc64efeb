"""One generation of this node's ranks, with respect to their snapshots.

It knows the process, the segment and the commits of each rank. Control pages of segments replace
most messages: this agent writes there which steps are complete, which never will be, and which step
to save because a node leaves; a rank writes its current step. Neither side has to answer the other.
Only this agent frees slots, so it can notify a rank that waits for one.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from elasticrun.agent.snapshots.inventory import SnapshotStore
from elasticrun.agent.snapshots.peers import Peer
from elasticrun.agent.snapshots.segments import Held
from elasticrun.config import Launch
from elasticrun.core.events import Signalled
from elasticrun.snapshots.shm.segment import NONE, VERSION, Snapshot
from elasticrun.snapshots.shm.throttle import Throttle
from elasticrun.wire import env, messages as m, snapshots as s
from elasticrun.wire.messages import MAX_MARGIN, Start

FOLDER_MOST: Final = 4096
"""Maximum characters of a checkpoint folder's path or URL."""

MOST_FAILED: Final = 16
"""Steps per rank for which a failed save is remembered."""

CUT_OFF_AFTER: Final = 2.0
"""Seconds without a connection after which a running rank counts as no longer saving."""

BROKEN: Final = "it is no longer connected to its agent"
"""Why a rank that is cut off has no snapshot, in a clause."""

LEAST_MARGIN: Final = 2
"""Minimum number of steps between the newest step and the requested one."""

REQUEST_TIME: Final = 0.5
"""Seconds for the request to reach every rank, with a large margin."""

LEAST_TIME: Final = 0.1
"""Minimum measured seconds for a pace to be used."""

MOST_MISSED: Final = 64
"""Maximum number of missed steps reported; the master requests only a few."""

DEFERRABLE: Final = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Death signals that ranks defer until their state is saved."""


@dataclass(frozen=True, slots=True)
class SnapshotProcess:
    """The process that takes a local rank's snapshots: the first one that introduced itself.

    The started process may be only a shell around it. Any other process is a child, such as an
    evaluation, whose state is not the rank's."""

    pid: int
    pidfd: int  # -1: not watched, so no other process can replace it

    @classmethod
    def of(cls, pid: int) -> SnapshotProcess:
        """The process `pid`, without a pidfd if none is available, or if the process leads its own
        session: one that we start for a rank does, and the rank ends with it. Raises
        ProcessLookupError."""
        try:
            return cls(pid, -1 if os.getsid(pid) == pid else os.pidfd_open(pid))
        except ProcessLookupError:
            raise
        except OSError:
            return cls(pid, -1)

    def has_ended(self) -> bool:
        """Whether the process has ended; False if that is unknown."""
        if self.pidfd < 0:
            return False
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)


@dataclass(eq=False)
class LocalRank:
    """One local rank of this generation."""

    peer: Peer | None = None
    process: SnapshotProcess | None = None
    held: Held | None = None  # its segment in this generation
    awaiting_segment: Peer | None = None  # the peer that waits for NeedSegment's answer
    allocation: Throttle = field(default_factory=Throttle)  # of that segment
    waiting_for: tuple[Peer, Held, int] | None = None  # a free slot (NONE), or a step to be whole
    step: int | None = None  # last committed
    skipped: int = 0  # snapshots
    deferred_signals: tuple[int, ...] = ()  # signals that it defers
    is_disconnected: bool = False  # its connection has closed
    is_cut_off: bool = False  # it still runs CUT_OFF_AFTER seconds after that
    failed: dict[int, str] = field(default_factory=dict)  # steps that it could not save, and why

    def is_wait_over(self) -> bool:
        """Whether what this rank waits for has happened."""
        assert self.waiting_for is not None
        _, held, whole = self.waiting_for
        if whole != NONE:  # or a later step is requested
            return held.segment.watermark >= whole or held.segment.save_at > whole
        return held.segment.free_slot() is not None


class Generation:
    """The state of the ranks since their start; without `start`, none has started yet."""

    def __init__(self, nproc: int, start: Start | None = None) -> None:
        self.start = start
        self.ranks = [LocalRank() for _ in range(nproc)]
        self.may_write = start is not None
        """Whether its ranks may still write."""
        self.has_restored = False
        """Whether one of them has restored the snapshot that their Start named."""
        self.watermark = self.given_up = NONE
        self.has_own_watermark = False
        """Whether the watermark is a step of this generation."""

    def close(self) -> None:
        """Close the pidfds of this generation's processes."""
        for rank in self.ranks:
            if rank.process is not None:
                rank.process.close()
                rank.process = None

    def held(self) -> list[Held]:
        """The segments of its ranks, except lost ones."""
        return [one.held for one in self.ranks if one.held is not None and not one.held.is_lost]

    # ------------------------------------------------------------ introductions

    def why_refused(self, here: s.RankHere, pid: int) -> str:
        """Why this process is rejected, in a clause; "" if it may take snapshots for one of our
        ranks. It then becomes that rank's process."""
        start = self.start
        if here.version != VERSION:
            return f"its segments are of version {here.version}, ours of {VERSION}"
        if start is None or not self.may_write or not 0 <= here.local_rank < len(self.ranks):
            return "no such rank was started"
        if len(here.folder) > FOLDER_MOST or not 0 <= here.keep_last < 2**31 > here.keep_every >= 0:
            return "its folder or its number of checkpoints is invalid"
        if not 0 <= here.replicas <= 1:
            return f"it requests {here.replicas} replicas; only 0 or 1 is possible"
        place = (start.first_rank + here.local_rank, start.info.world_size)
        if (here.rank, here.world_size) != place:
            claimed = f"rank {here.rank} of {here.world_size}"
            return f"it claims to be {claimed}, but is rank {place[0]} of {place[1]}"
        return _not_its_process(self.ranks[here.local_rank], pid)

    def of(self, peer: Peer) -> int | None:
        """The local rank whose process this peer is."""
        if not isinstance(peer.here, s.RankHere):
            return None
        local_rank = peer.here.local_rank
        known = local_rank < len(self.ranks) and self.ranks[local_rank].peer is peer
        return local_rank if known else None

    # ------------------------------------------------------------ the control pages

    def show(self, held: Iterable[Held]) -> None:
        """Write the watermark, and the steps given up, into these segments."""
        for one in held:
            one.segment.watermark = self.watermark
            one.segment.given_up = self.given_up

    def resume_from(self, step: int) -> None:
        """Set the step that is restored from; NONE: no snapshot in memory."""
        self.watermark, self.given_up, self.has_own_watermark = step, NONE, False

    def raise_watermark(self, step: int) -> bool:
        """Record that a step of this generation is complete; returns whether that is new."""
        if step < 0 or (step <= self.watermark and self.has_own_watermark):
            return False
        self.watermark, self.has_own_watermark = step, True
        self.show(self.held())
        return True

    def give_up(self, step: int) -> bool:
        """Record that steps above the watermark up to this one can never be complete; returns
        whether that is new."""
        if step <= max(self.watermark, self.given_up):
            return False
        self.given_up = step
        self.show(self.held())
        return True

    # ------------------------------------------------------------ commits and steps

    def committed(self, local_rank: int, message: s.Committed) -> tuple[Held, Snapshot] | None:
        """Record a commit. Returns the segment and the snapshot; None if the segment does not
        contain it."""
        rank = self.ranks[local_rank]
        held = rank.held
        if held is None or held.is_lost or not 0 <= message.slot < held.segment.slots:
            return None
        snapshot = held.segment.read(message.slot)
        if snapshot is None or snapshot.sequence != message.sequence:
            return None
        held.written = True
        rank.step = snapshot.step
        return held, snapshot

    def mark_failed(self, local_rank: int, step: int, reason: str) -> bool:
        """Record that this rank could not save that step; returns whether that is new."""
        rank = self.ranks[local_rank]
        if step < 0 or step in rank.failed or (rank.step is not None and rank.step >= step):
            return False
        rank.failed[step] = reason
        while len(rank.failed) > MOST_FAILED:
            del rank.failed[min(rank.failed)]
        return True

    def ranks_without(self, step: int) -> set[int]:
        """Local ranks that could not save this step."""
        return {number for number, rank in enumerate(self.ranks) if step in rank.failed}

    def cut_off(self) -> list[int]:
        """Local ranks that run without a connection to this agent."""
        return [n for n, rank in enumerate(self.ranks) if rank.is_cut_off and rank.peer is None]

    def open_steps(self) -> set[int]:
        """Steps of this generation that its ranks hold and that are not known to be whole."""
        start = self.start
        found = (one for held in self.held() for one in held.snapshots())
        return {
            one.step
            for one in found
            if start is not None and one.is_of(start.round) and one.step > self.watermark
        }

    def steps(self) -> list[int]:
        """The last step that each of its ranks has committed."""
        return [one.step for one in self.ranks if one.step is not None]

    def newest(self) -> int:
        """The newest step that any of its ranks has reached, including ranks that have exited; NONE
        if it is unknown."""
        return max((held.segment.current for held in self.held()), default=NONE)

    def went_on(self) -> m.WentOn | None:
        """After the exit of its ranks: how far they had trained since they restored from memory;
        None: no progress."""
        start = self.start
        restore = None if start is None else start.info.restore
        if start is None or restore is None or self.may_write or not self.has_restored:
            return None
        step = self.newest()
        return m.WentOn(start.round, step) if step > restore.step else None

    # ------------------------------------------------------------ ranks that wait for a slot

    def await_room(self, peer: Peer, local_rank: int, whole: int) -> None:
        """Register that a rank waits until a slot is free (`whole`: NONE) or the step `whole` is
        complete. Its newest request counts. The answer is RoomThere, at once or later."""
        held = self.ranks[local_rank].held
        if held is None:
            peer.break_off("it waits for a slot, but has no segment")
            return
        self.ranks[local_rank].waiting_for = (peer, held, whole)
        self.notify_waiting()

    def notify_waiting(self) -> None:
        """Notify ranks whose wait is over, because control pages have changed."""
        for rank in self.ranks:
            if rank.waiting_for is None:
                continue
            peer, held, _ = rank.waiting_for
            closed = peer.closed or held.is_lost
            if closed or rank.is_wait_over():
                rank.waiting_for = None
                if not closed:
                    peer.send(s.RoomThere())


def _not_its_process(rank: LocalRank, pid: int) -> str:
    """Why this process may not take that rank's snapshots, in a clause; "" if it may. It then
    becomes the rank's process."""
    first = rank.process
    if first is not None and first.pid != pid:
        if not first.has_ended():
            return (
                f"process {first.pid} takes that rank's snapshots, and another process has other "
                f"state: start it without {env.SNAPSHOTS}"
            )
        first.close()
        rank.process = None
    if rank.process is None:
        try:
            rank.process = SnapshotProcess.of(pid)
        except ProcessLookupError:
            return "its process has ended"
    return ""


class Drain:
    """Handles a leaving node: tracks the current step of the local ranks and the step that all
    ranks must save."""

    def __init__(self, launch: Launch, store: SnapshotStore) -> None:
        self._store = store
        names = set(DEFERRABLE).intersection(launch.signals_to_handle)
        self.signals = tuple(sorted(signal.Signals[name].value for name in names))
        """The signals that ranks defer."""
        if launch.departure_grace <= 0:
            self.signals = ()
        self.start(Generation(launch.nproc_per_node))

    def start(self, generation: Generation) -> None:
        """Start a new generation."""
        self.generation = generation
        self._requested = NONE
        self._misses: dict[int, m.Missed] = {}  # by the requested step
        self._first: tuple[float, int] | None = None  # first commit: time and step
        self._began: tuple[float, int] | None = None  # start of training: time and the step before

    # ------------------------------------------------------------ ranks

    def began(self, step: int) -> None:
        """Note that a rank resumes training at this step; the first rank counts."""
        if self._began is None:
            self._began = (time.monotonic(), step)

    def committed(self, step: int) -> None:
        """Note that a rank has taken a snapshot; the first one counts."""
        if self._first is None:
            self._first = (time.monotonic(), step)

    def defers_signal(self, local_rank: int, signum: int) -> bool:
        return signum in self.generation.ranks[local_rank].deferred_signals

    def missed(self, message: s.StepMissed) -> None:
        """Report that a rank could not save the requested step; once per request."""
        start = self.generation.start
        if start is None or message.asked < 0 or message.asked in self._misses:
            return
        if len(self._misses) < MOST_MISSED:
            report = self._misses[message.asked] = m.Missed(
                start.round, message.asked, max(0, message.step)
            )
            self._store.link.send(report)

    # ------------------------------------------------------------ the node

    def step(self) -> int:
        """The newest step of the ranks that can save their state; NONE: none can."""
        steps = [
            one.held.segment.current
            for one in self.generation.ranks
            if one.held is not None and not one.held.is_lost and not one.is_disconnected
        ]
        first = NONE if self._first is None else self._first[1]
        return max([first, *steps]) if steps else NONE

    def margin(self) -> int:
        """Number of steps until the request reaches every rank, at their measured pace."""
        since = self._first or self._began
        if since is None:
            return LEAST_MARGIN
        began, first = since
        seconds = max(time.monotonic() - began, LEAST_TIME)
        steps = math.ceil(REQUEST_TIME * (self.step() - first) / seconds)
        return min(max(LEAST_MARGIN, steps), MAX_MARGIN)

    def signalled(self, signum: int, *, death: bool) -> Signalled:
        """The state machine's event for a signal to this agent."""
        name = signal.Signals(signum).name
        step = self.step() if death else NONE
        steps = (one.step for held in self._store.segments.held for one in held.snapshots())
        held = max(steps, default=NONE)
        fresh = all(one.held is None for one in self.generation.ranks)
        return Signalled(signum, name, death, step, self.margin(), held, fresh)

    def request_save(self, order: m.SaveAt) -> None:
        """Ask all ranks to save their first step from this one on. A repeated order is answered
        again if the step was missed, because the master may not know that."""
        start = self.generation.start
        if start is not None and order.round == start.round:
            self._requested = order.step
            for held in self.generation.held():
                held.segment.save_at = order.step
            if order.step in self._misses:
                self._store.link.send(self._misses[order.step])

    def show(self, local_rank: int, held: Held) -> None:
        """Write the requested step into this rank's new segment, because it is connected now."""
        self.generation.ranks[local_rank].is_disconnected = False
        held.segment.save_at = self._requested
