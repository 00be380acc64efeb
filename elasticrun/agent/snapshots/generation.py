"""One generation of this node's ranks, as far as their snapshots go.

Who speaks for each rank, which segment it was given, what it has committed there, and the words of
the segments' control pages, by which ranks are told what is whole, what never will be, and which
step to save because a node leaves. A rank writes there which step it is at; so nobody waits for
anybody. What frees a slot is written there by this agent alone, so a rank that waits for room need
not look again and again.
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
from elasticrun.config import AgentConfig
from elasticrun.core.events import Signalled
from elasticrun.snapshots.shm.segment import NONE, VERSION, Snapshot
from elasticrun.wire import env, messages as m, snapshots as s
from elasticrun.wire.messages import MAX_MARGIN, Start

FOLDER_MOST: Final = 4096
"""Characters of the path or URL of a folder of checkpoints."""

MOST_FAILED: Final = 16
"""Steps of a rank of which it is known that it could not save them."""

MUTE_AFTER: Final = 2.0
"""Seconds without a connection, after which a rank that has not ended by then is taken for one that
saves nothing any more."""

BROKEN: Final = "it is not connected to its agent any more"

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


@dataclass(frozen=True, slots=True)
class Speaker:
    """The process that speaks for a local rank: the first that did so. It need not be the one that
    was started, which may be a shell around it. Another one is a child, say an evaluation, whose
    state is not the rank's."""

    pid: int
    pidfd: int  # -1: nobody comes after it

    @classmethod
    def of(cls, pid: int) -> Speaker:
        """Without a pidfd where there is none to be had, and for a process with a session of its
        own, as every one has that we start for a rank: that rank ends with it.
        ProcessLookupError."""
        try:
            return cls(pid, -1 if os.getsid(pid) == pid else os.pidfd_open(pid))
        except ProcessLookupError:
            raise
        except OSError:
            return cls(pid, -1)

    def has_ended(self) -> bool:
        """False where nobody can tell."""
        if self.pidfd < 0:
            return False
        look = select.poll()
        look.register(self.pidfd, select.POLLIN)
        return bool(look.poll(0))

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)


@dataclass(eq=False)
class LocalRank:
    """One local rank of this generation."""

    peer: Peer | None = None
    speaker: Speaker | None = None
    held: Held | None = None  # given in this generation
    giving: Peer | None = None  # is being given one now
    waits: tuple[Peer, Held, int] | None = None  # for room (NONE), or until that step is whole
    step: int | None = None  # committed last
    skipped: int = 0  # snapshots
    put_off: tuple[int, ...] = ()  # signals that do not end it any more
    silent: bool = False  # it does not speak with this agent any more
    mute: bool = False  # it still runs, and nobody hears what it does
    failed: dict[int, str] = field(default_factory=dict)  # steps that it could not save, and why

    def has_come(self) -> bool:
        """What it waits for."""
        assert self.waits is not None
        _, held, whole = self.waits
        if whole != NONE:  # or a later step is to be saved instead
            return held.segment.watermark >= whole or held.segment.save_at > whole
        return held.segment.free_slot() is not None


class Generation:
    """From the start of the ranks on; without a `start` none was started yet."""

    def __init__(self, nproc: int, start: Start | None = None) -> None:
        self.start = start
        self.ranks = [LocalRank() for _ in range(nproc)]
        self.living = start is not None
        """Its ranks may still write."""
        self.put_back = False
        """One of them has put back what their Start named."""
        self.watermark = self.given_up = NONE
        self.resumed = False
        """Whether the watermark is a step of this very generation."""

    def close(self) -> None:
        """Another one begins, or none will."""
        for rank in self.ranks:
            if rank.speaker is not None:
                rank.speaker.close()
                rank.speaker = None

    def held(self) -> list[Held]:
        """The segments that its ranks were given and that still are."""
        return [one.held for one in self.ranks if one.held is not None and not one.held.gone]

    # ------------------------------------------------------------ who speaks

    def refusal(self, here: s.RankHere, pid: int) -> str:
        """Why this process is not heard, in a clause; "" if it speaks for a rank of ours."""
        start = self.start
        if here.version != VERSION:
            return f"its segments are of version {here.version}, ours of {VERSION}"
        if start is None or not self.living or not 0 <= here.local_rank < len(self.ranks):
            return "no such rank was started"
        if len(here.folder) > FOLDER_MOST or not 0 <= here.keep_last < 2**31 > here.keep_every >= 0:
            return "it names a folder, or a number of checkpoints, that there cannot be"
        if not 0 <= here.replicas <= 1:
            return f"it wants {here.replicas} replicas; there may be 0 or 1"
        place = (start.first_rank + here.local_rank, start.world_size)
        if (here.rank, here.world_size) != place:
            said = f"rank {here.rank} of {here.world_size}"
            return f"it says that it is {said}, and is rank {place[0]} of {place[1]}"
        return _not_its_speaker(self.ranks[here.local_rank], pid)

    def of(self, peer: Peer) -> int | None:
        """The local rank for which this peer speaks."""
        if not isinstance(peer.here, s.RankHere):
            return None
        local_rank = peer.here.local_rank
        known = local_rank < len(self.ranks) and self.ranks[local_rank].peer is peer
        return local_rank if known else None

    # ------------------------------------------------------------ the control pages

    def show(self, held: Iterable[Held]) -> None:
        """Write which step is whole, and which ones never will be, into these segments."""
        for one in held:
            one.segment.watermark = self.watermark
            one.segment.given_up = self.given_up

    def go_on_from(self, step: int) -> None:
        """NONE: from nothing in memory."""
        self.watermark, self.given_up, self.resumed = step, NONE, False

    def rise(self, step: int) -> bool:
        """This step of its own is whole; whether that is news."""
        if step < 0 or (step <= self.watermark and self.resumed):
            return False
        self.watermark, self.resumed = step, True
        self.show(self.held())
        return True

    def give_up(self, step: int) -> bool:
        """Steps above the watermark up to this one will never be whole; whether that is news."""
        if step <= max(self.watermark, self.given_up):
            return False
        self.given_up = step
        self.show(self.held())
        return True

    # ------------------------------------------------------------ what they hold

    def committed(self, local_rank: int, said: s.Committed) -> tuple[Held, Snapshot] | None:
        """The segment and the snapshot, if it stands there."""
        rank = self.ranks[local_rank]
        held = rank.held
        if held is None or held.gone or not 0 <= said.slot < held.segment.slots:
            return None
        snapshot = held.segment.read(said.slot)
        if snapshot is None or snapshot.sequence != said.sequence:
            return None
        held.written = True
        rank.step = snapshot.step
        return held, snapshot

    def cannot(self, local_rank: int, step: int, reason: str) -> bool:
        """This rank could not save that step; whether that is news."""
        rank = self.ranks[local_rank]
        if step < 0 or step in rank.failed or (rank.step is not None and rank.step >= step):
            return False
        rank.failed[step] = reason
        while len(rank.failed) > MOST_FAILED:
            del rank.failed[min(rank.failed)]
        return True

    def lack(self, step: int) -> set[int]:
        """Local ranks that could not save this step."""
        return {number for number, rank in enumerate(self.ranks) if step in rank.failed}

    def mute(self) -> list[int]:
        """Local ranks that run without a connection to this agent."""
        return [n for n, rank in enumerate(self.ranks) if rank.mute and rank.peer is None]

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
        """Those that its ranks have committed last."""
        return [one.step for one in self.ranks if one.step is not None]

    def newest(self) -> int:
        """The newest step that one of its ranks has come to, also one that has ended; NONE:
        unknown."""
        return max((held.segment.current for held in self.held()), default=NONE)

    def went_on(self) -> m.WentOn | None:
        """How far its ranks, when they are gone, have trained on from memory; None: not at all."""
        start = self.start
        if start is None or start.restore is None or self.living or not self.put_back:
            return None
        step = self.newest()
        return m.WentOn(start.round, step) if step > start.restore.step else None

    # ------------------------------------------------------------ ranks that wait for room

    def await_room(self, peer: Peer, local_rank: int, whole: int) -> None:
        """Its newest question counts; it is answered with RoomThere, at once or later."""
        held = self.ranks[local_rank].held
        if held is None:
            peer.break_off("it waits for a slot, and has no segment")
            return
        self.ranks[local_rank].waits = (peer, held, whole)
        self.look()

    def look(self) -> None:
        """Something was written into control pages: tell those whose wait is over."""
        for rank in self.ranks:
            if rank.waits is None:
                continue
            peer, held, _ = rank.waits
            gone = peer.closed or held.gone
            if gone or rank.has_come():
                rank.waits = None
                if not gone:
                    peer.send(s.RoomThere())


def _not_its_speaker(rank: LocalRank, pid: int) -> str:
    """Why this process is not heard for that rank, in a clause; "" if it speaks for it."""
    first = rank.speaker
    if first is not None and first.pid != pid:
        if not first.has_ended():
            return (
                f"process {first.pid} speaks for that rank, and the state of another one is not "
                f"the rank's: start that without {env.SNAPSHOTS}"
            )
        first.close()
        rank.speaker = None
    if rank.speaker is None:
        try:
            rank.speaker = Speaker.of(pid)
        except ProcessLookupError:
            return "its process has ended"
    return ""


class Drain:
    """This node leaves, or another one: which step its ranks are at, and which one all ranks are
    asked to save."""

    def __init__(self, config: AgentConfig, store: SnapshotStore) -> None:
        self._store = store
        names = set(MAY_PUT_OFF).intersection(config.signals_to_handle)
        self.signals = tuple(sorted(signal.Signals[name].value for name in names))
        """Those that ranks are to put off."""
        if config.departure_grace <= 0:
            self.signals = ()
        self.begin(Generation(config.nproc_per_node))

    def begin(self, generation: Generation) -> None:
        """A new one."""
        self.generation = generation
        self._asked = NONE
        self._told: dict[int, m.Missed] = {}  # by the step that was asked for
        self._first: tuple[float, int] | None = None  # commit: when, of which step
        self._began: tuple[float, int] | None = None  # training: when, after which step

    # ------------------------------------------------------------ ranks

    def began(self, step: int) -> None:
        """A rank goes on from this step."""
        if self._began is None:
            self._began = (time.monotonic(), step)

    def committed(self, step: int) -> None:
        """A rank has taken a snapshot."""
        if self._first is None:
            self._first = (time.monotonic(), step)

    def is_put_off(self, local_rank: int, signum: int) -> bool:
        return signum in self.generation.ranks[local_rank].put_off

    def missed(self, said: s.StepMissed) -> None:
        """A rank could not save the step that was asked for."""
        start = self.generation.start
        if start is None or said.asked < 0 or said.asked in self._told:
            return
        if len(self._told) < MOST_MISSED:
            report = self._told[said.asked] = m.Missed(start.round, said.asked, max(0, said.step))
            self._store.link.say(report)

    # ------------------------------------------------------------ the node

    def step(self) -> int:
        """The newest that a rank is at; NONE: none of them can save its state."""
        steps = [
            one.held.segment.current
            for one in self.generation.ranks
            if one.held is not None and not one.held.gone and not one.silent
        ]
        first = NONE if self._first is None else self._first[1]
        return max([first, *steps]) if steps else NONE

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
        steps = (one.step for held in self._store.segments.held for one in held.snapshots())
        held = max(steps, default=NONE)
        fresh = all(one.held is None for one in self.generation.ranks)
        return Signalled(signum, name, death, step, self.margin(), held, fresh)

    def ask(self, order: m.SaveAt) -> None:
        """All ranks save their first step from this one on. The same order again, of a master that
        may not have heard that one could not, is answered again."""
        start = self.generation.start
        if start is not None and order.round == start.round:
            self._asked = order.step
            for held in self.generation.held():
                held.segment.save_at = order.step
            if order.step in self._told:
                self._store.link.say(self._told[order.step])

    def show(self, local_rank: int, held: Held) -> None:
        """This rank is given this segment: write it there."""
        self.generation.ranks[local_rank].silent = False
        held.segment.save_at = self._asked
