"""The master's record: what is in it and when, its size, and what the next master makes of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elasticrun.config import GROW_YOUNG, MASS_SILENCE_HOLD, REATTACH_GRACE
from elasticrun.core import events as fx
from elasticrun.core.job.record import RECORD_EVERY
from elasticrun.core.persisted import (
    Blamed,
    DeathRecord,
    ExclusionFacts,
    Facts,
    FlapFacts,
    MembershipFacts,
    RestartFacts,
    aged,
)
from elasticrun.core.rounds.round import restored
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, dumps, loads
from tests.core.by_hand import DONE, SPEC, Master, failure, hello
from tests.further import cases
from tests.master.facts import facts, round_facts

DAY = 86400.0


def kinds(effects: list[fx.JobEffect]) -> list[str]:
    """Records and orders, in their order."""
    found = []
    for effect in effects:
        if isinstance(effect, fx.Record):
            found.append("Record")
        elif isinstance(effect, fx.Send):
            found.append(type(effect.order).__name__)
    return found


def successor(master: Master, *, now: float = 1000.0) -> Master:
    """The next master, with the record, on another clock."""
    return Master(None, facts=loads(dumps(master.facts), Facts), now=now)


def test_what_is_recorded_and_before_what() -> None:
    master = Master()
    assert kinds(master.feed(fx.Attached(1, hello("a")))) == ["Record", "Welcome"], "it reigns"
    assert kinds(master.feed(fx.Heard(1, m.Join(Endpoint("a", 1))))) == ["Wait"]
    assert kinds(master.feed(fx.Attached(2, hello("b")))) == ["Welcome"]
    formed = kinds(master.feed(fx.Heard(2, m.Join(Endpoint("b", 1)))))
    assert formed == ["Record", "Start", "Start"]
    name = master.facts.rendezvous.round.name  # type: ignore[union-attr]
    assert kinds(master.feed(fx.Heard(1, m.Running(name, (1, 2))))) == []
    assert kinds(master.feed(fx.Heard(1, m.Beat(1)))) == []
    reopened = kinds(master.feed(fx.Heard(1, m.RanksFailed(name, (failure(0),)))))
    assert reopened[:2] == ["Record", "Stop"]
    master.both_back(name)
    assert kinds(master.effects)[0] == "Record"
    assert master.facts.restarts.count == 1, "the charge is in the record of the round it pays for"
    name = master.facts.rendezvous.round.name  # type: ignore[union-attr]
    master.hear(1, m.Finished(name))
    over = kinds(master.feed(fx.Heard(2, m.Finished(name))))
    assert over == ["Recovery", "Record", "End"], "no fact depends on the figures of an incident"
    assert master.facts.outcome == DONE


def test_a_restored_master_records_the_same_facts() -> None:
    master = Master()
    master.running()
    again = successor(master)
    assert again.job.next_deadline() == 0.0, "it wants its first step"
    again.feed(fx.Tick())
    ledger = again.facts.ledger  # where the time went since is not known
    assert again.facts == replace(master.facts, term=master.facts.term + 1, ledger=ledger)
    assert again.job.term == 2
    assert again.job.next_deadline() == 1000.0 + RECORD_EVERY
    again.now += REATTACH_GRACE
    again.feed(fx.Tick())
    assert again.job.status().phase == "gathering", "nobody came back"
    assert again.facts.membership.left_out == (), (
        "nor can who died unheard be held to have fallen silent"
    )


def test_a_first_step_that_comes_late_is_no_stall() -> None:
    """The loop takes a deadline long past for an oversleep; there was nothing to listen to."""
    master = Master()
    master.running()
    again = successor(master)
    effects = again.feed(fx.Overslept(1000.0))
    assert not [e for e in effects if isinstance(e, fx.Note) and "away" in e.text]
    again.now += REATTACH_GRACE
    again.feed(fx.Tick())
    assert again.job.status().phase == "gathering"


def test_the_age_of_a_round_and_what_remains_of_a_wait() -> None:
    master = Master()
    master.running()
    master.now = GROW_YOUNG
    assert kinds(master.feed(fx.Tick())) == ["Record"], "it is not young any more"
    assert master.facts.rendezvous.age == GROW_YOUNG
    master.feed(fx.Detached(1, False))
    master.now = GROW_YOUNG + 6.0
    master.feed(fx.Tick())
    began = master.now
    for _ in range(3):
        master.hear(2, m.Beat(1))
        deadline = master.job.next_deadline()
        assert deadline - master.now <= RECORD_EVERY
        master.now = deadline
        master.feed(fx.Tick())
    assert master.facts.rendezvous.over
    assert master.now > began


def test_an_outcome_is_told_once_to_the_shell_and_to_everybody() -> None:
    master = Master()
    name = master.running()
    master.both(m.Finished(name))
    again = successor(master)
    over = fx.JobOver(0, DONE.reason, code=DONE.code)
    assert over not in again.feed(fx.Tick()), "nobody has been told yet"
    assert again.job.next_deadline() is None
    assert over in again.feed(fx.Attached(1, hello("a")))
    assert again.orders(1)[1:] == [DONE]
    assert over not in again.feed(fx.Attached(2, hello("z")))
    assert again.orders(2)[1:] == [DONE]
    again.hear(2, m.Join(Endpoint("z", 1)))
    assert again.effects == []
    assert again.job.status().phase == "ended"


def large(nodes: int) -> Master:
    spec = replace(SPEC, min_nodes=nodes, max_nodes=nodes)
    master = Master(spec)
    for number in range(nodes):
        node = f"ip-10-11-{number // 256:03}-{number % 256:03}.eu-central-1.compute.internal:0"
        one = hello(node, incarnation=f"{number:016x}", spec=spec, local_world_size=8)
        master.feed(fx.Attached(number, one))
        master.hear(number, m.Join(Endpoint(f"10.11.{number // 256}.{number % 256}", 29400)))
    assert master.job.status().phase == "running"
    return master


def test_size_at_a_thousand_nodes() -> None:
    master = large(1000)
    text = dumps(master.facts)
    assert len(text) <= 1_000_000
    assert len(text) > 100_000, "with every seat in it"
    assert loads(text, Facts) == master.facts


@pytest.mark.slow
@pytest.mark.parametrize("days", cases([4, 30], kept=[4]))
def test_many_days_of_crashes_are_one_day(days: int) -> None:
    """A crash every twenty minutes, in every second one a pod that is replaced by one of another
    name, and masters that die: the record does not grow."""
    spec = replace(SPEC, max_restarts=20, restart_window=3600.0, restart_backoff=30.0)
    master = Master(spec)
    name = master.running()
    sizes: list[int] = []
    pod = hello("b")
    for crash in range(days * 72):
        for _ in range(24):
            master.now += 50.0
            master.both(m.Beat(crash))
        master.hear(1, m.RanksFailed(name, (failure(0),)))
        master.come_back(1, name)
        if crash % 2:
            master.feed(fx.Detached(2, False))
            master.now += 6.0
            master.feed(fx.Tick())
            pod = hello(f"pod-{crash:06}", incarnation=f"pod-{crash}")
            master.feed(fx.Attached(2, pod))
            master.hear(2, m.Join(Endpoint("10.0.0.2", 4000)))
        else:
            master.come_back(2, name)
        found = master.facts
        assert found.rendezvous.round.name.number == crash + 2, "a round for every crash"
        assert len(found.restarts.charges) <= 3
        name = found.rendezvous.round.name
        if crash % 72 == 71:
            sizes.append(len(dumps(found)))
            place = restored(found.rendezvous).start
            master = successor(master, now=float(crash))
            master.feed(fx.Attached(1, hello("a", attached=place("a"))))
            master.feed(fx.Attached(2, replace(pod, attached=place(pod.node))))
    assert found.restarts.count == days * 36, "every second one was a rank's own failure"
    assert len(sizes) == days
    assert max(sizes[1:]) <= 1.2 * min(sizes[1:]), sizes
    assert max(sizes) < 20_000


def test_charges_in_the_window_survive_and_others_do_not() -> None:
    spec = replace(SPEC, max_restarts=5, restart_window=100.0, restart_backoff=0.0)
    master = Master(spec)
    name = master.running()
    for when in (10.0, 60.0, 90.0, 120.0):
        master.now = when
        master.both(m.Beat(1))
        if when == 60.0:
            continue
        master.hear(1, m.RanksFailed(name, (failure(0),)))
        master.both_back(name)
        name = master.facts.rendezvous.round.name
    assert master.facts.restarts.charges == (30.0, 0.0), "the first is out of the window"
    assert master.facts.restarts.count == 3, "TORCHELASTIC_RESTART_COUNT counts them all"
    again = successor(master)
    again.feed(fx.Tick())
    assert again.job.status().restarts_left == 3
    again.now += 71.0
    again.feed(fx.Tick())
    assert again.job.status().restarts_left == 4


def test_when_most_are_unheard_it_is_the_master_that_is_cut_off() -> None:
    """Three of four do not dial again: no verdict for MASS_SILENCE_HOLD after the grace, unless
    ranks elsewhere say that they are gone."""
    for corroborated, dead_after in ((False, REATTACH_GRACE + MASS_SILENCE_HOLD), (True, 5.0)):
        master = large(4)
        again = successor(master, now=0.0)
        again.feed(fx.Tick())
        seat = master.facts.rendezvous.seats[0]
        name = master.facts.rendezvous.round.name
        spec = master.facts.spec
        place = restored(master.facts.rendezvous).start(seat.node)
        one = hello(seat.node, incarnation=seat.incarnation, spec=spec, attached=place)
        again.feed(fx.Attached(1, one))
        if corroborated:
            again.hear(1, m.RanksFailed(name, (failure(0),)))
        while any(node.state == "suspect" for node in again.job.status().nodes):
            again.hear(1, m.Beat(1))
            deadline = again.job.next_deadline()
            assert deadline is not None
            again.now = deadline
            again.feed(fx.Tick())
        assert again.now == dead_after


def test_a_member_that_never_heard_its_place_makes_the_round_young() -> None:
    master = Master()
    name = master.running()
    old = replace(master.facts, rendezvous=replace(master.facts.rendezvous, age=500.0))
    again = Master(None, facts=old)
    again.feed(fx.Attached(1, hello("a", attached=None)))
    (start,) = (order for order in again.orders(1) if isinstance(order, m.Start))
    assert start.round == name
    again.now = GROW_YOUNG
    again.hear(1, m.Beat(1))
    again.feed(fx.Attached(2, hello("b", incarnation="another")))
    assert again.facts.rendezvous.age == GROW_YOUNG


# ---------------------------------------------------------------- facts that have lain in a record

LAIN = facts(
    incidents=1,
    spec=replace(SPEC, restart_window=3600.0),
    rendezvous=round_facts(
        over="it is over", silent=2.0, starved=4.0, gone=("node-00000", "node-00001")
    ),
    restarts=RestartFacts(2, (50.0, 1.0), 1, blamed=(Blamed("c", 2, 1, 7, 30.0),)),
    membership=MembershipFacts(
        (DeathRecord("a", (3.0,), 1, 100.0), DeathRecord("b", (3.0,), 1, 5.0))
    ),
    flaps=FlapFacts((DeathRecord("c", (3.0, 1.0), 1, 100.0),)),
    exclusions=ExclusionFacts(
        (m.ExcludedNode("d", "h", "failed", "it is bad", 3.0, 50.0),), slow_ages=(20.0, 4.0)
    ),
)


def taken_over(found: Facts) -> Facts:
    """What a master that has loaded these facts records first."""
    effects = Master(None, facts=found, now=1000.0).feed(fx.Tick())
    return next(effect.facts for effect in effects if isinstance(effect, fx.Record))


def test_ages_grow_and_remainders_shrink() -> None:
    older = taken_over(aged(LAIN, 10.0))
    assert (older.rendezvous.age, older.rendezvous.silent) == (11.5, 12.0)
    assert older.restarts.charges == (60.0, 11.0)
    assert older.restarts.blamed == (Blamed("c", 2, 1, 7, 20.0),)
    left_out = older.membership.left_out
    assert [entry.remaining for entry in left_out] == [90.0, 0.0]
    assert [entry.silences for entry in left_out] == [(13.0,), (13.0,)]
    assert older.flaps.fickle == (DeathRecord("c", (13.0, 11.0), 1, 90.0),)
    refused = m.ExcludedNode("d", "h", "failed", "it is bad", 13.0, 40.0)
    assert older.exclusions == ExclusionFacts((refused,), slow_ages=(30.0, 14.0))


def test_a_wait_for_nodes_stands_still_while_there_is_no_master() -> None:
    assert taken_over(aged(LAIN, 1e6)).rendezvous.starved == LAIN.rendezvous.starved


def test_all_else_is_as_it_was_and_no_time_is_no_change() -> None:
    assert aged(LAIN, 0.0) == aged(LAIN, -5.0) == LAIN
    assert aged(aged(LAIN, 2.0), 3.0) == aged(LAIN, 5.0) == replace(LAIN, age=5.0)
    same = taken_over(LAIN)
    assert same == replace(LAIN, term=LAIN.term + 1, ledger=same.ledger)


def test_a_successor_has_replicas_made_of_a_round_that_it_learns_bit_by_bit() -> None:
    """Of an adopted round the record has those that had come; others are seated as they come, and
    what is to be copied is divided among all of them."""
    first = Master()
    name = first.running()
    places = {node: restored(first.facts.rendezvous).start(node) for node in "ab"}
    second = Master(now=100.0)
    second.feed(fx.Attached(1, hello("a", attached=places["a"], last_term=1)))
    third = successor(second)
    third.feed(fx.Tick())
    for at, node in enumerate("ab"):
        third.feed(fx.Attached(at + 1, hello(node, attached=places[node], last_term=2)))
    assert third.job.status().phase == "running"
    for at in range(2):
        third.hear(at + 1, m.Running(name, (11, 12)))
        held = m.Holding(name, 7, 2 * at, 4, (2 * at + 1, 2 * at + 2), False)
        third.hear(at + 1, m.Holdings(Endpoint("10.0.0.9", 5000 + at), (held,), replicas=True))
    copied = [order for at in (1, 2) for order in third.told[at] if isinstance(order, m.Replicate)]
    assert {order.ranks for order in copied} == {(0, 1), (2, 3)}


def test_a_node_that_no_agent_has_told_of_yet_can_be_excluded_and_included() -> None:
    master = Master()
    master.running()
    after = successor(master)
    after.feed(fx.Attached(1, hello("a")))
    for number, verb in enumerate(("exclude", "include")):
        effects = after.feed(fx.Requested(number, m.Request(verb, "b")))
        (reply,) = [one.reply for one in effects if isinstance(one, fx.Replied)]
        assert reply.ok, reply.reason


def test_a_host_with_two_nodes_is_no_node() -> None:
    master = Master()
    for session, node in ((1, "a"), (2, "b")):
        master.feed(fx.Attached(session, hello(node, host="big")))
    effects = master.feed(fx.Requested(1, m.Request("exclude", "big")))
    (reply,) = [one.reply for one in effects if isinstance(one, fx.Replied)]
    assert (reply.ok, reply.reason) == (False, "2 nodes are on big: a and b; name one")
