"""Ranks that could not save a step: one line with all of them."""

from __future__ import annotations

from elasticrun.core.snapshots.failed_saves import FAILURE_WINDOW, FailedSaves
from elasticrun.core.snapshots.types import Outbox


def lines(outbox: Outbox) -> list[tuple[str, str]]:
    found, outbox.notes = outbox.notes, []
    return found


def test_all_ranks_are_named_in_one_line() -> None:
    failed = FailedSaves(outbox := Outbox())
    for rank in (1, 0, 2):
        failed.add(10, rank, f"n{rank // 2}", "no space")
        failed.proceed(0.0, 4)
    assert lines(outbox) == []
    failed.add(10, 3, "n1", "no space")
    failed.proceed(0.1, 4)
    said = "ranks 0-3 could not save step 10: no space (nodes n0 and n1)"
    assert lines(outbox) == [(said, "warning")]
    assert failed.next_deadline() is None
    for rank in range(4):  # every step would say the same
        failed.add(20, rank, "n0", "no space")
    failed.proceed(1.0, 4)
    assert lines(outbox) == []


def test_a_line_waits_for_others_no_longer_than_the_window() -> None:
    failed = FailedSaves(outbox := Outbox())
    failed.add(10, 1, "n0", "no space")
    failed.proceed(5.0, 2)
    assert failed.next_deadline() == 5.0 + FAILURE_WINDOW
    failed.proceed(5.0 + FAILURE_WINDOW, 2)
    assert lines(outbox) == [("rank 1 could not save step 10: no space (node n0)", "warning")]
    failed.add(20, 0, "n0", "no space")  # not told yet
    failed.add(20, 1, "n0", "no memory")  # another reason
    failed.flush()
    assert [text for text, _ in lines(outbox)] == [
        "rank 0 could not save step 20: no space (node n0)",
        "rank 1 could not save step 20: no memory (node n0)",
    ]
    failed.add(30, 0, "n0", "no space")
    failed.clear()
    failed.add(10, 0, "n0", "no space")  # in the next round
    failed.flush()
    assert len(lines(outbox)) == 1


def test_a_lost_checkpoint_is_always_reported() -> None:
    failed = FailedSaves(outbox := Outbox())
    for step in (10, 20):
        failed.add(step, 0, "n0", "no space")
        assert failed.give_up(step)
        failed.add(step, 1, "n0", "no space")
        failed.proceed(float(step), 2)
        why = "ranks 0-1 could not save it: no space (node n0)"
        assert lines(outbox) == [(f"the checkpoint of step {step} is not written: {why}", "error")]
    assert failed.give_up(20), "it was said"
    assert not failed.give_up(30), "the caller says it"
    for rank in range(2):
        failed.add(40, rank, "n0", "no space")
    failed.proceed(40.0, 2)
    assert lines(outbox) == [], "the reason is known"
    for _ in range(2):
        assert failed.give_up(40), "a node wants it, and says so late"
    (line,) = lines(outbox)
    assert line == (f"the checkpoint of step 40 is not written: {why}", "error")
