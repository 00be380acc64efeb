"""Which node copies what, and which steps count meanwhile; by hand."""

from __future__ import annotations

import itertools

from elasticrun.config import REPLICA_LIMIT
from elasticrun.core.snapshots.checkpoints import divide
from elasticrun.core.snapshots.ledger import Ledger
from elasticrun.core.snapshots.replication import PATIENCE
from elasticrun.core.snapshots.snapshots import Snapshots
from elasticrun.wire import messages as m
from tests.core.snapshots.saves import R1, R2, SAVER


class Saves(Snapshots):
    """Three nodes of two ranks each."""

    def __init__(self, nodes: str = "abc") -> None:
        names = itertools.count(1)
        super().__init__(m.SaveSpec(True, 60.0), lambda: f"try{next(names)}")
        self.nodes = nodes
        self.world = 2 * len(nodes)
        self.own: dict[str, list[int]] = {node: [] for node in nodes}
        self.copied: dict[str, list[m.Holding]] = {node: [] for node in nodes}
        self.round = R1
        self.replicas = True
        self.savers = True
        self.begin_round(m.RoundInfo(R1, self.world), self.seats())

    def seats(self) -> dict[str, int]:
        return {node: at for at, node in enumerate(self.nodes)}

    def contents(self, node: str) -> tuple[int, int]:
        first = 2 * self.nodes.index(node)
        return (first + 1, first + 2)

    def holding(self, node: str, step: int, *, replica: bool = False) -> m.Holding:
        first = 2 * self.nodes.index(node)
        wanted = False
        return m.Holding(
            self.round, step, first, self.world, self.contents(node), wanted, replica=replica
        )

    def say(self, node: str, now: float = 0.0) -> None:
        held = (*(self.holding(node, s) for s in self.own[node]), *self.copied[node])
        saver = SAVER[node] if self.savers else None
        self.on_holdings(node, m.Holdings(saver, held, self.replicas), now)

    def commit(self, step: int, now: float = 0.0) -> None:
        for node in self.nodes:
            self.own[node].append(step)
            self.say(node, now)

    def copies(self, node: str, of: str, step: int, now: float = 0.0) -> None:
        self.copied[node] = [self.holding(of, step, replica=True)]
        self.say(node, now)

    def told(self) -> dict[str, m.Replicate]:
        orders, self.outbox.orders = self.outbox.orders, []
        return {nodes[0]: one for nodes, one in orders if isinstance(one, m.Replicate)}

    def says(self) -> str:
        news, self.outbox.notes = self.outbox.notes, []
        return "; ".join(text for text, _ in news)


class Ddp(Saves):
    """Every rank has the whole state."""

    def contents(self, node: str) -> tuple[int, int]:
        return (7, 7)


class Hybrid(Saves):
    """a and b have the same shards, c one of its own and one of theirs."""

    def contents(self, node: str) -> tuple[int, int]:
        return (3, 2) if node == "c" else (1, 2)


def test_each_node_copies_from_the_one_before() -> None:
    saves = Saves()
    saves.commit(10)
    orders = saves.told()
    assert {node: one.ranks for node, one in orders.items()} == {
        "b": (0, 1),
        "c": (2, 3),
        "a": (4, 5),
    }
    assert orders["b"] == m.Replicate(R1, 10, 6, (0, 1), (1, 2), SAVER["a"])


def test_the_watermark_waits_for_the_last_copy() -> None:
    saves = Saves()
    saves.commit(10)
    assert saves.points.watermark == -1
    saves.copies("b", "a", 10)
    saves.copies("c", "b", 10)
    assert saves.points.watermark == -1
    saves.copies("a", "c", 10)
    assert saves.points.watermark == 10
    assert saves.says() == "every part of step 10 is in the memory of two nodes"
    assert "on two nodes" in saves.status()
    saves.commit(20)
    assert saves.points.watermark == 10, "20 is whole, and would be lost with a node"


def test_only_what_one_node_holds_alone_is_copied() -> None:
    saves = Hybrid()
    saves.commit(10)
    assert {node: one.ranks for node, one in saves.told().items()} == {"a": (4,)}


def test_two_ranks_of_a_node_with_the_same_content_are_copied_once() -> None:
    class Paired(Saves):
        def contents(self, node: str) -> tuple[int, int]:
            return (self.nodes.index(node) + 1,) * 2  # type: ignore[return-value]

    saves = Paired()
    saves.commit(10)
    assert {node: one.ranks for node, one in saves.told().items()} == {
        "b": (0,),
        "c": (2,),
        "a": (4,),
    }


def test_one_node_has_nobody_to_copy_to() -> None:
    saves = Saves("a")
    saves.commit(10)
    assert saves.points.watermark == 10
    assert not saves.says()


def test_one_step_at_a_time_the_newest() -> None:
    saves = Saves()
    saves.commit(10)
    saves.told()
    saves.commit(20)
    saves.commit(30)
    assert not saves.told()
    for node, of in ("ba", "cb", "ac"):
        saves.copies(node, of, 10)
    assert {one.step for one in saves.told().values()} == {30}


def test_a_source_without_a_saver_is_waited_for() -> None:
    saves = Saves("ab")
    saves.savers = False
    saves.commit(10)
    assert not saves.told()
    saves.savers = True
    saves.say("a")
    assert list(saves.told()) == ["b"]


def test_a_stream_that_stands_again_is_told_again() -> None:
    saves = Saves("ab")
    saves.commit(10)
    assert sorted(saves.told()) == ["a", "b"]
    saves.attached("b", 1.0, member=True)
    saves.say("b", 1.0)
    assert sorted(saves.told()) == ["b"]
    saves.say("b", 1.0)
    assert not saves.told()


def test_who_cannot_copy_says_why_and_the_step_counts() -> None:
    saves = Saves("ab")
    saves.commit(10)
    saves.not_replicated("b", m.NotReplicated(R1, 9, "an older one"), 1.0)
    assert saves.points.watermark == -1
    saves.not_replicated("b", m.NotReplicated(R1, 10, "there is no room"), 1.0)
    assert saves.points.watermark == 10
    assert "step 10 is not in the memory of two nodes: there is no room (node b)" in saves.says()
    saves.commit(20)
    saves.not_replicated("b", m.NotReplicated(R1, 20, "there is no room"), 2.0)
    assert saves.points.watermark == 20
    assert not saves.says(), "once is enough"
    saves.commit(30)
    for node, of in ("ba", "ab"):
        saves.copies(node, of, 30)
    assert saves.points.watermark == 30
    assert "every part of step 30" in saves.says()


def test_a_copy_that_never_comes_is_given_up() -> None:
    saves = Saves("ab")
    saves.commit(10, now=5.0)
    assert saves.next_deadline() == 5.0 + REPLICA_LIMIT
    saves.overslept(3.0)
    saves.proceed(5.0 + REPLICA_LIMIT)
    assert saves.points.watermark == -1
    saves.proceed(8.0 + REPLICA_LIMIT)
    assert saves.points.watermark == 10
    assert f"longer than {REPLICA_LIMIT:g} s" in saves.says()


def test_who_leaves_copies_nothing() -> None:
    saves = Saves()
    saves.commit(10)
    saves.told()
    saves.nodes_leave(["b"], 1.0)
    saves.proceed(1.0)
    orders = saves.told()
    assert "b" not in orders


def test_steps_are_not_given_up_while_one_is_paired() -> None:
    saves = Saves("ab")
    saves.commit(10)
    saves.own["a"].append(20)
    saves.say("a")
    saves.own["b"].append(30)
    saves.say("b")
    assert saves.points.watermark == -1
    assert not [one for _, one in saves.outbox.orders if isinstance(one, m.Watermark)]
    assert saves.points.choose().restore == m.Restore(R1, 10, 4)
    for node, of in ("ba", "ab"):
        saves.copies(node, of, 10)
    assert saves.points.watermark == 10
    (mark,) = (one for _, one in saves.outbox.orders if isinstance(one, m.Watermark))
    assert mark.step == 10


def test_a_restored_step_is_paired_again() -> None:
    """b was lost and is back without memory; what a has of both is copied to it."""
    saves = Saves("ab")
    saves.commit(10)
    saves.copies("a", "b", 10)
    saves.forget("b", 1.0, gone_because="is dead")
    saves.told()
    saves.begin_round(m.RoundInfo(R2, 4, restore=m.Restore(R1, 10, 4)), saves.seats())
    saves.say("a", 2.0)
    assert not saves.told(), "b has not been heard yet"
    saves.on_holdings("b", m.Holdings(SAVER["b"], (), True), 2.0)
    order = saves.told()["b"]
    assert (order.round, order.step, order.ranks) == (R1, 10, (0, 1, 2, 3))


def test_a_replica_is_no_rank_of_its_own() -> None:
    """The books: who writes a part, who is waited for, whose holder a rank's is."""
    ledger = Ledger(R1, 4)
    own = m.Holding(R1, 10, 0, 4, (1, 2), False)
    copy = m.Holding(R1, 10, 0, 4, (1, 2), False, replica=True)
    other = m.Holding(R1, 10, 2, 4, (3, 4), False)
    ledger.update("b", [copy])
    assert not ledger.is_whole(10)
    ledger.update("b", [copy, other])
    assert ledger.is_whole(10)
    assert not ledger.is_full(10), "ranks 0 and 1 may have it themselves soon"
    assert divide(ledger, 10)["b"].ranks == (0, 1, 2, 3)
    ledger.update("a", [own])
    assert ledger.is_full(10)
    assert divide(ledger, 10)["a"].ranks == (0, 1)
    assert divide(ledger, 10)["b"].ranks == (2, 3)
    assert ledger.find_places(10, 1)[0] == ("a", 1)
    assert not ledger.needs(10, ["a"])
    assert ledger.needs(10, ["b"])
    assert ledger.spoil("b", 10, 0)
    assert ledger.needs(10, ["a"])
    ledger.update("a", ())
    assert "rank 0" in ledger.why_not_whole(10)


def test_who_has_not_spoken_yet_may_have_it_too() -> None:
    """DDP: the first to tell of a step makes it whole; nothing is copied for that."""
    saves = Ddp()
    saves.commit(10)
    saves.own["a"].append(20)
    saves.say("a", 5.0)
    assert not saves.told()
    assert saves.points.watermark == 10
    saves.own["b"].append(20)
    saves.say("b", 5.1)
    assert saves.points.watermark == 20
    assert saves.next_deadline() is None
    assert not saves.told()


def test_who_has_left_a_step_out_is_not_waited_for() -> None:
    saves = Ddp("ab")
    saves.commit(10)
    saves.own["a"].append(20)
    saves.say("a", 5.0)
    assert saves.next_deadline() == 5.0 + PATIENCE
    saves.say("b", 5.0)
    saves.proceed(5.0 + PATIENCE)
    assert list(saves.told()) == ["b"]


def test_a_new_master_gives_up_nothing_before_all_have_spoken() -> None:
    """Replicas lag behind: nodes hold copies of a step that their own ranks have written over."""
    saves = Saves("ab")
    saves.own = {"a": [20, 30], "b": [20, 30]}
    for node, of in ("ba", "ab"):
        saves.copied[node] = [saves.holding(of, step, replica=True) for step in (10, 20)]
    saves.say("a")
    assert not saves.outbox.orders
    saves.say("b")
    assert saves.points.choose().restore == m.Restore(R1, 30, 4)
    marks = [one for _, one in saves.outbox.orders if isinstance(one, m.Watermark)]
    assert marks == [m.Watermark(R1, 20)]
    saves.forget("b", 1.0, gone_because="is dead")
    assert saves.points.choose().restore == m.Restore(R1, 20, 4)


def test_a_replica_that_is_lost_meanwhile_is_copied_again() -> None:
    saves = Saves("ab")
    saves.commit(10)
    saves.told()
    saves.copies("b", "a", 10)
    saves.copied["b"] = []
    saves.say("b")
    assert saves.told()["b"].ranks == (0, 1)
    for node, of in ("ba", "ab"):
        saves.copies(node, of, 10)
    assert saves.points.watermark == 10


def test_nothing_is_begun_while_a_node_is_away() -> None:
    """It is back in a moment, or the round is over; what the others hold is not all there is."""
    saves = Saves("ab")
    saves.commit(10)
    for node, of in ("ba", "ab"):
        saves.copies(node, of, 10)
    saves.commit(20)
    saves.copied["b"].append(saves.holding("a", 20, replica=True))
    saves.say("b")
    saves.told()
    saves.forget("a", 1.0)
    saves.proceed(1.0)
    assert not saves.told()
    assert saves.points.watermark == 10
    assert saves.next_deadline() is None
    assert not saves.says().count("not in the memory")
    saves.say("a", 2.0)
    assert sorted(saves.told()) == ["a"]
