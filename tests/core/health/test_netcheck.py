"""The network check on simulated machines with planted faults (benchmarks/netcheck_faults.py)."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from benchmarks.netcheck_faults import (
    KINDS,
    Fault,
    Machines,
    Tally,
    check,
    cost,
    double,
    drive,
    guilty,
    names,
    noisy,
    random_pairs,
    single,
)
from elasticrun.config import PROBE_ANSWER_SLACK
from elasticrun.core.health.groups import (
    HELD_UP_FOR,
    ProbeGroup,
    Standing,
    Trial,
    later_pass,
)
from elasticrun.core.health.netcheck import MAX_PASSES, NetCheck
from elasticrun.core.health.words import cut
from elasticrun.wire.messages import CheckSpec, Probed, ProbePhase, Transfer
from elasticrun.wire.types import MAX_TEXT
from tests.further import examples

SPEC = CheckSpec(network=True)


def fresh(checks: CheckSpec = SPEC) -> NetCheck:
    serial = itertools.count()
    return NetCheck(checks, lambda: f"check-{next(serial)}")


def healthy(group: ProbeGroup, **changes: object) -> dict[str, Probed]:
    answers = Machines(()).probe(group)
    return {node: replace(said, **changes) for node, said in answers.items()}


def hear(netcheck: NetCheck, answers: dict[str, Probed], now: float) -> tuple[ProbeGroup, ...]:
    """What nodes answer; the groups that are probed next."""
    for node, said in answers.items():
        netcheck.answered(node, said, now)
    return netcheck.proceed(now)


def answer(
    netcheck: NetCheck, group: ProbeGroup, machines: Machines, now: float
) -> tuple[ProbeGroup, ...]:
    return hear(netcheck, machines.probe(group), now)


# ---------------------------------------------------------------- planted faults


@pytest.mark.parametrize("count", range(1, 17))
def test_every_single_fault_is_found_and_nobody_else(count: int) -> None:
    tally = Tally()
    for kind in KINDS:
        for faults in single(count, kind):
            tally.add(count, faults)
    assert not tally.missed
    assert max(tally.passes) == {1: 2, 3: 4, 5: 4}.get(count, 2 + count % 2)


@pytest.mark.parametrize("count", [32, 63, 64, 1000])
def test_single_faults_of_many_nodes(count: int) -> None:
    chance = random.Random(count)
    tally = Tally()
    for kind in KINDS:
        for _ in range(1 if count == 1000 else 3):
            node, other = chance.sample(names(count), 2)
            tally.add(count, (Fault(kind, node, other if kind == "link" else ""),))
    assert not tally.missed
    assert max(tally.passes) <= 2 + count % 2


@pytest.mark.parametrize("count", range(2, 6))
def test_every_double_fault_is_found_and_nobody_else(count: int) -> None:
    tally = Tally()
    for faults in double(count):
        tally.add(count, faults)
    assert not tally.missed
    assert max(tally.passes) < MAX_PASSES


@pytest.mark.parametrize("count", [6, 7, 8, 9, 13, 16, 31, 64])
def test_double_faults_of_many_nodes(count: int) -> None:
    tally = Tally()
    for faults in random_pairs(count, 1500 // count, random.Random(count)):
        tally.add(count, faults)
    assert not tally.missed
    assert max(tally.passes) < MAX_PASSES


def test_two_bad_nodes_in_one_pair_of_a_thousand_take_three_passes() -> None:
    outcome = check(1000, Machines((Fault("comm", "n0"), Fault("comm", "n1"))))
    assert (outcome.failed, outcome.passes) == ({"n0", "n1"}, 3)
    outcome = check(1000, Machines((Fault("comm", "n0"), Fault("hang", "n2"))))
    assert (outcome.failed, outcome.passes) == ({"n0", "n2"}, 2)


@pytest.mark.parametrize("count", range(2, 6))
def test_no_good_node_is_convicted_beside_nodes_that_were_good_before(count: int) -> None:
    """Any of them may be, and the fault may be on any: also where it should be known to be good."""
    for trusted, kind in itertools.product(range(1, 2**count - 1), KINDS):
        for faults in single(count, kind):
            netcheck = fresh()
            netcheck.trust([node for at, node in enumerate(names(count)) if trusted >> at & 1])
            outcome = drive(netcheck, names(count), Machines(faults), 0.0)
            assert outcome.failed <= guilty(faults)
            assert outcome.slow <= {one.node for one in faults if one.kind.startswith("slow")}


def test_noise_makes_nobody_slow() -> None:
    assert noisy(1000) == (1000, 0)


faults_of = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 11), st.integers(0, 11)), max_size=8
)


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(1, 12), faults_of)
def test_it_ends_and_repeats_no_group(count: int, planted: list[tuple[str, int, int]]) -> None:
    """However many faults there are at once."""
    faults = [
        Fault(kind, f"n{one % count}", f"n{other % count}" if kind == "link" else "")
        for kind, one, other in planted
        if kind != "link" or one % count != other % count
    ]
    machines = Machines(faults)
    outcome = check(count, machines)
    assert outcome.passes <= MAX_PASSES
    came_to_something: set[frozenset[str]] = set()
    for groups in outcome.groups:
        members = [node for group in groups for node in group.nodes]
        assert len(members) == len(set(members))
        for group in groups:
            assert 1 <= len(group.nodes) <= 3
            if len(group.nodes) > 1 and not any(
                machines.has(node, "compute", "silent") for node in group.nodes
            ):
                assert frozenset(group.nodes) not in came_to_something
                came_to_something.add(frozenset(group.nodes))
    told = [*outcome.failed, *outcome.unresolved]
    assert len(told) == len(set(told))
    if len(faults) < 3:
        assert outcome.failed <= guilty(faults)


@pytest.mark.slow
def test_ten_thousand_nodes_cost_little() -> None:
    seconds, passes = cost(10_000)
    assert passes == 3
    assert seconds < 2.0, "of CPU; 0.3 s on an idle machine"


# ---------------------------------------------------------------- sentences


def test_a_hung_node_is_named_with_its_partners() -> None:
    outcome = check(4, Machines((Fault("hang", "n1"),)))
    assert outcome.reasons == {
        "n1": "n1 failed the network check: in comm with n0, which works with others (no end after "
        "60 s (limit 60 s)), and in comm with n3, which works with others (no end after 60 s "
        "(limit 60 s))"
    }
    assert outcome.summary == "network check of 4 nodes (2 passes, 2 s): n1 failed; 3 nodes passed"


def test_a_silent_node_is_named_with_the_limit() -> None:
    outcome = check(4, Machines((Fault("silent", "n1"),)))
    assert outcome.reasons == {
        "n1": "n1 failed the network check twice by itself in start (did not answer within 70 s "
        "(the probe's limit is 60 s))"
    }


def test_a_slow_node_is_named_with_figures() -> None:
    outcome = check(4, Machines((Fault("slow-compute", "n1"),)))
    assert outcome.reasons == {
        "n1": "n1 is slow, measured twice: compute 30 ms per matmul, the others 10 ms (median of "
        "3), limit 15 ms; 2 x median would agree"
    }
    outcome = check(4, Machines((Fault("slow-comm", "n1"),)))
    assert outcome.reasons == {
        "n1": "n1 is slow, measured twice: all_reduce of 1 MiB with n0 1.26 ms, the others "
        "0.419 ms (median of 3), limit 0.629 ms; 2 x median would agree"
    }


def test_a_bad_link_is_named_and_convicts_nobody() -> None:
    outcome = check(4, Machines((Fault("link", "n0", "n1"),)))
    assert not outcome.reasons
    assert outcome.summary == (
        "network check of 4 nodes (2 passes, 2 s): the link between n0 and n1 failed in comm (no "
        "end after 60 s (limit 60 s)), though each works with others; all passed"
    )


def test_of_two_nodes_the_pair_is_named() -> None:
    outcome = check(2, Machines((Fault("comm", "n1"),)))
    assert outcome.unresolved == {"n0", "n1"}
    assert outcome.reasons["n0"] == outcome.reasons["n1"]
    assert outcome.reasons["n0"] == (
        "n0 and n1 failed together in comm (no end after 60 s (limit 60 s)); a third node "
        "would show which of them is at fault"
    )


def test_health_in_words() -> None:
    netcheck = fresh()
    drive(netcheck, names(2), Machines((Fault("link", "n1", "n2"),)), 0.0)
    assert netcheck.health("n1") == (
        "10 ms per matmul (26.8 GFLOP/s), all_reduce of 1 MiB 0.419 ms with n0"
    )
    drive(netcheck, ["n1", "n2"], Machines((Fault("comm", "n2"),)), 0.0)
    assert "n2 failed in comm with n1, which works with others" in netcheck.health("n2")
    assert netcheck.health("n9") == ""


def test_what_a_good_node_failed_with_is_not_held_against_it() -> None:
    netcheck = fresh()
    outcome = drive(netcheck, names(4), Machines((Fault("comm", "n1"),)), 0.0)
    assert "n3" in outcome.reasons["n1"]
    for node in ("n0", "n2", "n3"):
        assert "failed" not in netcheck.health(node)


def test_why_the_round_waits_does_not_count_answers() -> None:
    netcheck = fresh()
    groups = netcheck.start(names(4), 0.0)
    first = netcheck.reason()
    assert (
        first == "the network check probes: 4 nodes are measured in 2 groups before a round forms"
    )
    machines = Machines((Fault("comm", "n0"),))
    said = machines.probe(groups[0])
    netcheck.answered("n0", said["n0"], 1.0)
    assert netcheck.proceed(1.0) == ()
    assert netcheck.reason() == first
    netcheck.answered("n1", said["n1"], 1.0)
    assert answer(netcheck, groups[1], machines, 1.0)
    assert netcheck.reason().startswith("the network check continues: pass 2 probes n0, n1, n2")


def test_no_sentence_is_longer_than_a_message_carries() -> None:
    netcheck = fresh()
    long = ["x" * 1000 + str(at) for at in range(8)]
    outcome = drive(netcheck, long, Machines([Fault("comm", node) for node in long[:6]]), 0.0)
    assert outcome.failed
    for sentence in (*outcome.reasons.values(), outcome.summary):
        assert len(sentence) <= MAX_TEXT
    assert cut("a" * 5000).endswith("...")


# ---------------------------------------------------------------- standing


def test_standing_over_a_life() -> None:
    netcheck = fresh()
    assert netcheck.standing("n0") is Standing.UNKNOWN
    assert netcheck.needs_probing(["n0"])
    drive(netcheck, ["n0"], Machines(()), 0.0)
    assert netcheck.standing("n0") is Standing.ALONE
    assert not netcheck.needs_probing(["n0"])
    assert netcheck.needs_probing(["n0", "n1"])
    drive(netcheck, ["n0", "n1"], Machines(()), 0.0)
    assert netcheck.standing("n0") is netcheck.standing("n1") is Standing.GOOD
    assert not netcheck.needs_probing(["n0", "n1"])
    netcheck.forget("n1")
    assert netcheck.standing("n1") is Standing.UNKNOWN
    assert netcheck.needs_probing(["n0", "n1"])
    assert not netcheck.needs_probing(["n0"])
    netcheck.lost("n0", "its host is down", 0.0)
    assert netcheck.standing("n0") is Standing.UNKNOWN


def test_without_the_flag_nothing_is_wanted() -> None:
    netcheck = fresh(CheckSpec())
    assert not netcheck.needs_probing(names(4))
    assert netcheck.start(names(4), 0.0) == ()
    assert not netcheck.is_busy
    assert netcheck.next_deadline() is None


def test_good_nodes_are_partners_only_where_they_are_needed() -> None:
    netcheck = fresh()
    netcheck.trust(names(4))
    groups = netcheck.start([*names(4), "n8", "n9"], 0.0)
    assert [group.nodes for group in groups] == [("n8", "n9")]
    netcheck = fresh()
    netcheck.trust(names(4))
    (group,) = netcheck.start([*names(4), "n9"], 0.0)
    assert group.nodes == ("n0", "n9")


def test_an_odd_node_makes_a_group_of_three() -> None:
    netcheck = fresh()
    groups = netcheck.start(names(5), 0.0)
    assert [group.nodes for group in groups] == [("n0", "n1"), ("n2", "n3", "n4")]


def test_a_newcomer_that_fails_is_blamed_and_not_its_trusted_partner() -> None:
    netcheck = fresh()
    netcheck.trust(names(3))
    outcome = drive(netcheck, [*names(3), "n9"], Machines((Fault("comm", "n9"),)), 0.0)
    assert (outcome.failed, outcome.passes) == ({"n9"}, 2)
    assert netcheck.standing("n0") is Standing.GOOD


def test_a_trusted_node_that_has_gone_bad_is_found_by_its_newcomers() -> None:
    netcheck = fresh()
    netcheck.trust(names(3))
    outcome = drive(netcheck, [*names(3), "n9"], Machines((Fault("comm", "n0"),)), 0.0)
    assert outcome.failed == {"n0"}
    assert netcheck.standing("n9") is Standing.GOOD


def test_two_unresolved_nodes_are_asked_again_only_with_somebody_new() -> None:
    netcheck = fresh()
    machines = Machines((Fault("comm", "n1"),))
    drive(netcheck, names(2), machines, 0.0)
    assert not netcheck.needs_probing(names(2))
    assert netcheck.start(names(2), 0.0) == ()
    assert not netcheck.needs_probing(["n0"]), "alone it has passed"
    assert netcheck.needs_probing(names(3))
    outcome = drive(netcheck, names(3), machines, 10.0)
    assert outcome.failed == {"n1"}
    assert not netcheck.needs_probing(["n0", "n2"])


def test_or_with_a_good_one_that_was_not_there() -> None:
    netcheck = fresh()
    drive(netcheck, names(2), Machines((Fault("comm", "n1"),)), 0.0)
    netcheck.trust(["n5"])
    assert netcheck.needs_probing([*names(2), "n5"])
    outcome = drive(netcheck, [*names(2), "n5"], Machines((Fault("comm", "n1"),)), 5.0)
    assert outcome.failed == {"n1"}
    netcheck.trust(["n6"])
    assert not netcheck.needs_probing(["n0", "n5", "n6"])


def test_three_of_which_nobody_can_tell_wait_for_a_fourth() -> None:
    netcheck = fresh()
    machines = Machines((Fault("comm", "n1"), Fault("comm", "n2")))
    assert drive(netcheck, names(3), machines, 0.0).unresolved == set(names(3))
    assert not netcheck.needs_probing(names(3))
    assert not netcheck.needs_probing(["n0", "n2"]), "they have met"
    assert drive(netcheck, names(4), machines, 9.0).failed == {"n1", "n2"}


def test_a_slow_node_is_no_measure_for_another() -> None:
    slow = Trial("n0", 0, good=True, is_found_slow=True)
    other = Trial("n1", 1, good=True)
    trials = {"n0": slow, "n1": other}
    assert later_pass(trials, (), {"n1": False}) == []
    assert later_pass(trials, (), {"n1": True}) == [("n1",)]
    slow.is_found_slow = False
    assert later_pass(trials, (), {"n1": False}) == [("n0", "n1")]


@pytest.mark.parametrize("how", ["forget", "lost"])
def test_or_when_one_of_them_has_a_new_life(how: str) -> None:
    netcheck = fresh()
    drive(netcheck, names(2), Machines((Fault("comm", "n1"),)), 0.0)
    if how == "forget":
        netcheck.forget("n1")
    else:
        netcheck.lost("n1", "its agent has gone", 5.0)
    assert netcheck.needs_probing(names(2))
    assert not drive(netcheck, names(2), Machines(()), 10.0).reasons
    assert netcheck.standing("n0") is Standing.GOOD


def test_a_failure_that_passes_the_second_time_convicts_nobody() -> None:
    netcheck = fresh()
    groups = netcheck.start(names(2), 0.0)
    groups = answer(netcheck, groups[0], Machines((Fault("compute", "n1"),)), 1.0)
    assert sorted(group.nodes for group in groups) == [("n0",), ("n1",)]
    more = [one for group in groups for one in answer(netcheck, group, Machines(()), 2.0)]
    assert [set(group.nodes) for group in more] == [{"n0", "n1"}], "they have not met yet"
    answer(netcheck, more[0], Machines(()), 3.0)
    assert not netcheck.is_busy
    assert netcheck.take_verdicts() == ()
    assert netcheck.standing("n1") is Standing.GOOD


def test_a_node_that_is_suspected_during_the_check_is_probed_before_it_ends() -> None:
    netcheck = fresh()
    netcheck.trust(["n0", "n1"])
    (group,) = netcheck.start(["n0", "n1", "n2", "n3"], 0.0)
    assert group.nodes == ("n2", "n3")
    netcheck.forget("n1")
    (again,) = answer(netcheck, group, Machines(()), 1.0)
    assert "n1" in again.nodes
    answer(netcheck, again, Machines(()), 2.0)
    assert netcheck.standing("n1") is Standing.GOOD


def test_a_node_that_is_suspected_after_it_passed_alone_is_probed_alone_again() -> None:
    netcheck = fresh()
    (pair,) = netcheck.start(names(2), 0.0)
    alone = answer(netcheck, pair, Machines((Fault("comm", "n1"),)), 1.0)
    machines = Machines((Fault("compute", "n1"),))
    again = [one for group in alone for one in answer(netcheck, group, machines, 2.0)]
    assert [group.nodes for group in again] == [("n1",)]
    netcheck.forget("n0")
    (last,) = answer(netcheck, again[0], machines, 3.0)
    assert last.nodes == ("n0",)
    assert netcheck.standing("n0") is Standing.UNKNOWN
    answer(netcheck, last, machines, 4.0)
    assert not netcheck.is_busy
    assert netcheck.standing("n0") is Standing.ALONE


# ---------------------------------------------------------------- answers and losses


def test_a_lost_node_drops_out_and_its_partner_is_not_awaited() -> None:
    netcheck = fresh()
    groups = netcheck.start(names(4), 0.0)
    answer(netcheck, groups[1], Machines(()), 1.0)
    assert netcheck.group_of("n1") is groups[0]
    netcheck.lost("n0", "its agent has gone", 2.0)
    assert netcheck.group_of("n1") is None
    (again,) = netcheck.proceed(2.0)
    assert again.nodes in (("n2", "n1"), ("n3", "n1"))
    answer(netcheck, again, Machines(()), 3.0)
    assert not netcheck.is_busy
    assert netcheck.take_verdicts() == ()
    assert netcheck.standing("n1") is Standing.GOOD
    assert "n0 was lost; 3 nodes passed" in netcheck.summary()


def test_all_lost_ends_the_check() -> None:
    netcheck = fresh()
    netcheck.start(names(3), 0.0)
    for node in names(3):
        netcheck.lost(node, "the network is down", 1.0)
    assert netcheck.proceed(1.0) == ()
    assert not netcheck.is_busy
    assert netcheck.next_deadline() is None
    assert netcheck.take_verdicts() == ()


def test_answers_of_others_are_ignored() -> None:
    netcheck = fresh()
    (group,) = netcheck.start(names(2), 0.0)
    said = Machines(()).probe(group)
    netcheck.answered("n0", replace(said["n0"], check="another"), 1.0)
    netcheck.answered("n7", said["n0"], 1.0)
    assert netcheck.proceed(1.0) == ()
    assert netcheck.group_of("n0") is group
    netcheck.answered("n0", said["n0"], 1.0)
    netcheck.answered("n0", replace(said["n0"], ok=False, own=True, reason="late"), 1.0)
    netcheck.answered("n1", said["n1"], 1.0)
    netcheck.proceed(1.0)
    netcheck.answered("n1", replace(said["n1"], ok=False, own=True, reason="late"), 2.0)
    assert netcheck.proceed(2.0) == ()
    assert netcheck.standing("n1") is Standing.GOOD


def test_the_deadline_is_the_probes_limit_and_the_slack() -> None:
    netcheck = fresh(replace(SPEC, probe_limit=5.0))
    groups = netcheck.start(names(2), 100.0)
    assert netcheck.next_deadline() == 105.0 + PROBE_ANSWER_SLACK
    netcheck.answered("n0", healthy(groups[0], ok=False, excused=True)["n0"], 101.0)
    assert netcheck.proceed(114.9) == ()
    again = netcheck.proceed(115.0)
    assert sorted(group.nodes for group in again) == [("n0",), ("n1",)]
    assert netcheck.next_deadline() == 130.0


def test_partners_of_a_probe_that_died_are_not_awaited_to_their_limit() -> None:
    """It could not tell them any more."""
    netcheck = fresh()
    first, second = netcheck.start(names(4), 0.0)
    answer(netcheck, second, Machines(()), 1.0)
    said = healthy(first, ok=False, own=True, phase=ProbePhase.START, reason="could not be forked")
    netcheck.answered("n0", said["n0"], 1.0)
    assert netcheck.proceed(1.0) == ()
    assert netcheck.next_deadline() == 1.0 + HELD_UP_FOR
    again = netcheck.proceed(1.0 + HELD_UP_FOR)
    assert {node for group in again for node in group.nodes} == set(names(4))
    for group in again:
        answer(netcheck, group, Machines((Fault("compute", "n0"),)), 4.0)
    assert [verdict.node for verdict in netcheck.take_verdicts()] == ["n0"]
    assert [netcheck.standing(node) for node in names(4)[1:]] == [Standing.GOOD] * 3


def test_groups_that_are_excused_for_ever_end_with_a_sentence() -> None:
    netcheck = fresh()
    groups = netcheck.start(names(2), 0.0)
    passes = 0
    while groups:
        passes += 1
        for group in groups:
            for node, said in healthy(
                group, ok=False, excused=True, phase=ProbePhase.MEET, reason="n7 said it failed"
            ).items():
                netcheck.answered(node, said, 1.0)
        groups = netcheck.proceed(1.0)
    assert passes <= MAX_PASSES
    kinds = {verdict.kind for verdict in netcheck.take_verdicts()}
    assert kinds <= {"unresolved", "failed"}
    assert not netcheck.needs_probing(names(2))


def test_verdicts_are_told_once() -> None:
    netcheck = fresh()
    groups = netcheck.start(["n0"], 0.0)
    machines = Machines((Fault("compute", "n0"),))
    (group,) = answer(netcheck, groups[0], machines, 1.0)
    assert netcheck.take_verdicts() == ()
    answer(netcheck, group, machines, 2.0)
    (verdict,) = netcheck.take_verdicts()
    assert (verdict.node, verdict.kind) == ("n0", "failed")
    assert netcheck.take_verdicts() == ()


def test_a_slow_newcomer_is_judged_by_what_is_known_of_the_others() -> None:
    netcheck = fresh()
    drive(netcheck, names(2), Machines(()), 0.0)
    for kind in ("slow-compute", "slow-comm"):
        ready = [*names(2), "n9"]
        outcome = drive(netcheck, ready, Machines((Fault(kind, "n9"),)), 10.0)
        assert outcome.slow == {"n9"}
        assert netcheck.standing("n9") is Standing.GOOD, "whether it is left out is not ours to say"
        netcheck.lost("n9", "excluded", 20.0)


@pytest.mark.parametrize("count", [3, 4, 6, 7])
@pytest.mark.parametrize("kind", ["slow-compute", "slow-comm"])
def test_a_node_that_has_become_slow_is_not_judged_by_its_better_days(
    count: int, kind: str
) -> None:
    netcheck = fresh()
    drive(netcheck, names(count), Machines(()), 0.0)
    netcheck.forget("n1")
    outcome = drive(netcheck, names(count), Machines((Fault(kind, "n1"),)), 10.0)
    assert outcome.slow == {"n1"}


@pytest.mark.parametrize("count", range(2, 7))
def test_nobody_else_is_slow_whoever_is_suspected(count: int) -> None:
    """All were measured before; the fault may be on a node that is suspected, or on another."""
    for suspected, kind in itertools.product(range(1, 2**count), ["slow-compute", "slow-comm"]):
        for faults in single(count, kind):
            netcheck = fresh()
            drive(netcheck, names(count), Machines(()), 0.0)
            for at, node in enumerate(names(count)):
                if suspected >> at & 1:
                    netcheck.forget(node)
            outcome = drive(netcheck, names(count), Machines(faults), 10.0)
            assert outcome.slow <= {faults[0].node}
            assert not outcome.failed | outcome.unresolved


# ---------------------------------------------------------------- at the door


def failing(group: ProbeGroup, reason: str = "broken") -> dict[str, Probed]:
    return healthy(group, ok=False, own=True, phase=ProbePhase.COMPUTE, reason=reason)


def test_a_good_newcomer_at_the_door() -> None:
    netcheck = fresh()
    group = netcheck.probe_pending("n9", 0.0)
    assert group.nodes == ("n9",)
    assert not netcheck.is_busy
    assert netcheck.probe_pending("n9", 1.0) is group
    assert netcheck.group_of("n9") is group
    assert netcheck.next_deadline() == SPEC.probe_limit + PROBE_ANSWER_SLACK
    assert answer(netcheck, group, Machines(()), 2.0) == ()
    assert netcheck.standing("n9") is Standing.ALONE
    assert netcheck.health("n9") == "10 ms per matmul (26.8 GFLOP/s)"
    assert (netcheck.group_of("n9"), netcheck.next_deadline()) == (None, None)
    assert hear(netcheck, failing(group), 3.0) == (), "it has been let in already"
    assert netcheck.standing("n9") is Standing.ALONE


def test_both_failures_of_a_newcomer_are_named() -> None:
    netcheck = fresh()
    (again,) = hear(netcheck, failing(netcheck.probe_pending("n9", 0.0), "no memory"), 1.0)
    assert hear(netcheck, failing(again, "too hot"), 2.0) == ()
    (verdict,) = netcheck.take_verdicts()
    assert "no memory" in verdict.reason
    assert "too hot" in verdict.reason


@pytest.mark.parametrize("kind", ["compute", "silent"])
def test_a_bad_newcomer_at_the_door(kind: str) -> None:
    """Two failures convict, and both are named; who does not answer has failed."""
    netcheck = fresh()
    group = netcheck.probe_pending("n9", 0.0)
    machines = Machines((Fault(kind, "n9"),))
    due = SPEC.probe_limit + PROBE_ANSWER_SLACK
    now = 1.0 if kind == "compute" else due
    again = answer(netcheck, group, machines, 1.0)
    if kind == "silent":
        assert again == netcheck.proceed(due - 0.001) == ()
        again = netcheck.proceed(due)
    assert [one.nodes for one in again] == [("n9",)]
    assert again[0].check != group.check
    hear(netcheck, machines.probe(again[0]), now)
    assert netcheck.proceed(netcheck.next_deadline() or now) == ()
    (verdict,) = netcheck.take_verdicts()
    assert (verdict.node, verdict.kind) == ("n9", "failed")
    assert verdict.reason.startswith("n9 failed its own probes twice: in ")
    assert verdict.reason.count(", and in ") == 1
    assert netcheck.standing("n9") is Standing.UNKNOWN
    assert (netcheck.group_of("n9"), netcheck.next_deadline()) == (None, None)


def test_one_answer_at_the_door_is_counted_once() -> None:
    """Neither the same one again, nor what nobody asked for, convicts."""
    netcheck = fresh()
    group = netcheck.probe_pending("n9", 0.0)
    netcheck.answered("other", healthy(group)["n9"], 1.0)
    netcheck.answered("n9", healthy(group, check="9")["n9"], 1.0)
    assert netcheck.group_of("n9") is group
    netcheck.answered("n9", failing(group)["n9"], 1.0)
    assert netcheck.group_of("n9") is None, "its next probe is not even ordered"
    (again,) = hear(netcheck, failing(group), 1.0)
    assert hear(netcheck, failing(group), 1.0) == (), "of the probe before"
    assert netcheck.group_of("n9") is again
    assert hear(netcheck, healthy(again), 2.0) == netcheck.take_verdicts() == ()
    assert netcheck.standing("n9") is Standing.ALONE


def test_a_newcomer_that_goes_or_is_checked_with_others_leaves_the_door() -> None:
    netcheck = fresh()
    group = netcheck.probe_pending("n8", 0.0)
    netcheck.answered("n8", failing(group)["n8"], 0.0)
    netcheck.lost("n8", "it left", 1.0)
    netcheck.lost("n8", "it left", 1.0)
    assert netcheck.proceed(1.0) == (), "it is not probed again"
    assert (netcheck.group_of("n8"), netcheck.next_deadline()) == (None, None)
    group = netcheck.probe_pending("n8", 1.0)
    assert [one.nodes for one in hear(netcheck, failing(group), 1.0)] == [("n8",)]
    assert netcheck.take_verdicts() == (), "it is new here: nothing is held against it"
    group = netcheck.probe_pending("n9", 0.0)
    groups = netcheck.start(["n0", "n9"], 2.0)
    assert netcheck.group_of("n9") is groups[0]
    answer(netcheck, group, Machines((Fault("compute", "n9"),)), 3.0)
    answer(netcheck, groups[0], Machines(()), 3.0)
    assert netcheck.standing("n9") is Standing.GOOD
    assert netcheck.group_of("n9") is None, "nobody waits for its answer at the door"


# ---------------------------------------------------------------- the perf test

PERF = CheckSpec(network=True, perf=True)


def measured(group: ProbeGroup, *seconds: float) -> dict[str, Probed]:
    """Every node measures 1 MiB; the last ones so slowly."""
    plain = healthy(group, transfers=(Transfer(1 << 20, 0.001),))
    for node, took in zip(reversed(group.nodes), seconds, strict=False):
        plain[node] = replace(plain[node], transfers=(Transfer(1 << 20, took),))
    return plain


def test_the_perf_test_follows_over_all_good_nodes_once() -> None:
    netcheck = fresh(PERF)
    outcome = drive(netcheck, names(5), Machines((Fault("compute", "n1"),)), 0.0)
    assert outcome.failed == {"n1"}
    ready = ["n0", "n2", "n3", "n4"]
    assert netcheck.needs_probing(ready)
    (group,) = netcheck.start(ready, 10.0, dict.fromkeys(ready, 2))
    assert (group.nodes, group.perf) == (tuple(ready), True)
    assert "comm perf test" in netcheck.reason()
    assert hear(netcheck, measured(group, 0.002), 11.0) == ()
    assert netcheck.perf.lines == (
        "all_reduce of 1 MiB: 2 ms, algorithm bandwidth 0.524 GB/s, bus bandwidth 0.918 GB/s, "
        "over 4 nodes, 8 ranks",
    )
    assert "n1 failed" in netcheck.summary()
    assert "comm perf test over 4 nodes, 8 ranks: all_reduce of 1 MiB: 2 ms" in netcheck.summary()
    assert netcheck.perf.failure == ""
    assert not netcheck.needs_probing(ready)


@pytest.mark.parametrize(("floor", "ends"), [(0.0, False), (0.5, False), (5.0, True)])
def test_the_floor_is_the_bus_bandwidth_of_the_slowest(floor: float, ends: bool) -> None:
    netcheck = fresh(CheckSpec(perf=True, perf_floor=floor))
    (group,) = netcheck.start(names(2), 0.0)
    hear(netcheck, measured(group, 0.002), 1.0)
    assert bool(netcheck.perf.failure) == ends
    if ends:
        assert netcheck.perf.failure == (
            "comm perf test over 2 nodes, 2 ranks: bus bandwidth 0.524 GB/s at 1 MiB, below the "
            "required 5 GB/s (slowest on n1)"
        )


def test_a_time_that_cannot_be_is_no_end_of_the_master() -> None:
    netcheck = fresh(CheckSpec(perf=True, perf_floor=5.0))
    (group,) = netcheck.start(names(2), 0.0)
    hear(netcheck, healthy(group, transfers=(Transfer(2**60, 5e-324),)), 1.0)
    assert netcheck.perf.failure == ""


@pytest.mark.parametrize("floor", [0.0, 1.0])
def test_a_failed_perf_test_convicts_nobody(floor: float) -> None:
    netcheck = fresh(CheckSpec(perf=True, perf_floor=floor))
    (group,) = netcheck.start(names(3), 0.0)
    netcheck.answered("n0", healthy(group)["n0"], 1.0)
    due = netcheck.next_deadline()
    assert due is not None
    assert netcheck.proceed(due) == ()
    assert netcheck.take_verdicts() == ()
    assert "failed on n1 and n2 in start (did not answer within 70 s" in netcheck.summary()
    assert bool(netcheck.perf.failure) == bool(floor)
    assert not netcheck.needs_probing(names(3))


def test_a_perf_test_that_lost_a_node_is_made_again() -> None:
    netcheck = fresh(CheckSpec(perf=True, perf_floor=1.0))
    netcheck.start(names(3), 0.0)
    netcheck.lost("n1", "its agent has gone", 1.0)
    assert netcheck.proceed(1.0) == ()
    assert not netcheck.is_busy
    assert netcheck.summary() == "the comm perf test was not finished because n1 was lost"
    assert netcheck.perf.failure == ""
    assert netcheck.needs_probing(["n0", "n2"])


def test_one_rank_has_no_bandwidth_and_may_train() -> None:
    netcheck = fresh(CheckSpec(perf=True, perf_floor=1.0))
    (group,) = netcheck.start(["n0"], 0.0)
    netcheck.answered("n0", healthy(group)["n0"], 1.0)
    netcheck.proceed(1.0)
    assert netcheck.summary() == "comm perf test over 1 node, 1 rank: nothing was measured"
    assert netcheck.perf.failure == ""


def test_a_job_that_trains_already_has_no_perf_test() -> None:
    netcheck = fresh(PERF)
    netcheck.trust(names(4))
    assert not netcheck.needs_probing(names(4))


@pytest.mark.slow
def test_a_check_costs_each_answer_no_more_in_a_larger_crowd() -> None:
    """An answer that ends no pass is O(1)."""

    def seconds(count: int) -> float:
        netcheck = fresh()
        groups = netcheck.start(names(count), 0.0)
        said = [it for group in groups for it in Machines(()).probe(group).items()][:-1]
        began = time.process_time()
        for node, answer_ in said:
            netcheck.answered(node, answer_, 1.0)
            netcheck.proceed(1.0)
        return (time.process_time() - began) / count

    small = min(seconds(500) for _ in range(3))
    large = min(seconds(4000) for _ in range(3))
    assert large < 5 * small + 1e-6


def test_what_a_check_found_is_news_once() -> None:
    netcheck = fresh(PERF)
    drive(netcheck, names(2), Machines(()), 0.0)
    assert netcheck.take_news().startswith("network check of 2 nodes")
    assert netcheck.take_news() == ""
    (group,) = netcheck.start(names(2), 10.0, dict.fromkeys(names(2), 1))
    hear(netcheck, measured(group), 11.0)
    assert netcheck.take_news().startswith("comm perf test over 2 nodes")
    netcheck.forget("n1")
    netcheck.start(names(2), 20.0)
    netcheck.lost("n1", "gone", 20.0)
    netcheck.proceed(20.0)
    assert "comm perf test" not in netcheck.take_news()
