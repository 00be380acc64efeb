"""What scripts do not show of comparing replicas: answers that are missing or late, shards, and
bounds."""

from __future__ import annotations

from collections.abc import Mapping

from elasticrun.core.snapshots.agreement import (
    APART,
    LIMIT,
    MAX_LEARNING,
    RETRY,
    SHARE,
    Agreement,
    Difference,
)
from elasticrun.core.snapshots.ledger import Ledger
from elasticrun.core.snapshots.types import Outbox
from elasticrun.wire import messages as m
from elasticrun.wire.types import MAX_PARTS, RoundName, key_of_name, parts_of

NAME = RoundName(1, 1, "n")
STEP = 10


def digest_of(values: list[str]) -> int:
    return key_of_name(" ".join(values))


class Played:
    """A round of ranks on a node each (n0, n1, ...), whose tensors the test says."""

    def __init__(self, *contents: int, tensors: int = 5, mode: str = "tell") -> None:
        self.tensors = tensors
        self.outbox = Outbox()
        self.agreement = Agreement(mode, self.outbox)
        self.ledger = Ledger(NAME, len(contents))
        self.nodes = [f"n{rank}" for rank in range(len(contents))]
        for rank, content in enumerate(contents):
            held = m.Holding(NAME, STEP, rank, len(contents), (content,), wanted=False)
            self.ledger.update(f"n{rank}", [held])
        self.values = [[f"v{n}" for n in range(tensors)] for _ in contents]
        self.now = 0.0
        self.found: list[Difference] = []

    def proceed(self, now: float) -> None:
        self.now = now
        self.found += self.agreement.proceed(self.ledger, self.nodes, now)

    def orders(self) -> list[tuple[tuple[str, ...], m.CompareReplicas]]:
        found = [
            (nodes, order)
            for nodes, order in self.outbox.orders
            if isinstance(order, m.CompareReplicas)
        ]
        self.outbox.orders.clear()
        return found

    def said(self) -> list[str]:
        return [line for line, _ in self.outbox.notes]

    def answer(
        self, steps: Mapping[int, int] | None = None, without: tuple[int, ...] = ()
    ) -> m.CompareReplicas | None:
        """Answer until nothing more is asked; the first order."""
        first = None
        while orders := self.orders():
            ((nodes, order),) = orders
            first = first or order
            for node in nodes:
                rank = int(node[1:])
                if rank not in without:
                    step = (steps or {}).get(rank, order.step + (not order.last))
                    self.tell(rank, order, step)
        return first

    def tell(self, rank: int, order: m.CompareReplicas, step: int) -> None:
        parts = [(0, self.tensors)]
        if order.last:
            parts = parts_of(order.first, order.last, MAX_PARTS)
        named = [(f"t{n}", value) for n, value in enumerate(self.values[rank])]
        digests = tuple(
            digest_of([v for t, v in named[a:b] if key_of_name(t) not in order.left_out])
            for a, b in parts
        )
        single = order.last and all(b - a == 1 for a, b in parts)
        names = tuple(f"t{a}" for a, _ in parts) if single else ()
        made = m.RankDigests(rank, self.tensors, digests, names)
        report = m.Digests(NAME, step, order.number, (made,), 0.5)
        self.found += self.agreement.on_digests(f"n{rank}", report, self.now)


def equal(*contents: int, **more: object) -> Played:
    """Replicas that were equal once."""
    played = Played(*contents, **more)  # type: ignore[arg-type]
    played.proceed(0.0)
    played.answer()
    assert played.agreement.agreed == STEP + 1
    return played


def test_the_next_comparison_waits_for_what_the_last_one_cost() -> None:
    played = equal(1, 1)
    assert played.agreement.next_deadline() == SHARE * 0.5 > APART
    played.proceed(SHARE * 0.5 - 0.1)
    assert not played.orders()
    played.proceed(SHARE * 0.5)
    assert len(played.orders()) == 1


def test_a_rank_that_had_passed_the_step_is_left_out_and_the_next_step_is_further_ahead() -> None:
    played = equal(1, 1, 1)
    played.values[0][2] = "flipped"
    played.proceed(100.0)
    played.answer(steps={2: STEP + 5})
    (one,) = played.found
    assert (one.ranks, one.majority) == ((0, 1), ()), "two that differ, and the third is not known"
    assert one.step == STEP + 1
    played.found.clear()
    played.agreement = Agreement("tell", played.outbox)
    played.proceed(0.0)
    assert played.answer(steps={0: 14, 1: 14, 2: 18}) is not None
    assert not played.agreement.agreed > 0
    assert played.agreement.next_deadline() == SHARE * 0.5
    played.proceed(SHARE * 0.5)
    ((_, order),) = played.orders()
    assert order.step == STEP + 4


def test_who_does_not_answer_is_waited_for_and_then_left_out() -> None:
    played = equal(1, 1, 1)
    played.values[1][4] = "flipped"
    played.proceed(100.0)
    played.answer(without=(2,))
    assert played.agreement.next_deadline() == 100.0 + LIMIT
    played.proceed(100.0 + LIMIT)
    played.answer()
    (one,) = played.found
    assert (one.ranks, one.majority, one.tensor) == ((0, 1), (), "t4")
    assert one.sides == ((0,), (1,))
    assert played.agreement.agreed == STEP + 1


def test_a_node_that_is_gone_is_not_waited_for() -> None:
    played = equal(1, 1, 1)
    played.proceed(100.0)
    played.answer(without=(2,))
    played.agreement.forget("n2")
    played.proceed(101.0)
    assert played.agreement.running is None
    assert played.agreement.next_deadline() == 101.0 + SHARE * 0.5


def test_only_replicas_of_one_shard_are_compared_with_each_other() -> None:
    """HSDP: two shards on three ranks each, of which one has a single tensor that differs."""
    played = equal(1, 2, 1, 2, 1, 2)
    played.values[3][1] = played.values[3][3] = "flipped"
    played.proceed(100.0)
    played.answer()
    (one,) = played.found
    assert (one.ranks, one.majority, one.tensor) == ((3,), (1, 5), "t1")
    assert one.nodes == ("n3",)
    assert one.agreed == STEP + 1


def test_a_rank_without_a_replica_is_not_asked() -> None:
    played = Played(1, 2, 3)
    played.proceed(0.0)
    assert not played.orders()
    assert played.agreement.next_deadline() == APART


def test_nothing_is_asked_before_all_nodes_have_said_what_they_hold() -> None:
    played = Played(1, 1)
    played.nodes.remove("n1")
    played.proceed(0.0)
    assert not played.orders()
    assert played.agreement.next_deadline() == RETRY
    played.proceed(LIMIT)
    assert len(played.orders()) == 1


def test_a_rank_that_was_named_is_not_compared_again() -> None:
    played = equal(1, 1, 1)
    played.values[2][0] = "flipped"
    played.proceed(100.0)
    played.answer()
    played.ledger.distrust(played.found[0].ranks, played.found[0].agreed + 1)
    played.proceed(200.0)
    ((nodes, _),) = played.orders()
    assert nodes == ("n0", "n1")


def test_sides_without_a_majority_are_named_once() -> None:
    played = equal(1, 1)
    played.values[1][3] = "flipped"
    played.proceed(100.0)
    played.answer()
    assert [one.sides for one in played.found] == [((0,), (1,))]
    played.proceed(200.0)
    assert not played.orders()


def test_many_tensors_that_differ_by_design_are_all_found() -> None:
    played = Played(1, 1, 1, tensors=5000)
    mine = range(0, 5000, 50)
    for number in mine:
        played.values[1][number] = "mine"
    played.proceed(0.0)
    played.answer()
    assert "in 100 tensors (t0, t50, t100 and 97 more)" in played.said()[0]
    played.proceed(100.0)
    played.answer()
    assert played.agreement.agreed == STEP + 1
    assert not played.found


def test_replicas_that_differ_everywhere_are_not_compared() -> None:
    played = Played(1, 1, tensors=m.MAX_LEFT_OUT + 1)
    played.values[1] = ["other"] * played.tensors
    played.proceed(0.0)
    played.answer()
    assert "in too many tensors: they are not compared" in played.said()[0]
    assert played.agreement.next_deadline() is None


def test_replicas_that_differ_in_something_else_each_time_are_given_up() -> None:
    played = Played(1, 1, tensors=50)
    for turn in range(MAX_LEARNING):
        played.values[1][turn] = "other"
        played.proceed(100.0 * turn)
        played.answer()
    assert "too many tensors" in played.said()[-1]
    assert played.agreement.next_deadline() is None


def test_the_next_master_knows_what_is_intended() -> None:
    played = Played(1, 1)
    played.values[1][2] = "mine"
    played.proceed(0.0)
    played.answer()
    played.proceed(100.0)
    played.answer()
    facts = played.agreement.facts()
    assert (facts.has_agreed, facts.left_out) == (True, (key_of_name("t2"),))
    played.agreement = Agreement("tell", played.outbox)
    played.agreement.restore(facts)
    played.values[0][3] = "flipped"
    played.proceed(0.0)
    played.answer()
    assert [one.tensor for one in played.found] == ["t3"]


def test_off_asks_nothing() -> None:
    played = Played(1, 1, mode="off")
    played.proceed(0.0)
    assert not played.orders()
    assert played.agreement.next_deadline() is None


def test_a_step_to_return_to_is_kept_only_if_the_job_may_return() -> None:
    for mode in ("tell", "restart", "exclude"):
        played = Played(1, 1, mode=mode)
        played.proceed(0.0)
        ((_, order),) = played.orders()
        for rank in (0, 1):
            played.tell(rank, order, STEP + 1)
        kept = [order for _, order in played.outbox.orders if isinstance(order, m.KeepStep)]
        assert kept == ([] if mode == "tell" else [m.KeepStep(NAME, STEP + 1)])
