"""What readers are shown of looks, and looks that a person wants."""

from __future__ import annotations

import json

from msgspec.structs import replace

from elasticrun.core import events as fx
from elasticrun.core.sight.hangs.sample import Sample
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName
from tests.core import by_hand
from tests.core.sight import worlds

NAME = RoundName(1, 1, "aa")


def group(key: str, ranks: str, count: int) -> m.StackGroup:
    return m.StackGroup(key, ranks, count, "", f"torch.nn forward\ntrain.py:{count} {key}")


def test_stacks_of_all_nodes_come_together_the_rarest_first() -> None:
    call = Sample(m.Inspect(NAME, 1, stacks=True), ["a", "b", "c"], 0.0)
    call.take("a", m.Stacks(NAME, 1, (group("step", "0-3", 4),), folder="logs/hang-1"))
    call.take(
        "b", m.Stacks(NAME, 1, (group("step", "4,5", 2), group("load", "6", 1)), "rank 7: no")
    )
    call.take("nobody", m.Stacks(NAME, 1, ()))
    assert [(row.ranks, row.count) for row in call.stacks()] == [("6", 1), ("0-5", 6)]
    assert call.stack_of(5) == "torch.nn forward\ntrain.py:4 step"
    assert call.lines_of(6) == {"": "train.py:1 load"}
    assert call.missing() == "rank 7: no; no answer from c"
    assert call.folder("a") == call.folder("b") == ("logs/hang-1", "a")
    assert not call.is_done


def test_what_ranks_have_written_comes_together_in_its_order() -> None:
    call = Sample(m.Inspect(NAME, 1, lines=True), ["a", "b"], 0.0)
    for node, ranks in (("a", "0-3"), ("b", "4-7")):
        lines = (group("old", ranks, 4), group(f"own {node}", ranks[0], 1), group("new", ranks, 4))
        call.take(node, m.Inspected(NAME, 1, 0, (), (), lines))
    assert [row.ranks for row in call.last_lines()] == ["0-7", "0", "0-7", "4"]


def seen(rank: int, *, quiet: float = 0.0) -> m.RankSeen:
    at = m.Position(0, 31, 30, call="all_reduce [4]") if rank else m.Position(0, 30, 30)
    return m.RankSeen(rank, 1, m.Being.SLEEPS, True, True, 0.0, 0.0, quiet=quiet, at=(at,))


def inspected(order: m.Inspect, *ranks: int, quiet: float = 0.0) -> m.Inspected:
    groups = (m.GroupSeen("0", "dp", ""),)
    return m.Inspected(
        order.round, order.number, 0, groups, tuple(seen(r, quiet=quiet) for r in ranks)
    )


def rows(master: by_hand.Master, number: int) -> list[tuple[int, str, str, str]]:
    """Rank, state, whom it waits for and its call, of the picture that was replied."""
    (reply,) = [e.reply for e in master.effects if isinstance(e, fx.Replied) and e.number == number]
    picture = json.loads(reply.body)
    return [(r["rank"], r["state"], r["waits_for"], r["call"]) for r in picture["ranks"]]


def test_a_person_is_shown_what_ranks_do_at_this_moment() -> None:
    master = by_hand.Master()
    master.running()
    master.feed(fx.Requested(1, m.Request("picture", live=True)))
    order = master.orders(1)[0]
    assert isinstance(order, m.Inspect)
    assert master.orders(2) == [order]
    master.hear(1, inspected(order, 0, 1, quiet=6.0))
    assert not [effect for effect in master.effects if isinstance(effect, fx.Replied)]
    master.hear(2, inspected(order, 2, 3))
    call = "all_reduce #31 [4] of group dp"
    assert rows(master, 1) == [
        (0, "stepping", "", ""),
        (1, "waiting", "0", call),
        (2, "stepping", "", call),
        (3, "stepping", "", call),
    ]
    master.now += 0.5
    master.feed(fx.Requested(2, m.Request("picture", live=True)))
    assert not master.orders(1), "another reader is shown the same look"
    assert len(rows(master, 2)) == 4


def test_who_does_not_answer_is_not_waited_for_for_ever() -> None:
    master = by_hand.Master()
    master.running()
    master.feed(fx.Requested(1, m.Request("stacks")))
    due = master.job.next_deadline()
    assert due is not None
    assert due <= 10.0
    master.now = 10.0
    master.feed(fx.Tick())
    assert rows(master, 1) == []


def test_a_verdict_is_told_of_once_and_once_more_when_it_is_over() -> None:
    def plan(rank: int, step: int) -> list[tuple[str, float]]:
        load = 200.0 if (step, rank) == (8, 3) else 0.1
        return [("compute", 0.5), ("load", load), ("world", 0.0)]

    world = worlds.Training(plan).run(90.0)
    world.master.feed(fx.Requested(1, m.Request("stacks")))  # which no file is written of
    world.run(95.0)
    verdict = world.master.job.picture().verdict
    assert verdict is not None
    assert verdict.folder == "logs/a"
    told = world.run(400.0).judged
    assert [(one.over, one.verdict.klass, one.verdict.ranks) for one in told] == [
        (False, "strong", "3"),
        (True, "strong", "3"),
    ]
    first, last = (one.verdict for one in told)
    assert (first.place, first.folder) == ("train.py:41 load", "logs/a")
    assert "not restarted automatically" in first.then
    assert 60.0 <= first.since < 72.0 < 198.0 < last.since < 202.0


def test_the_hang_limit_counts_from_the_last_movement_whatever_was_seen_since() -> None:
    """A rank works for half a minute and idles then; --on-hang=restart itself would wait longer."""

    def plan(rank: int, step: int) -> list[tuple[str, float]]:
        return [("compute", float("inf") if (step, rank) == (8, 3) else 0.5), ("world", 0.0)]

    watch = m.WatchSpec(on_hang="restart", hang_limit=40.0)
    world = worlds.Training(plan, spec=replace(by_hand.SPEC, watch=watch)).run(25.0)
    world.ranks[3].does = worlds.LOADS
    world.run(400.0)
    assert world.over_at is not None
    assert 40.0 <= world.over_at - 4.0 < 46.0


def test_a_short_hang_limit_is_kept_where_early_looks_have_been_made_already() -> None:
    def plan(rank: int, step: int) -> list[tuple[str, float]]:
        load = {4: 12.0, 8: float("inf")}.get(step, 0.1) if rank == 3 else 0.1
        return [("load", load), ("world", 0.0)]

    watch = m.WatchSpec(hang_limit=20.0)
    world = worlds.Training(plan, spec=replace(by_hand.SPEC, watch=watch)).run(100.0)
    assert world.over_at is not None
    assert world.over_at < 40.0
