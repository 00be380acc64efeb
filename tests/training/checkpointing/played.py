"""An agent that a test plays: a real socket, real segments, and the decisions of the test."""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from elasticrun.snapshots.shm.segment import Segment, initialize, segment_bytes
from elasticrun.wire import snapshots as s
from elasticrun.wire.frames import FrameBuffer, encode
from elasticrun.wire.progress import address, mint_name, place
from elasticrun.wire.types import RoundName

NOTHING = s.Resume(RoundName(1, 1, "a"), s.NO_ROUND, -1, 0, False)


@dataclass
class Memory:
    """A segment of one local rank, of one layout."""

    fd: int
    mapping: mmap.mmap
    segment: Segment
    layout: int

    def close(self) -> None:
        self.segment.close()
        self.mapping.close()
        os.close(self.fd)


@dataclass
class Peer:
    sock: socket.socket
    buffer: FrameBuffer = field(default_factory=lambda: FrameBuffer(s.FromPeer))
    here: s.RankHere | None = None


class PlayedAgent:
    """Answers as an agent does. What it is to say is set by attributes before ranks come."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.name = mint_name()
        self.resume = NOTHING
        self.watermark = True  # moves as soon as all ranks have committed a step
        self.unwhole: set[int] = set()
        self.no_segment = ""
        self.may_give = threading.Event()  # until it is set, no segment is given
        self.may_give.set()
        self.no_shard: set[int] = set()
        self.segments: dict[tuple[int, int], Memory] = {}  # local rank, layout
        self.current: dict[int, Memory] = {}
        self.held: dict[tuple[str, int, int], tuple[Memory, s.Committed]] = {}  # round, step, rank
        self.said: list[tuple[int, Any]] = []
        self._news = threading.Condition()
        self._gone = 0  # ranks that have closed their connection
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address(self.name))
        self._listener.listen()
        self._wake, self._stop = socket.socketpair()
        self._peers: dict[int, Peer] = {}
        self._waiting: dict[int, tuple[Peer, int]] = {}
        self._looking = threading.Lock()  # tests look, too
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def place(self, local_rank: int) -> str:
        return place(self.name, local_rank)

    def of(self, kind: type, rank: int | None = None) -> list[Any]:
        """What was said of one kind, by one rank or all."""
        return [m for r, m in self.said if isinstance(m, kind) and rank in (None, r)]

    def until(self, kind: type, count: int = 1) -> list[Any]:
        with self._news:
            assert self._news.wait_for(lambda: len(self.of(kind)) >= count, 240), self.said
        return self.of(kind)

    def until_gone(self) -> None:
        """Wait until a rank has closed its connection."""
        with self._news:
            assert self._news.wait_for(lambda: self._gone, 240)

    def next_life(
        self,
        step: int,
        world: int,
        number: int = 2,
        ranks: int | None = None,
        of: RoundName | None = None,
    ) -> None:
        """The round that is to come resumes from `step` of the present one, or of round `of`, which
        had so many ranks."""
        old = of or self.resume.present
        held = [(f"{old.number}", step, rank) for rank in range(world)]
        with self._news:
            assert self._news.wait_for(lambda: self.held.keys() >= set(held), 240), self.said
        same = ranks is None or ranks == world
        self.resume = s.Resume(RoundName(1, number, "a"), old, step, world, same)
        self.ranks = ranks if ranks is not None else self.ranks
        for memory in self.segments.values():
            for snapshot in memory.segment.snapshots():
                if snapshot.step > step or snapshot.number != old.number:
                    memory.segment.withdraw(snapshot.slot)
                else:
                    memory.segment.pin(snapshot.slot, snapshot.step == step)
            memory.segment.watermark = step

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._wake:
                        return
                    if key.fileobj is self._listener:
                        sock, _ = self._listener.accept()
                        self._peers[sock.fileno()] = Peer(sock)
                        selector.register(sock, selectors.EVENT_READ)
                    elif not self._read(self._peers[key.fd]):
                        selector.unregister(key.fileobj)
                        self._peers.pop(key.fd).sock.close()
                        with self._news:
                            self._gone += 1
                            self._news.notify_all()

    def _read(self, peer: Peer) -> bool:
        try:
            data = peer.sock.recv(65536)
        except OSError:
            return False
        for message in peer.buffer.feed(data):
            if isinstance(message, s.RankHere):
                peer.here = message
            self.said.append((peer.here.rank, message))
            with contextlib.suppress(OSError):
                self._answer(peer, peer.here, message)
            with self._news:
                self._news.notify_all()
        return bool(data)

    def _answer(self, peer: Peer, here: s.RankHere, message: Any) -> None:
        if isinstance(message, s.RankHere):
            peer.sock.sendall(encode(self.resume))
        elif isinstance(message, s.NeedSegment):
            self._give(peer, here, message)
        elif isinstance(message, s.Committed):
            self._commit(here, message)
            self.look()
        elif isinstance(message, s.AwaitRoom):
            with self._looking:
                self._waiting[here.local_rank] = (peer, message.whole)
            self.look()
        elif isinstance(message, s.WantShard):
            self._shard(peer, message.rank)
        elif isinstance(message, s.IsWhole):
            ok = message.rank not in self.unwhole
            peer.sock.sendall(encode(s.Whole(message.rank, ok, "" if ok else "a byte was flipped")))
        elif isinstance(message, s.CannotRestore):
            peer.sock.shutdown(socket.SHUT_RDWR)
        else:
            assert not isinstance(message, s.Restored) or message.step >= 0

    def look(self) -> None:
        """Answer who waits for what has come."""
        with self._looking:
            for local_rank, (peer, whole) in list(self._waiting.items()):
                segment = self.current[local_rank].segment
                come = segment.watermark >= whole or segment.save_at > whole
                if (come and whole >= 0) or (whole < 0 and segment.free_slot() is not None):
                    del self._waiting[local_rank]
                    peer.sock.sendall(encode(s.RoomThere()))

    def _give(self, peer: Peer, here: s.RankHere, need: s.NeedSegment) -> None:
        with self._news:
            self._news.notify_all()
        assert self.may_give.wait(240)
        if self.no_segment:
            peer.sock.sendall(encode(s.SegmentHere(False, self.no_segment, False)))
            return
        key = (here.local_rank, need.layout)
        fresh = key not in self.segments
        if fresh:
            size = segment_bytes(need.layout_length, need.slot_bytes, need.slots)
            fd = os.memfd_create("played")
            os.posix_fallocate(fd, 0, size)
            mapping = mmap.mmap(fd, size)
            initialize(
                memoryview(mapping),
                layout_length=need.layout_length,
                slot_bytes=need.slot_bytes,
                slots=need.slots,
            )
            memory = Memory(fd, mapping, Segment(memoryview(mapping)), need.layout)
            self.segments[key] = memory
        self.current[here.local_rank] = self.segments[key]
        _send_fd(peer.sock, encode(s.SegmentHere(True, "", fresh)), self.segments[key].fd)

    def _commit(self, here: s.RankHere, said: s.Committed) -> None:
        memory = self.current[here.local_rank]
        round_ = self.resume.present
        self.held[f"{round_.number}", said.step, here.rank] = (memory, said)
        whole = all((f"{round_.number}", said.step, r) in self.held for r in range(self.ranks))
        if whole and self.watermark:
            for one in self.current.values():
                one.segment.watermark = said.step
                for snapshot in one.segment.snapshots():
                    if snapshot.step < said.step:
                        one.segment.pin(snapshot.slot, False)

    def _shard(self, peer: Peer, rank: int) -> None:
        found = self.held.get((f"{self.resume.round.number}", self.resume.step, rank))
        if found is None or rank in self.no_shard:
            reason = f"the shard of rank {rank} is gone"
            peer.sock.sendall(encode(s.ShardHere(False, reason, rank, 0, 0)))
            return
        memory, said = found
        frame = encode(s.ShardHere(True, "", rank, said.slot, said.sequence))
        _send_fd(peer.sock, frame, memory.fd)

    def close(self) -> None:
        if self._stop.fileno() < 0:
            return
        self._stop.send(b"x")
        self._thread.join(240)
        for peer in self._peers.values():
            peer.sock.close()
        for sock in (self._listener, self._wake, self._stop):
            sock.close()
        for memory in self.segments.values():
            memory.close()


def _send_fd(sock: socket.socket, frame: bytes, fd: int) -> None:
    sent = socket.send_fds(sock, [frame], [fd])
    if sent < len(frame):
        sock.sendall(frame[sent:])


@contextmanager
def playing(ranks: int = 1) -> Iterator[PlayedAgent]:
    agent = PlayedAgent(ranks)
    try:
        yield agent
    finally:
        agent.close()
