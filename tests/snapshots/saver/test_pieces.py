"""What a saver is made of, piece by piece: hashing beside a writer, pools, a slot that changes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from elasticrun.host.system.reasons import reason_of
from elasticrun.snapshots.saver import hashing, transfer
from elasticrun.snapshots.saver.hashing import Corrupt, OpenSegment, Overwritten
from elasticrun.snapshots.saver.pool import Inbox, WorkerPool, WorkItem
from elasticrun.snapshots.saver.transfer import PeerLink, ServedSnapshot
from elasticrun.snapshots.shm.segment import Snapshot, round_key
from elasticrun.wire.frames import encode
from tests.forkserver.driver import LIMIT
from tests.snapshots.dcp.slots import ROUND
from tests.snapshots.saver.play import Shared, state


class OverwrittenWhileRead(OpenSegment):
    """A segment whose rank begins its next snapshot while this one is read."""

    shared: Shared

    def stretches(self, snapshot: Snapshot) -> Iterator[memoryview]:
        for stretch in super().stretches(snapshot):
            yield stretch
            self.shared.segment.withdraw(0)


def test_a_snapshot_that_is_overwritten_while_it_is_hashed_has_no_hashes() -> None:
    with closing(Shared(state().segment())) as shared:
        opened = OverwrittenWhileRead(os.dup(shared.fd), 0)
        opened.shared = shared
        snapshot = opened.snapshot(0, 1)
        with pytest.raises(Overwritten, match="step 7 of local rank 0 was overwritten"):
            hashing.hash_snapshot(opened, 0, 1)
        assert opened.stored_hashes(snapshot) == shared.segment.hashes(snapshot) == ()


def test_a_descriptor_and_a_mapping_go_with_the_last_who_has_them() -> None:
    def mappings() -> int:
        place = f" {os.fstat(shared.fd).st_ino} "
        return sum(place in line for line in Path("/proc/self/maps").read_text().splitlines())

    with closing(Shared(state().segment())) as shared:
        opened = OpenSegment(os.dup(shared.fd), 0)
        assert mappings() == 2  # its own, and ours
        descriptor = opened.descriptor
        hashing.hash_snapshot(opened, 0, 1)
        assert hashing.check_snapshot(opened, 0, 1) == ""
        with pytest.raises(Corrupt, match="the number of blocks"):
            hashing._compare(opened, opened.snapshot(0, 1), (1, 2, 3)[:0])
        del opened
        with pytest.raises(OSError):
            os.fstat(descriptor)
        assert mappings() == 1


def test_a_slot_that_changes_while_it_is_sent_is_said_to_have() -> None:
    with closing(Shared(state(elements=4 << 20).segment())) as shared:
        opened = OpenSegment(os.dup(shared.fd), 0)
        ours, theirs = socket.socketpair()
        host = threading.Thread(
            target=transfer.serve,
            args=(theirs, "", lambda request, data: ServedSnapshot(opened, 0, 1), lambda: None),
        )
        host.start()
        with ours, theirs:
            link = PeerLink(ours)
            link.restart_limit(64 << 20)
            link.send_message(transfer.Dial(transfer.VERSION, "aa", False))
            transfer.read(link.payload(), transfer.HOST_TYPES, transfer.Counter)
            link.send(encode(transfer.Shown("")))
            link.send_message(transfer.Get(round_key(ROUND).hex(), 7, 0, True))
            head = transfer.read(link.payload(), transfer.HOST_TYPES, transfer.Head)
            shared.segment.withdraw(0)  # most of it waits for us to read
            link.receive(head.layout_length + head.tensor_bytes + 8 + head.values_bytes + 8)
            sent = transfer.read(link.payload(), transfer.HOST_TYPES, transfer.Sent)
        host.join(LIMIT)
        assert not sent.ok
        assert "overwritten" in sent.reason


# ---------------------------------------------------------------- pools


class Loop:
    """A loop that a test turns."""

    def __init__(self) -> None:
        self._woken = threading.Event()
        self.inbox = Inbox(self._woken.set)

    def turn(self) -> None:
        """Wait for a call and make it, and those that are there."""
        assert self._woken.wait(LIMIT)
        self._woken.clear()
        for call in self.inbox.drain():
            call()


def test_a_lane_does_urgent_work_first_and_the_newest_of_a_name() -> None:
    loop = Loop()
    pool = WorkerPool("test", 1, loop.inbox.post)
    go, did = threading.Event(), []

    def piece(word: str, *, urgent: bool = True, name: str | None = None) -> WorkItem[str]:
        def work(stop: threading.Event) -> str:
            assert go.wait(LIMIT)
            if word == "bad":
                raise OSError(28, "no space", "file")
            return word

        return WorkItem(work, reason_of, did.append, urgent, name)

    pool.add(piece("first"))
    pool.add(piece("old hash", urgent=False, name="key"))
    pool.add(piece("new hash", urgent=False, name="key"))
    pool.add(piece("dropped", name="gone"))
    pool.add(piece("bad"))
    assert pool.drop("gone")
    assert not pool.drop("gone")
    go.set()
    while len(did) < 3:
        loop.turn()
    assert did == ["first", "file: no space", "new hash"]


def test_a_wide_lane_does_several_at_a_time() -> None:
    loop = Loop()
    pool = WorkerPool("test", 2, loop.inbox.post)
    meet = threading.Barrier(2)
    did: list[int] = []
    for _ in range(2):
        pool.add(WorkItem(lambda stop: meet.wait(LIMIT), lambda error: -1, did.append))
    while len(did) < 2:
        loop.turn()
    assert sorted(did) == [0, 1]
