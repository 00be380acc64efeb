"""Segments: what a reader believes, where a writer may write, and what a kill leaves behind."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import signal
import time

import pytest
from hypothesis import given, settings, strategies as st

from elasticrun.snapshots.shm.layout import PAGE, Item, ItemKind, lay_out
from elasticrun.snapshots.shm.segment import (
    COMMIT_AT,
    HASHES_AT,
    NONE,
    Segment,
    SegmentError,
    hashes_page,
    initialize,
    segment_bytes,
)
from elasticrun.wire.types import RoundName
from tests.further import examples

ROUND = RoundName(1, 3, "abcd1234")
LATER = RoundName(1, 4, "abcd1235")
PAYLOAD = 256 * 1024
LAYOUT = lay_out(
    [
        Item(
            *("w", ("w",), ItemKind.TENSOR, False, "uint8", (PAYLOAD,), (0,), (PAYLOAD,), False),
            *(0, 704, PAYLOAD, 873),
        )
    ],
    PAGE,
    "2.13.0",
)


def fresh(slots: int = 2) -> tuple[mmap.mmap, Segment]:
    encoded = LAYOUT.encode()
    memory = mmap.mmap(-1, segment_bytes(len(encoded), LAYOUT.slot_bytes, slots))
    view = memoryview(memory)
    initialize(view, layout_length=len(encoded), slot_bytes=LAYOUT.slot_bytes, slots=slots)
    view[PAGE : PAGE + len(encoded)] = encoded
    return memory, Segment(view)


def save(segment: Segment, step: int, *, round: RoundName = ROUND) -> int | None:
    """As a rank does; the payload says which step it is."""
    slot = segment.free_slot()
    if slot is None:
        return None
    newest = max((s.sequence for s in segment.snapshots()), default=0)
    segment.withdraw(slot)
    segment.payload(slot)[:PAYLOAD] = bytes([step % 256]) * PAYLOAD
    segment.commit(slot, round=round, sequence=newest + 1, step=step, layout=LAYOUT.key, values=0)
    return slot


def steps(segment: Segment) -> list[int]:
    return [snapshot.step for snapshot in segment.snapshots()]


def test_a_fresh_one_holds_nothing() -> None:
    _, segment = fresh(3)
    assert segment.layout() == LAYOUT
    assert (segment.watermark, segment.save_at, segment.current) == (NONE, NONE, NONE)
    assert segment.snapshots() == []
    assert segment.free_slot() == 0


def test_the_last_whole_step_is_never_overwritten() -> None:
    _, segment = fresh()
    assert save(segment, 10) == 0
    assert save(segment, 20) == 1
    assert save(segment, 30) is None  # nobody knows that 10 or 20 is whole
    segment.watermark = 10
    assert save(segment, 30) is None  # 20 may be nobody else's
    segment.watermark = 20
    assert save(segment, 30) == 0
    assert steps(segment) == [20, 30]
    assert save(segment, 40) is None
    segment.watermark = 30
    assert save(segment, 40) == 1


def test_a_pinned_one_is_left_alone() -> None:
    _, segment = fresh(3)
    for step in (1, 2, 3):
        save(segment, step)
    segment.watermark = 3
    segment.pin(0)
    assert segment.free_slot() == 1
    segment.pin(1)
    assert segment.free_slot() is None
    segment.pin(0, on=False)
    assert segment.free_slot() == 0


def test_an_older_round_is_told_apart() -> None:
    _, segment = fresh()
    save(segment, 10)
    save(segment, 11, round=LATER)
    old, new = segment.snapshots()
    assert old.is_of(ROUND)
    assert not old.is_of(LATER)
    assert new.is_of(LATER)
    assert new.number == 4


@given(st.integers(0, PAGE - 1), st.integers(1, 255))
def test_a_flipped_byte_of_a_header_is_found_or_harmless(at: int, flip: int) -> None:
    _, segment = fresh()
    save(segment, 10)
    before = segment.read(0)
    where = segment.slot_at(0) + at
    segment._memory[where] ^= flip
    assert segment.read(0) in (None, before)
    in_record, in_word = at < 80, COMMIT_AT <= at < COMMIT_AT + 8
    assert (segment.read(0) is None) == (in_record or in_word)


def test_what_is_of_no_step_is_none() -> None:
    memory, segment = fresh()
    save(segment, -1)
    assert segment.read(0) is None
    assert not segment.snapshots()
    save(segment, 0)
    assert [one.step for one in segment.snapshots()] == [0]
    segment.close()
    memory.close()


def test_hashes_are_those_of_one_snapshot() -> None:
    _, segment = fresh()
    save(segment, 10)
    (snapshot,) = segment.snapshots()
    assert segment.hashes(snapshot) == ()
    page = hashes_page(snapshot.sequence, (1, 2**64 - 1))
    at = segment.slot_at(0) + HASHES_AT
    segment._memory[at : at + len(page)] = page
    assert segment.hashes(snapshot) == (1, 2**64 - 1)
    save(segment, 11)
    segment.watermark = 11
    save(segment, 12)
    assert segment.hashes(segment.snapshots()[-1]) == ()  # the same slot, another snapshot


def test_what_is_no_segment_is_refused() -> None:
    memory, segment = fresh()
    with pytest.raises(SegmentError):
        Segment(memoryview(bytearray(PAGE)))
    with pytest.raises(SegmentError):
        Segment(memoryview(b""))
    with pytest.raises(SegmentError):
        Segment(memoryview(memory)[: len(memory) - PAGE])
    segment._memory[PAGE] ^= 0xFF
    with pytest.raises(SegmentError):
        segment.layout()


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 255)), min_size=1, max_size=8))
@settings(max_examples=examples(50))
def test_a_spoilt_control_page_is_refused_or_bounded(spoilt: list[tuple[int, int]]) -> None:
    memory, segment = fresh()
    for at, flip in spoilt:
        segment._memory[at] ^= flip
    try:
        again = Segment(memoryview(memory))
        assert again.slot_at(again.slots) <= len(memory)
        again.snapshots()
        again.layout()
    except SegmentError:
        pass


@pytest.mark.parametrize(
    "sizes",
    [
        {"layout_length": 10, "slot_bytes": PAGE, "slots": 1},
        {"layout_length": 10, "slot_bytes": PAGE + 1, "slots": 2},
        {"layout_length": -PAGE, "slot_bytes": PAGE, "slots": 2},
        {"layout_length": 10, "slot_bytes": 100 * PAGE, "slots": 2},
    ],
)
def test_impossible_sizes_are_no_segment(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        initialize(memoryview(bytearray(8 * PAGE)), **sizes)


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_step_before() -> None:
    """A writer that is killed at some moment, twenty times, and on until one was in mid-copy: a
    whole step is there each time, and it is what was written."""
    rng = random.Random(5)
    lives = mid_copy = 0
    _, segment = fresh()
    last = 0
    while lives < 20 or not mid_copy:
        lives += 1
        assert lives < 2000, "no kill came in the middle of a copy: this test has proved nothing"
        told, tell = os.pipe()
        writer = os.fork()
        if writer == 0:
            try:
                os.close(told)
                for step in range(last + 1, last + 10_000):
                    save(segment, step)
                    segment.watermark = step  # the only rank there is
                    if step == last + 2:
                        os.write(tell, b".")
            finally:
                os._exit(1)
        os.close(tell)
        assert os.read(told, 1) == b"."
        os.close(told)
        # it runs meanwhile, also where it shares our core
        time.sleep(rng.uniform(0, 0.002))  # the moment is what is tested
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        found = segment.snapshots()
        mid_copy += len(found) < 2
        newest = found[-1]
        assert newest.step >= last + 2
        payload = bytes(segment.payload(newest.slot)[:PAYLOAD])
        whole = bytes([newest.step % 256]) * PAYLOAD
        assert hashlib.sha256(payload).digest() == hashlib.sha256(whole).digest()
        last = newest.step


def test_steps_that_were_given_up_make_room() -> None:
    """This rank has 30, another one has 25 in its place: neither will ever be whole."""
    _, segment = fresh()
    save(segment, 10)
    segment.watermark = 10
    save(segment, 30)
    assert segment.free_slot() is None
    segment.given_up = 29
    assert segment.free_slot() is None
    segment.given_up = 30
    assert save(segment, 40) == 1
    assert steps(segment) == [10, 40]
    assert segment.free_slot() is None
