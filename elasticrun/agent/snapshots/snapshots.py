"""The node's part in snapshots: routes messages between ranks, the saver, the segments and the
master.

Ranks and the saver use one socket (`peers`), and state is in segments (`segments`). The master gets
the inventory (`inventory`); it decides which step is complete, which one to restore (`fetching`),
and what to write to storage (`checkpoints`). This module also enforces two rules that the others
rely on. First, before a rank of a new generation starts, every snapshot newer than the one it
restores from is withdrawn. Second, that snapshot stays pinned until the generation has its own
complete step.

A closed connection of a rank is not its end: its commits count once it is reaped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from msgspec.structs import replace

from elasticrun.agent.claims.folder_claim import FolderClaim
from elasticrun.agent.context import NodeContext
from elasticrun.agent.runtime import Once, Tasks
from elasticrun.agent.snapshots.checkpoints import Comparing, Persisting
from elasticrun.agent.snapshots.fetching import MAX_REASON, Replicator, Shards
from elasticrun.agent.snapshots.generation import BROKEN, CUT_OFF_AFTER, Drain, Generation
from elasticrun.agent.snapshots.inventory import (
    CHOSEN,
    HoldingsReport,
    Inventory,
    SnapshotStore,
    WantedSnapshots,
)
from elasticrun.agent.snapshots.peers import Peer, PeerServer, one_line
from elasticrun.agent.snapshots.saver import Hashing, Savers
from elasticrun.agent.snapshots.segments import Segments, Sizes
from elasticrun.agent.work.local import LocalWork
from elasticrun.agent.workers.recoverable import Recoverables
from elasticrun.agent.workers.spawner import Spawners
from elasticrun.host.log import logger
from elasticrun.snapshots.shm.memory import NoMemory
from elasticrun.snapshots.shm.segment import NONE, round_key
from elasticrun.snapshots.shm.throttle import Throttle
from elasticrun.wire import messages as m, snapshots as s
from elasticrun.wire.messages import Start
from elasticrun.wire.progress import place
from elasticrun.wire.types import MAX_DEVICE_NAME, Endpoint

REMARKS_MOST: Final = 20
"""Maximum number of messages of ranks and savers that are logged per generation."""


MAX_KEY: Final = 2**63


def sizes_of(need: s.NeedSegment) -> Sizes:
    """The requested sizes. Raises NoMemory if the layout or content is invalid."""
    if not 0 < need.content < MAX_KEY or not 0 <= need.layout < MAX_KEY:
        raise NoMemory("its layout is invalid")
    return Sizes(need.layout, need.layout_length, need.slot_bytes, need.slots)


def resume(start: Start, *, same: bool, put_off: tuple[int, ...]) -> s.Resume:
    """The Resume message of a rank. `same`: its own snapshot of that step is on this node;
    `put_off`: signals that must not end it before its state is saved."""
    restore = start.info.restore
    return s.Resume(
        present=start.round,
        round=s.NO_ROUND if restore is None else restore.round,
        step=NONE if restore is None else restore.step,
        world_size=0 if restore is None else restore.world_size,
        same=same,
        skip=start.info.skip,
        put_off=put_off,
    )


class LocalSnapshots:
    """All parts of this node's snapshots. Built with the node, once it has a link; call `open` when
    its id is known. `recoverables` gets the messages of recoverable functions. `resumed(step,
    source)` is called when a rank has resumed."""

    def __init__(
        self,
        node: NodeContext,
        spawners: Spawners,
        recoverables: Recoverables,
        environ: Mapping[str, str],
        resumed: Callable[[int, str], None] = lambda step, source: None,
    ) -> None:
        launch, job_id = node.launch, node.identity.job_id
        self._recoverables = recoverables
        self._nproc = launch.nproc_per_node
        self._several = launch.spec.max_nodes > 1
        self._node = node
        self._send = node.link.send
        self._resumed = resumed
        self.folder = ""
        """The checkpoint folder that the ranks reported; "": unknown."""
        self._remarks = Once(REMARKS_MOST)  # logged in one generation
        self._tasks = Tasks(logger.error)
        self._generation = Generation(self._nproc)
        self._server = PeerServer(self._nproc, self)
        self.savers = Savers(node.identity, spawners, self)
        self._segments = Segments(job_id, self._nproc, environ)
        self._wanted = WantedSnapshots(self._segments, launch.spec.saves.limit, self)
        self._inventory = Inventory(self._segments, self._wanted, self._nproc)
        self._report = HoldingsReport(node.link, self)
        self._store = SnapshotStore(
            self._segments,
            self._inventory,
            self.savers,
            node.link,
            self._report,
            self,
        )
        run = launch.master.run
        self._claim = FolderClaim(job_id, self._term, "" if run.unnamed else run.name)
        self._shards = Shards(self._store)
        self._replicas = Replicator(self._store)
        self._persisting = Persisting(self._store, self._shards, self._claim)
        keeps = launch.spec.saves.on_corruption in ("restart", "exclude")
        self._comparing = Comparing(self._store, keeps=keeps)
        self._work = LocalWork(node.link)
        self.drain = Drain(launch, self._store)
        self._hashing = Hashing(self.savers)

    async def open(self, node: str) -> None:
        """Start listening, and adopt what a killed agent of this node has left."""
        self._server.open()
        self._inventory.adopt(await self._segments.open(node))

    def place(self, local_rank: int) -> str:
        """The value of wire.env.SNAPSHOTS for this rank; "" if there is no socket."""
        return place(self._server.name, local_rank) if self._server.name else ""

    def close(self) -> None:
        """Stop restarting the saver; callers that wait for it fail."""
        self.savers.close()

    async def release(self, *, job_over: bool) -> None:
        """Release everything, because all processes of this node have exited."""
        self._report.close()
        self._wanted.close()
        self.savers.close()
        self._shards.stop()
        self._replicas.close()
        self._persisting.close()
        self._comparing.close()
        await self._claim.close()
        self._server.close()
        self._hashing.close()
        self._generation.close()
        self._tasks.close()
        await self._segments.close(job_over=job_over)

    # ------------------------------------------------------------ generations of the ranks

    def round_began(self, start: Start) -> None:
        self._generation.close()
        self._store.drop_damaged()
        self._generation = Generation(self._nproc, start)
        for peer in list(self._server.peers):
            if isinstance(peer.here, s.RankHere):
                peer.close()
        self._claim.follow(start.round.term, has_rank_0=start.first_rank == 0)
        self._work.round_began(start)
        self._remarks.clear()
        self.drain.start(self._generation)
        self._inventory.start(start)
        self.savers.replace_old()
        self._restore_from(start)
        self._replicas.start(start)
        self._note()
        self._serve()

    def _restore_from(self, start: Start) -> None:
        self._comparing.stop()
        if start.info.restore is not None:
            self._inventory.withdraw(start.info.restore, start.info.distrusted)
        self._inventory.prune(start.info.restore, self._persisting.pins())
        self._generation.resume_from(
            NONE if start.info.restore is None else start.info.restore.step
        )
        self._shards.start(start)
        self._report.send_soon()

    def ranks_stopping(self) -> None:
        """No-op: ranks may still commit."""

    def ranks_gone(self, *, done: bool) -> None:
        """End the current generation, which can commit nothing more, and report what is here."""
        if self._generation.may_write:
            self._generation.may_write = False
            self._store.drop_damaged()
            self._wanted.add_pinned(self._generation.held())
            self._serve()
        self._report.send_now(again=True)

    def attached(self) -> None:
        """Report everything again after a (re)connection: the master may know nothing of this
        node."""
        self._work.attached()  # before the inventory
        if self._segments.held and self._several:
            self.savers.ensure()  # other nodes may have to fetch from here
        self._report.send_now(again=True)
        self._persisting.resend()
        self._shards.ask_again()

    # ------------------------------------------------------------ orders of the master

    def obey(self, order: m.Order) -> None:
        """Dispatch an order about snapshots."""
        if isinstance(order, m.Watermark):
            start = self._generation.start
            if start is not None and order.round == start.round:
                self._raise_watermark(order.step)
                self._give_up(order.given_up)
        elif isinstance(order, m.Persist):
            self._persisting.start(order)
        elif isinstance(order, m.SaveAt):
            self.drain.request_save(order)
        elif isinstance(order, m.CommitCheckpoint):
            self._persisting.commit(order)
        elif isinstance(order, m.PersistOver):
            self._over(order)
        elif isinstance(order, m.Holder):
            self._shards.holder(order)
        elif isinstance(order, m.Replicate):
            self._replicas.obey(order)
        elif isinstance(order, m.CompareReplicas | m.KeepStep):
            self._comparing.obey(order)
        elif isinstance(order, m.WorkGrant):
            self._work.grant(order)

    def _raise_watermark(self, step: int) -> None:
        """Raise the watermark to a complete step of the current generation, and release what only
        older steps need."""
        if not self._generation.raise_watermark(step):
            return
        for held in self._segments.held:
            held.unpin(CHOSEN)
        self._shards.drop_copies()
        self._replicas.tidy()
        self.tidy()

    def _give_up(self, step: int) -> None:
        """Free the slots of steps above the watermark that can never be complete."""
        if self._generation.give_up(step):
            self._generation.notify_waiting()

    def _over(self, order: m.PersistOver) -> None:
        """Handle the end of an attempt. A failed one may be repeated, so its wanted snapshot is
        kept."""
        self._persisting.end(order)
        if order.ok or not order.attempt:
            self._wanted.end(round_key(order.round), order.step)
        if order.ok and self._inventory.committed(order.step):
            self._note()
        self.tidy()

    # ------------------------------------------------------------ messages of peers

    def on_message(self, peer: Peer, message: s.FromPeer) -> None:
        """Dispatch a message of a peer, its introduction first."""
        if isinstance(peer.here, s.RecoverableHere):
            if isinstance(message, s.FromRecoverable):
                self._recoverables.on_message(peer, message)
            else:
                peer.break_off("it runs a recoverable function, and sent another message")
        elif isinstance(peer.here, s.WorkHere):
            if isinstance(message, s.FromWorker):
                self._work.on_message(peer, message)
                if self._inventory.note_work():
                    self._note()
            else:
                peer.break_off("it takes work, and sent another message")
        elif isinstance(peer.here, s.SaverHere):
            if isinstance(message, s.FromSaver):
                self.savers.on_message(peer, message)
            else:
                peer.break_off("it is the saver, and sent a message of a rank")
        elif not isinstance(message, s.FromRank):
            peer.break_off("it is a rank, and sent a message of the saver")
        elif isinstance(message, s.RankHere):
            self._rank_here(peer, message)
        elif (local_rank := self._generation.of(peer)) is not None:
            self._on_rank_message(peer, local_rank, message)

    def lost(self, peer: Peer) -> None:
        """Handle the closed connection of an introduced peer."""
        if isinstance(peer.here, s.RecoverableHere):
            self._recoverables.lost(peer)
        elif isinstance(peer.here, s.WorkHere):
            self._work.lost(peer)
        elif isinstance(peer.here, s.SaverHere):
            self.savers.on_close(peer)
        elif (local_rank := self._generation.of(peer)) is not None:
            rank = self._generation.ranks[local_rank]
            rank.peer, rank.is_disconnected = None, True
            loop = asyncio.get_running_loop()
            loop.call_later(CUT_OFF_AFTER, self._on_cut_off, self._generation, local_rank)

    def _on_cut_off(self, generation: Generation, local_rank: int) -> None:
        """Handle a rank that lost its connection CUT_OFF_AFTER seconds ago and saves nothing any
        more, if it still runs."""
        if generation is self._generation and generation.may_write:
            generation.ranks[local_rank].is_cut_off = True
            for lone in generation.cut_off():
                for step in sorted(generation.open_steps()):
                    self._report_missing(lone, step, BROKEN)
            self._report.send_soon()

    def _rank_here(self, peer: Peer, here: s.RankHere) -> None:
        generation = self._generation
        why, start = generation.why_refused(here, peer.pid), generation.start
        if start is None or why:
            peer.break_off(why)
            return
        if sentence := self._inventory.configure(here):
            logger.error("rank %d has no snapshots: %s", here.rank, sentence)
            peer.send(s.RankRefused(sentence))
            return
        on = start.info.restore
        if on and (other := self._inventory.other_folder(on.round, here.folder)):
            self.remark(f"step {on.step} in memory is not used: its checkpoints are in {other}")
            generation.start = start = replace(start, info=replace(start.info, restore=None))
            self._restore_from(start)
        rank = generation.ranks[here.local_rank]
        before, rank.peer = rank.peer, peer
        if before is not None:
            before.break_off("a newer Checkpointer of the same rank replaces it")
        self.folder = here.folder
        if here.rank == 0:
            self._claim.start(here.folder)
        self._replicas.enabled = here.replicas > 0
        if here.replicas and start.group_world_size == 1:
            self.remark("no replicas: this node is the only one", level=logging.INFO)
        self.savers.ensure()
        same = start.info.restore is not None and self._shards.is_here(here.rank)
        peer.send(resume(start, same=same, put_off=self.drain.signals))

    def _on_rank_message(self, peer: Peer, local_rank: int, message: s.FromRank) -> None:
        rank = self._generation.ranks[local_rank]
        if isinstance(message, s.NeedSegment) and rank.awaiting_segment is peer:
            peer.break_off("it requests a second segment before it got the first one")
        elif isinstance(message, s.NeedSegment):
            rank.awaiting_segment, rank.allocation = peer, Throttle()
            self._tasks.start(self._give(peer, local_rank, message), "giving a segment")
        elif isinstance(message, s.AwaitSegment):
            rank.allocation.hurry()
        elif isinstance(message, s.Committed):
            self._committed(local_rank, message)
        elif isinstance(message, s.SaveFailed):
            self._save_failed(local_rank, message)
        elif isinstance(message, s.AwaitRoom):
            self._generation.await_room(peer, local_rank, message.whole)
        elif isinstance(message, s.WantShard):
            self._shards.provide(peer, message.rank)
        elif isinstance(message, s.IsWhole):
            self._shards.verify(peer, message.rank)
        elif isinstance(message, s.CannotRestore):
            self._shards.reject(message.rank, message.reason)
        elif isinstance(message, s.PutsOff):
            rank.deferred_signals = message.signals
        elif isinstance(message, s.StepMissed):
            self.drain.missed(message)
        elif isinstance(message, s.Skipped):
            rank.skipped = message.count
            self._report.send_soon()
        elif isinstance(message, s.Remark):
            self.remark(f"local rank {local_rank}: {message.text}")
        elif isinstance(message, s.Restored):
            self._restored(message)
            start = self._generation.start
            if start is not None and start.first_rank + local_rank == 0:
                self._work.restored(message)

    def _restored(self, message: s.Restored) -> None:
        self._inventory.restored(message)
        self._generation.has_restored = self._generation.has_restored or message.source == "memory"
        self.drain.began(message.step)
        self._resumed(message.step, message.source)
        if message.source != "nothing":
            self.remark(
                f"ranks resume from step {message.step} ({message.source})", level=logging.INFO
            )

    # ------------------------------------------------------------ segments

    async def _give(self, peer: Peer, local_rank: int, need: s.NeedSegment) -> None:
        """Handle NeedSegment; always answered with SegmentHere."""
        rank = self._generation.ranks[local_rank]
        try:
            await self._lend(peer, local_rank, need)
        except Exception as error:  # also our own bugs: the rank waits for an answer
            why = str(error) if isinstance(error, NoMemory) else repr(error)
            reason = f"training continues without snapshots: {why}"
            # the master names the ranks, when a snapshot is due
            self.remark(f"local rank {local_rank}: {reason}", level=logging.INFO)
            peer.send(s.SegmentHere(False, reason, False))
        finally:
            if rank.awaiting_segment is peer:
                rank.awaiting_segment = None
        self.tidy()

    async def _lend(self, peer: Peer, local_rank: int, need: s.NeedSegment) -> None:
        throttle = self._generation.ranks[local_rank].allocation
        held = await self._segments.segment_for(
            local_rank, sizes_of(need), need.content, throttle, need.least
        )
        if not peer.closed:  # immediately, so that nobody prunes it meanwhile
            self._generation.ranks[local_rank].held = held
        await self._segments.note(self._inventory.rounds())
        if peer.closed or held.is_lost:
            return
        held.own, held.device = need.own, need.device[:MAX_DEVICE_NAME]
        self._generation.show([held])
        held.segment.current = NONE
        self.drain.show(local_rank, held)
        peer.send(s.SegmentHere(True, "", not held.written and not held.snapshots()), held.fd)

    def tidy(self) -> None:
        """Notify ranks that wait for a slot, and drop segments with outdated layouts, because
        something is no longer needed."""
        self._generation.notify_waiting()
        current = [rank.held for rank in self._generation.ranks]
        for held in self._inventory.prunable(current, self._generation.watermark):
            self._store.drop(held)
        self._report.send_soon()

    # ------------------------------------------------------------ commits

    def _committed(self, local_rank: int, message: s.Committed) -> None:
        generation, start = self._generation, self._generation.start
        found = generation.committed(local_rank, message)
        if found is None or start is None:
            return
        held, snapshot = found
        current = generation.held()
        if message.persist or self._wanted.has(snapshot.round, snapshot.step):
            self._wanted.add(snapshot.round, snapshot.step, current)
        self.drain.committed(snapshot.step)
        steps = generation.steps()
        alone = start.group_world_size == 1 and len(steps) == self._nproc
        if alone and (not generation.has_own_watermark or min(steps) > generation.watermark):
            same = len(set(steps)) == 1
            self._raise_watermark(snapshot.step if same else self._inventory.whole_here(current))
        mark = generation.watermark
        if any(mark < step < snapshot.step for step in steps):
            given = [rank.held for rank in generation.ranks if rank.held is not None]
            # A dropped segment holds no step.
            self._give_up(self._inventory.abandoned_step(given, mark))
        self._hashing.hash_soon(held)
        self._comparing.committed(held, snapshot, start.first_rank + local_rank)
        if self._replicas.enabled and self._several:
            rank = start.first_rank + local_rank
            self.savers.serve(held, snapshot, start.round, rank)
        for lone in generation.cut_off():
            self._report_missing(lone, snapshot.step, BROKEN)
        if message.persist:
            self._report.send_now()
        else:
            self._report.send_soon()

    def _save_failed(self, local_rank: int, message: s.SaveFailed) -> None:
        start = self._generation.start
        if start is None:
            return
        if message.persist:
            key = round_key(start.round)
            self._wanted.add(key, message.step, self._generation.held())
        self._report_missing(local_rank, message.step, one_line(message.reason))
        self._report.send_now()

    def _report_missing(self, local_rank: int, step: int, reason: str) -> None:
        """Report that a local rank will never have this step, so that no rank waits for it."""
        start = self._generation.start
        if start is not None and self._generation.mark_failed(local_rank, step, reason):
            rank = start.first_rank + local_rank
            self._send(m.ShardBad(start.round, step, rank, reason[:MAX_REASON]))

    # ------------------------------------------------------------ SaverOwner

    def socket_name(self) -> str:
        """The agent's socket, to which the saver connects."""
        return self._server.name

    def serving_host(self) -> str:
        """The address on which the saver serves other nodes; "": none."""
        return self._node.address if self._several else ""

    def saver_ready(self) -> None:
        """Have a new saver, which has no segments open yet, serve and hash what is here."""
        self._shards.compare()
        self._serve()
        for held in self._segments.held:
            self._hashing.hash_now(held)
        self._report.send_now()

    def saver_lost(self) -> None:
        """Handle the saver's exit: start another one if a rank is connected."""
        if any(rank.peer is not None for rank in self._generation.ranks):
            self.savers.ensure()
        self._report.send_soon()

    def remark(self, text: str, level: int = logging.WARNING) -> None:
        """Log a sentence of a rank or the saver, once per generation."""
        self._remarks.log(one_line(text), level)

    # ------------------------------------------------------------ Router

    def holdings(self) -> m.Holdings:
        """What this node holds."""
        generation = self._generation
        held = self._inventory.holdings(
            may_write=generation.may_write, ranks_without=generation.ranks_without
        )
        saver = Endpoint(self._node.address, self.savers.port) if self.savers.port else None
        last, went_on = self._inventory.last(), generation.went_on()
        skipped = max((rank.skipped for rank in generation.ranks), default=0)
        worked, kept = self._inventory.worked, self._comparing.kept
        return m.Holdings(saver, held, self._replicas.enabled, last, went_on, skipped, worked, kept)

    def nodes(self) -> int:
        """Number of nodes in the round."""
        start = self._generation.start
        return 1 if start is None else start.group_world_size

    def _term(self) -> int:
        start = self._generation.start
        return 0 if start is None else start.round.term

    def _serve(self) -> None:
        """Serve all snapshots here to other nodes."""
        if self._several and self.savers.is_connected:
            for held, snapshot, local_round, rank in self._inventory.everything():
                self.savers.serve(held, snapshot, local_round.name, rank)

    # ------------------------------------------------------------ helpers

    def _note(self) -> None:
        self._tasks.start(self._segments.note(self._inventory.rounds()), "noting the rounds")
