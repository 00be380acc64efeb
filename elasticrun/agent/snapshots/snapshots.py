"""Sentences of ranks and savers for the operator: each once in a life of the ranks.

What ranks read in their segments' control pages: which step is whole, which never will be.

Ranks that wait for room: each is told when a slot of its segment is free, or a step is whole.

What frees a slot is written into its segment's control page by this agent alone, so nobody needs to
look there again and again.

A rank that introduces itself: whether it is one of ours, and what it is told.

The node's part in snapshots: who of its ranks holds what, and what follows from that.

Ranks and the saver speak over one socket (`snapshot_peers`), state lies in segments (`segments`),
the master is told what is held (`inventory`) and tells which step is whole, which one to go on from
(`shards`), and what to write out (`persisting`). This room routes between them, and keeps the two
rules on which the others rest: before a rank of a new life is born, everything newer than what that
life goes on from is withdrawn; and what it goes on from is pinned until the life has a whole step
of its own.

The end of a rank's connection means nothing: what it has committed counts when it was reaped.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from elasticrun.agent.link.link import Link
from elasticrun.agent.rendezvous.claims import FolderClaim
from elasticrun.agent.runtime import tell_failure
from elasticrun.agent.snapshots.checkpoints import Persisting, named
from elasticrun.agent.snapshots.drain import Departing
from elasticrun.agent.snapshots.fetching import Replicas, Shards
from elasticrun.agent.snapshots.inventory import (
    CHOSEN,
    HoldingsReport,
    Inventory,
    Wanted,
    needless,
    sift,
)
from elasticrun.agent.snapshots.peers import Peer, PeerServer, one_line
from elasticrun.agent.snapshots.saver import Hashing, Savers
from elasticrun.agent.snapshots.segments import Held, Segments, Sizes
from elasticrun.agent.spawner import Spawners
from elasticrun.config import AgentConfig
from elasticrun.operator_log import logger
from elasticrun.shm.memory import NoRoom
from elasticrun.shm.segment import NONE, VERSION, round_key
from elasticrun.wire import env, messages as m, snapshots as s
from elasticrun.wire.messages import Start
from elasticrun.wire.progress import place
from elasticrun.wire.snapshots import RoomThere
from elasticrun.wire.types import Endpoint

REMARKS_MOST: Final = 20
"""Sentences of ranks and savers that are shown in one life."""


class Remarks:
    """Call it with a sentence."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, text: str, level: str = "warning") -> None:
        text = one_line(text)
        if text not in self._told and len(self._told) < REMARKS_MOST:
            self._told.add(text)
            getattr(logger, level)("%s", text)

    def clear(self) -> None:
        """A new life of the ranks: all may be said again."""
        self._told.clear()


class Marks:
    """Of the present life of the ranks."""

    def __init__(self) -> None:
        self.watermark = NONE
        self.given_up = NONE
        self.resumed = False
        """Whether the watermark is a step of this very life."""

    def begin(self, restored: int) -> None:
        """A new life goes on from this step; NONE: from nothing in memory."""
        self.watermark, self.given_up, self.resumed = restored, NONE, False

    def show(self, held: Iterable[Held]) -> None:
        """Write both into these segments."""
        for one in held:
            if not one.gone:
                one.segment.watermark = self.watermark
                one.segment.given_up = self.given_up

    def rise(self, step: int) -> bool:
        """This step of the present life is whole; whether that is news."""
        if step < 0 or (step <= self.watermark and self.resumed):
            return False
        self.watermark, self.resumed = step, True
        return True

    def give_up(self, step: int) -> bool:
        """Steps above the watermark up to this one will never be whole; whether that is news."""
        if step <= max(self.watermark, self.given_up):
            return False
        self.given_up = step
        return True


class Awaiting:
    """One question a local rank; the newest counts."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[Peer, Held, int]] = {}

    def ask(self, peer: Peer, local_rank: int, held: Held | None, whole: int) -> None:
        """AwaitRoom; answered with RoomThere, at once or later."""
        if held is None:
            peer.break_off("it waits for a slot, and has no segment")
            return
        self._asked[local_rank] = (peer, held, whole)
        self.look()

    def look(self) -> None:
        """Something was written into control pages."""
        for local_rank, (peer, held, whole) in list(self._asked.items()):
            gone = peer.closed or held.gone
            if gone or _has_come(held, whole):
                del self._asked[local_rank]
                if not gone:
                    peer.send(RoomThere())

    def clear(self) -> None:
        """A new life of the ranks."""
        self._asked.clear()


def _has_come(held: Held, whole: int) -> bool:
    if whole != NONE:  # or a later step is to be saved instead
        return held.segment.watermark >= whole or held.segment.save_at > whole
    return held.segment.free_slot() is not None


MAX_KEY: Final = 2**63

FOLDER_MOST: Final = 4096
"""Characters of the path or URL of a folder of checkpoints."""


def refusal(here: s.RankHere, start: Start | None, nproc: int) -> str:
    """Why this rank is not heard, in a clause; "" if it is. `start`: of the ranks that live here;
    None: none does."""
    if here.version != VERSION:
        return f"its segments are of version {here.version}, ours of {VERSION}"
    if start is None or not 0 <= here.local_rank < nproc:
        return "no such rank was started"
    if len(here.folder) > FOLDER_MOST or not 0 <= here.keep_last < 2**31 > here.keep_every >= 0:
        return "it names a folder, or a number of checkpoints, that there cannot be"
    if not 0 <= here.replicas <= 1:
        return f"it wants {here.replicas} replicas; there may be 0 or 1"
    place = (start.first_rank + here.local_rank, start.world_size)
    if (here.rank, here.world_size) != place:
        said = f"rank {here.rank} of {here.world_size}"
        return f"it says that it is {said}, and is rank {place[0]} of {place[1]}"
    return ""


class Speakers:
    """The process that speaks for each local rank in this life: the first that did so. It need not
    be the one that was started, which may be a shell around it. Another one is a child, say an
    evaluation, whose state is not the rank's."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, int]] = {}  # pid and pidfd, -1: nobody comes after it

    def refusal(self, local_rank: int, pid: int) -> str:
        """Why this process is not heard for that rank, in a clause; "" if it speaks for it."""
        first, pidfd = self._first.get(local_rank, (pid, -1))
        if first != pid:
            if not _has_ended(pidfd):
                return (
                    f"process {first} speaks for that rank, and the state of another one is not "
                    f"the rank's: start that without {env.SNAPSHOTS}"
                )
            os.close(pidfd)
            del self._first[local_rank]
        if local_rank not in self._first:
            try:
                self._first[local_rank] = (pid, _opened(pid))
            except ProcessLookupError:
                return "its process has ended"
        return ""

    def clear(self) -> None:
        """A new life begins, or none will."""
        for _, pidfd in self._first.values():
            if pidfd >= 0:
                os.close(pidfd)
        self._first.clear()


def _opened(pid: int) -> int:
    """A pidfd; -1 where there is none to be had, and of a process with a session of its own, as
    every one has that we start for a rank: that rank ends with it. ProcessLookupError."""
    try:
        return -1 if os.getsid(pid) == pid else os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return -1


def _has_ended(pidfd: int) -> bool:
    """Whether that process has; false where nobody can tell."""
    if pidfd < 0:
        return False
    look = select.poll()
    look.register(pidfd, select.POLLIN)
    return bool(look.poll(0))


def sizes_of(need: s.NeedSegment) -> Sizes:
    """What it asks for. NoRoom for a layout or a content that there cannot be."""
    if not 0 < need.content < MAX_KEY or not 0 <= need.layout < MAX_KEY:
        raise NoRoom("it names a layout that there cannot be")
    return Sizes(need.layout, need.layout_length, need.slot_bytes, need.slots)


def resume(start: Start, *, same: bool, put_off: tuple[int, ...]) -> s.Resume:
    """What it goes on from. `same`: its own snapshot of that step lies here; `put_off`: signals
    that are not to end it before its state is saved."""
    restore = start.restore
    return s.Resume(
        present=named(start.round),
        round=s.Named() if restore is None else named(restore.round),
        step=NONE if restore is None else restore.step,
        world_size=0 if restore is None else restore.world_size,
        same=same,
        rewound_from=start.rewound_from,
        put_off=put_off,
        suspect=start.suspect,
        restore_step=start.restore_step,
    )


class Snapshots:
    """Built with the node; `open` when its id is known. `link` leads to the master, `address` is
    where this node is reached by others."""

    def __init__(
        self,
        config: AgentConfig,
        spawners: Spawners,
        *,
        environ: Mapping[str, str],
        link: Callable[[], Link],
        address: Callable[[], str],
        resumed: Callable[[int, str], None] = lambda step, source: None,
    ) -> None:
        self._nproc = config.nproc_per_node
        self._several = config.spec.max_nodes > 1
        self._link = link
        self._resumed = resumed
        self._address = address
        self._segments = Segments(config.spec.job_id, self._nproc, environ)
        self._inventory = Inventory(self._nproc)
        self._server = PeerServer(self._nproc, self)
        self._remarks = Remarks()
        self.savers = Savers(
            config,
            spawners,
            place=lambda: self._server.name,
            host=lambda: address() if self._several else "",
            ready=self._saver_ready,
            lost=self._saver_lost,
            remark=self._remarks,
        )
        say = self._say
        parts = (self._segments, self._inventory, self.savers)
        self._shards = Shards(*parts, say)
        self._claim = FolderClaim(
            config.spec.job_id, lambda: self._start.round.term if self._start else 0
        )
        self._persisting = Persisting(
            *parts, say=say, bad=self._shards.bad, freed=self._tidy, sure=self._sure
        )
        self._replicas = Replicas(*parts, say=say, changed=lambda: self._report.changed())
        saves = config.spec.saves
        self._wanted = Wanted(self._segments, self._inventory, saves.limit, self._tidy)
        self._report = HoldingsReport(
            link, self._holdings, lambda: self._start.group_world_size if self._start else 1
        )
        self._start: m.Start | None = None
        self._living = False  # ranks of the present life may still write
        self._put_back = False  # one of them has put back what their Start named
        self._ranks: dict[int, Peer] = {}
        self._current: dict[int, Held] = {}  # given in this life, by local rank
        self._speakers = Speakers()
        self._giving: set[Peer] = set()  # ranks that are being given a segment
        self._steps: dict[int, int] = {}  # the last one that each local rank has committed
        self._skipped: dict[int, int] = {}  # how many each has skipped in this life
        self._marks = Marks()
        self.departing = Departing(config, self._current, lambda: self._segments.held, self._say)
        self._hashing = Hashing(self.savers)
        self._awaiting = Awaiting()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, node: str) -> None:
        """Begin to listen, and take over what a killed agent of this node has left."""
        self._server.open()
        self._inventory.adopt(await self._segments.open(node))

    def place(self, local_rank: int) -> str:
        """What this rank is given (wire.env.SNAPSHOTS); "" if there is none."""
        return place(self._server.name, local_rank) if self._server.name else ""

    async def close(self, *, job_over: bool) -> None:
        """No process of this node is left: give everything back."""
        self._report.close()
        self._wanted.close()
        self.savers.close()
        self._shards.end()
        self._replicas.close()
        self._persisting.close()
        await self._claim.close()
        self._server.close()
        self._hashing.close()
        self._speakers.clear()
        for task in self._tasks:
            task.cancel()
        await self._segments.close(job_over=job_over)

    # ------------------------------------------------------------ lives of the ranks

    def begin(self, start: m.Start) -> None:
        """Ranks of this round are about to be started."""
        self._start, self._living, self._put_back = start, True, False
        for peer in self._server.peers():
            if isinstance(peer.here, s.RankHere):
                peer.close()
        self._ranks.clear()
        self._speakers.clear()
        self._current.clear()
        self._awaiting.clear()
        self._steps.clear()
        self._skipped.clear()
        self._remarks.clear()
        self.departing.begin(start)
        self._inventory.begin(start, self._segments.held)
        self.savers.replace_old()
        self._go_on_from(start)
        self._replicas.begin(start)
        self._note()
        self._serve()

    def _go_on_from(self, start: m.Start) -> None:
        sift(self._segments.held, start.restore, self._persisting.pins(), self._wanted.reason)
        self._marks.begin(NONE if start.restore is None else start.restore.step)
        self._shards.begin(start)
        self._report.changed()

    def reaped(self) -> None:
        """No rank of the present life is left: what it has committed is what it has."""
        if self._living:
            self._living = False
            self._wanted.look(list(self._current.values()))
            self._serve()
        self._report.now(again=True)

    def attached(self) -> None:
        """A master is there (again) that may have heard nothing of us."""
        if self._segments.held and self._several:
            self.savers.want()  # others may have to fetch from here
        self._report.now(again=True)
        self._persisting.say_again()
        self._shards.ask_again()

    # ------------------------------------------------------------ orders of the master

    def obey(self, order: m.Order) -> None:
        """What the brain has passed on."""
        if isinstance(order, m.Watermark):
            if self._start is not None and order.round == self._start.round:
                self._whole(order.step)
                self._give_up(order.given_up)
        elif isinstance(order, m.Persist):
            self._persisting.begin(order)
        elif isinstance(order, m.SaveAt):
            self.departing.ask(order)
        elif isinstance(order, m.CommitCheckpoint):
            self._persisting.commit(order)
        elif isinstance(order, m.PersistOver):
            self._over(order)
        elif isinstance(order, m.Holder):
            self._shards.holder(order)
        elif isinstance(order, m.Replicate):
            self._replicas.obey(order)

    def _whole(self, step: int) -> None:
        """The present life has a whole step of its own: older ones are not needed for it."""
        if not self._marks.rise(step):
            return
        self._marks.show(self._current.values())
        for held in self._segments.held:
            held.unpin(CHOSEN)
        self._shards.let_copies_go()
        self._replicas.tidy()
        self._tidy()

    def _give_up(self, step: int) -> None:
        """Steps above the watermark that are in nobody's way any more."""
        if self._marks.give_up(step):
            self._marks.show(self._current.values())
            self._awaiting.look()

    def _over(self, order: m.PersistOver) -> None:
        """A failed attempt may be followed by another; a snapshot that is wanted stays for it."""
        self._persisting.over(order)
        if order.ok or not order.attempt:
            self._wanted.over(round_key(order.round), order.step)
        if order.ok and self._inventory.committed(order.step):
            self._note()
        self._tidy()

    async def _sure(self) -> None:
        """The folder of the present life is this job's to write into. NotOurs."""
        life = self._inventory.present
        if life is not None and life.folder:
            await self._claim.sure(life.folder)

    # ------------------------------------------------------------ what peers say

    def heard(self, peer: Peer, message: s.FromPeer) -> None:
        """A message of a peer, its introduction first."""
        if isinstance(peer.here, s.SaverHere):
            if isinstance(message, s.FromSaver):
                self.savers.heard(peer, message)
            else:
                peer.break_off("it is the saver, and speaks as a rank does")
        elif not isinstance(message, s.FromRank):
            peer.break_off("it is a rank, and speaks as the saver does")
        elif isinstance(message, s.RankHere):
            self._rank_here(peer, message)
        elif peer.here is not None and self._ranks.get(peer.here.local_rank) is peer:
            self._rank_says(peer, peer.here.local_rank, message)

    def lost(self, peer: Peer) -> None:
        """Its connection is over."""
        if isinstance(peer.here, s.SaverHere):
            self.savers.hung_up(peer)
        elif peer.here is not None and self._ranks.get(peer.here.local_rank) is peer:
            del self._ranks[peer.here.local_rank]
            self.departing.lost(peer.here.local_rank)

    def _rank_here(self, peer: Peer, here: s.RankHere) -> None:
        start = self._start
        why = refusal(here, start if self._living else None, self._nproc)
        why = why or self._speakers.refusal(here.local_rank, peer.pid)
        if start is None or why:
            peer.break_off(why)
            return
        on = start.restore
        if on and (other := self._inventory.elsewhere(on.round, here.folder)):
            self._remarks(f"step {on.step} in memory is not used: its checkpoints are in {other}")
            self._start = start = replace(start, restore=None)
            self._go_on_from(start)
        before, self._ranks[here.local_rank] = self._ranks.get(here.local_rank), peer
        if before is not None:
            before.break_off("a newer Checkpointer of that rank has taken its place")
        if sentence := self._inventory.told(here):
            self._remarks(sentence)
        if here.rank == 0:
            self._claim.want(here.folder)
        self._replicas.wanted = here.replicas > 0
        if here.replicas and start.group_world_size == 1:
            self._remarks("no replicas: this node is the only one", level="info")
        self.savers.want()
        same = start.restore is not None and self._shards.is_here(here.rank)
        peer.send(resume(start, same=same, put_off=self.departing.signals))

    def _rank_says(self, peer: Peer, local_rank: int, message: s.FromRank) -> None:
        if isinstance(message, s.NeedSegment) and peer in self._giving:
            peer.break_off("it asks for a second segment before it was given the first one")
        elif isinstance(message, s.NeedSegment):
            self._giving.add(peer)
            self._spawn(self._give(peer, local_rank, message))
        elif isinstance(message, s.Committed):
            self._committed(local_rank, message)
        elif isinstance(message, s.AwaitRoom):
            held = self._current.get(local_rank)
            self._awaiting.ask(peer, local_rank, held, message.whole)
        elif isinstance(message, s.WantShard):
            self._shards.want(peer, message.rank)
        elif isinstance(message, s.IsWhole):
            self._shards.is_whole(peer, message.rank)
        elif isinstance(message, s.CannotRestore):
            self._shards.cannot(message.rank, message.reason)
        elif isinstance(message, s.PutsOff):
            self.departing.puts_off(local_rank, message.signals)
        elif isinstance(message, s.Missed):
            self.departing.missed(message)
        elif isinstance(message, s.Skipped):
            self._skipped[local_rank] = message.count
            self._report.changed()
        elif isinstance(message, s.Remark):
            self._remarks(f"local rank {local_rank}: {message.text}")
        elif isinstance(message, s.Restored):
            self._inventory.restored(message)
            self._put_back = self._put_back or message.source == "memory"
            self.departing.began(message.step)
            self._resumed(message.step, message.source)
            if (source := message.source) != "nothing":
                self._remarks(f"ranks go on from step {message.step} ({source})", level="info")

    # ------------------------------------------------------------ segments

    async def _give(self, peer: Peer, local_rank: int, need: s.NeedSegment) -> None:
        """NeedSegment; answered with SegmentHere, whatever comes in between."""
        try:
            await self._lend(peer, local_rank, need)
        except Exception as error:  # of ours, too: the rank would wait for an answer
            why = str(error) if isinstance(error, NoRoom) else repr(error)
            reason = f"training goes on without snapshots: {why}"
            self._remarks(f"local rank {local_rank}: {reason}")
            peer.send(s.SegmentHere(False, reason, False))
        finally:
            self._giving.discard(peer)
        self._tidy()

    async def _lend(self, peer: Peer, local_rank: int, need: s.NeedSegment) -> None:
        held = await self._segments.need(local_rank, sizes_of(need), need.content, need.least)
        if not peer.closed:
            self._current[local_rank] = held  # at once: nobody takes it for needless meanwhile
        await self._segments.note(self._inventory.lives())
        if peer.closed or held.gone:
            return
        held.own = need.own
        self._marks.show([held])
        held.segment.current = NONE
        self.departing.show(held)
        peer.send(s.SegmentHere(True, "", not held.written and not held.snapshots()), held.fd)

    def _tidy(self) -> None:
        """Something is not needed any more: tell who waits for room, and drop segments of other
        layouts that nobody needs."""
        self._awaiting.look()
        mark = self._marks.watermark
        for held in needless(self._segments.held, self._current, self._inventory, mark):
            self.savers.forget(held)
            self._segments.drop(held)
        self._report.changed()

    # ------------------------------------------------------------ commits

    def _committed(self, local_rank: int, said: s.Committed) -> None:
        held, start = self._current.get(local_rank), self._start
        if held is None or held.gone or start is None or not 0 <= said.slot < held.segment.slots:
            return
        snapshot = held.segment.read(said.slot)
        if snapshot is None or snapshot.sequence != said.sequence:
            return
        held.written = True
        if said.persist or self._inventory.wants(snapshot.round, snapshot.step):
            self._wanted.add(snapshot.round, snapshot.step, self._current.values())
        self._steps[local_rank] = snapshot.step
        self.departing.committed(snapshot.step)
        alone = start.group_world_size == 1 and len(self._steps) == self._nproc
        if alone and (not self._marks.resumed or min(self._steps.values()) > self._marks.watermark):
            same = len(set(self._steps.values())) == 1
            here = self._current.values()
            self._whole(snapshot.step if same else self._inventory.whole_here(here))
        mark = self._marks.watermark
        if any(mark < step < snapshot.step for step in self._steps.values()):
            self._give_up(self._inventory.passed_over(self._current.values(), mark))
        self._hashing.soon(held)
        if self._replicas.wanted and self._several:
            rank = start.first_rank + local_rank
            self.savers.serve(held, snapshot, named(start.round), rank)
        if said.persist:
            self._report.now()
        else:
            self._report.changed()

    # ------------------------------------------------------------ the saver

    def _saver_ready(self) -> None:
        self._shards.compare()
        self._serve()
        for held in self._segments.held:
            self._hashing.now(held)
        self._report.now()

    def _saver_lost(self) -> None:
        if self._ranks:
            self.savers.want()
        self._report.changed()

    def _holdings(self) -> m.Holdings:
        held = self._inventory.holdings(self._segments.held, living=self._living)
        saver = Endpoint(self._address(), self.savers.port) if self.savers.port else None
        last, went_on = self._inventory.last(), self._went_on()
        skipped = max(self._skipped.values(), default=0)
        return m.Holdings(saver, held, self._replicas.wanted, last, went_on, skipped)

    def _went_on(self) -> m.WentOn | None:
        """How far ranks of a life that is over have trained on from memory; None: not at all."""
        start = self._start
        if start is None or start.restore is None or self._living or not self._put_back:
            return None
        done = (held.segment.current for held in self._current.values() if not held.gone)
        step = max(done, default=NONE)
        return m.WentOn(start.round, step) if step > start.restore.step else None

    def _serve(self) -> None:
        """Let other nodes have what is held here."""
        if self._several and self.savers.here:
            for held, snapshot, life, rank in self._inventory.everything(self._segments.held):
                self.savers.serve(held, snapshot, named(life.name), rank)

    # ------------------------------------------------------------ small change

    def _say(self, report: m.Report) -> None:
        self._link().say(report)

    def _note(self) -> None:
        self._spawn(self._segments.note(self._inventory.lives()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        tell_failure(task, logger.error, "giving a segment")
