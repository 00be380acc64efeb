"""The health of nodes in the master's brain, an event at a time. Whole stories are in scripts/."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from elasticrun.config import EXIT_BAD_NODE, PROBE_ANSWER_SLACK
from elasticrun.core import events as fx
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName
from tests.core.by_hand import SPEC, Master, hello

CHECKS = m.CheckSpec(network=True, probe_limit=30.0, exclude_for=50.0)
CHECKED = structs.replace(SPEC, checks=CHECKS)
NODES = "abcdef"


def attach(master: Master, session: int, node: str, **changes: object) -> None:
    changes = {"spec": master.job.spec if session > 1 else CHECKED, **changes}
    master.feed(fx.Attached(session, hello(node, **changes)))


def gathered(nodes: int = 2, spec: m.JobSpec = CHECKED) -> tuple[Master, dict[str, m.Probe]]:
    """So many nodes have joined; what each is told to probe."""
    master = Master(structs.replace(spec, min_nodes=nodes, max_nodes=nodes))
    for session, node in enumerate(NODES[:nodes], 1):
        attach(master, session, node)
        master.hear(session, m.Join(Endpoint(f"10.0.0.{session}", 4000)))
    return master, probes(master, nodes)


def asked(master: Master, session: int) -> list[m.Probe]:
    """The probes that the last step told this session to make."""
    return [order for order in master.orders(session) if isinstance(order, m.Probe)]


def probes(master: Master, nodes: int) -> dict[str, m.Probe]:
    """What the last step told each of them to probe."""
    every = ((node, asked(master, session)) for session, node in enumerate(NODES[:nodes], 1))
    return {node: orders[-1] for node, orders in every if orders}


def answer(order: m.Probe, reason: str = "", *, own: bool = False) -> m.Probed:
    phase = m.ProbePhase.COMPUTE if own else m.ProbePhase.COMM if reason else m.ProbePhase.DONE
    transfers = () if reason or order.world_size == 1 else (m.Transfer(1 << 20, 0.002),)
    return m.Probed(
        check=order.check,
        ok=not reason,
        phase=phase,
        own=own,
        excused=False,
        reason=reason,
        compute=0.01,
        flops=2.7e8,
        transfers=transfers,
        seconds=0.5,
        timed=0.3,
    )


def session_of(node: str) -> int:
    return NODES.index(node) + 1


def passed(master: Master, orders: dict[str, m.Probe]) -> None:
    for node, order in orders.items():
        master.hear(session_of(node), answer(order))


def training(nodes: int = 2, spec: m.JobSpec = CHECKED) -> tuple[Master, RoundName]:
    """All have passed and train."""
    master, orders = gathered(nodes, spec)
    passed(master, orders)
    (start,) = master.orders(1)
    for session in range(1, nodes + 1):
        master.hear(session, m.Running(start.round, (1, 2)))
    return master, start.round


def notes(master: Master) -> list[str]:
    return [effect.text for effect in master.effects if isinstance(effect, fx.Note)]


# -------------------------------------------------------------------- orders


def test_each_node_is_told_its_own_place_in_a_small_group() -> None:
    _, orders = gathered(3)
    assert [orders[node].partners for node in "abc"] == ["b and c", "a and c", "a and b"]
    assert [orders[node].group_rank for node in "abc"] == [0, 1, 2]
    assert [orders[node].first_rank for node in "abc"] == [0, 2, 4]
    for order in orders.values():
        assert (order.group_world_size, order.world_size, order.limit) == (3, 6, 30.0)
        assert order.store == Endpoint("10.0.0.1", 4000)
    assert len({order.check for order in orders.values()}) == 1


def test_a_group_meets_where_others_can_dial() -> None:
    """As the ranks themselves do: a node that offers its loopback cannot be the meeting point."""
    master = Master(CHECKED)
    attach(master, 1, "a")
    master.hear(1, m.Join(Endpoint("127.0.0.1", 4000)))
    attach(master, 2, "b")
    master.hear(2, m.Join(Endpoint("10.0.0.2", 4000)))
    assert {order.store.host for order in probes(master, 2).values()} == {"10.0.0.2"}


def test_the_perf_test_does_not_name_everybody_to_everybody() -> None:
    _, orders = gathered(6, structs.replace(SPEC, checks=m.CheckSpec(perf=True)))
    assert {order.partners for order in orders.values()} == {"5 other nodes"}
    assert all(order.perf and order.group_world_size == 6 for order in orders.values())


def test_without_checks_nothing_is_probed_and_no_deadline_is_added() -> None:
    plain, checked = Master(SPEC), Master(CHECKED)
    for master, spec in ((plain, SPEC), (checked, CHECKED)):
        for session, node in ((1, "a"), (2, "b")):
            attach(master, session, node, spec=spec)
            master.hear(session, m.Join(Endpoint(f"10.0.0.{session}", 4000)))
    assert isinstance(plain.orders(1)[-1], m.Start)
    assert plain.job.status().check == ""
    assert {type(order) for order in checked.orders(1)} == {m.Probe, m.Wait}
    due = checked.job.next_deadline()
    assert due <= 30.0 + PROBE_ANSWER_SLACK


# -------------------------------------------------------------------- streams


def test_a_stream_that_comes_back_is_told_the_same_probe_again() -> None:
    master, orders = gathered()
    master.feed(fx.Detached(1, clean=False))
    attach(master, 11, "a")
    again = asked(master, 11)
    assert again == [orders["a"]]
    master.hear(11, m.Join(Endpoint("10.0.0.1", 4000)), answer(orders["a"]))
    assert not [order for order in master.orders(11) if isinstance(order, m.Start)]
    master.hear(2, answer(orders["b"]))
    assert [type(order) for order in master.orders(11)] == [m.Start]


def test_an_answer_is_not_asked_for_twice() -> None:
    master, orders = gathered()
    master.hear(1, answer(orders["a"]))
    master.feed(fx.Detached(1, clean=False))
    attach(master, 11, "a")
    assert not [order for order in master.orders(11) if isinstance(order, m.Probe)]


def test_a_partner_that_has_another_life_is_not_waited_for() -> None:
    master, _ = gathered()
    master.feed(fx.Detached(2, clean=True))
    attach(master, 12, "b", incarnation="life-2")
    mine = asked(master, 1)
    master.hear(12, m.Join(Endpoint("10.0.0.2", 4001)))
    mine += asked(master, 1)
    assert mine, "it is probed anew at once, by itself or with the new life"
    master.hear(1, answer(mine[-1]))
    mine = asked(master, 1)
    theirs = asked(master, 12)
    assert mine[0].check == theirs[0].check
    master.hear(1, answer(mine[0]))
    master.hear(12, answer(theirs[0]))
    assert [type(order) for order in master.orders(1)] == [m.Start]


def test_no_answer_within_the_limit_is_a_failure() -> None:
    master, orders = gathered()
    master.hear(1, answer(orders["a"]))
    master.now = 29.0 + PROBE_ANSWER_SLACK
    master.hear(2, m.Beat(1))
    master.feed(fx.Tick())
    assert not probes(master, 2)
    master.now = 30.0 + PROBE_ANSWER_SLACK
    master.feed(fx.Tick())
    assert set(probes(master, 2)) == {"a", "b"}, "they are looked at again"


# -------------------------------------------------------------------- exclusion


def convict(master: Master, orders: dict[str, m.Probe], node: str) -> None:
    """This node fails by itself in two passes, the others work."""
    for _ in range(2):
        awaited, orders = orders, {}
        for one, order in awaited.items():
            bad = one == node
            master.hear(session_of(one), answer(order, "a wrong result" if bad else "", own=bad))
            orders |= probes(master, len(NODES))


def test_who_is_excluded_is_recorded_before_it_is_told() -> None:
    master, orders = gathered(4, structs.replace(CHECKED, min_nodes=2))
    convict(master, orders, "b")
    kinds = [type(getattr(effect, "order", effect)).__name__ for effect in master.effects]
    assert "Refused" in kinds
    assert kinds.index("Record") < kinds.index("Refused")
    (refused,) = master.orders(2)
    assert isinstance(refused, m.Refused)
    assert refused.exit_code == EXIT_BAD_NODE
    assert "a wrong result" in refused.reason
    (fact,) = master.facts.exclusions.excluded
    assert (fact.node, fact.host, fact.kind) == ("b", "host-b", "failed")
    page = master.job.status()
    assert [one.node for one in page.excluded] == ["b"]
    assert "b failed" in page.check
    assert "10 ms per matmul" in next(n.health for n in page.nodes if n.node == "a")


def test_an_excluded_node_is_refused_on_its_host_and_probed_on_another() -> None:
    master, orders = gathered(4)
    convict(master, orders, "b")
    master.hear(2, m.Join(Endpoint("10.0.0.2", 4001)))
    assert master.effects == [], "a Join that it sent before it read the order"
    master.now = 10.0
    attach(master, 12, "b", incarnation="life-2")
    (refused,) = master.orders(12)
    assert isinstance(refused, m.Refused)
    assert refused.exit_code == EXIT_BAD_NODE
    assert "for 40 s more" in refused.reason
    assert fx.Hangup(12) in master.effects
    master.feed(fx.Detached(2, clean=True))
    attach(master, 13, "b", incarnation="life-3", host="another")
    assert isinstance(master.orders(13)[0], m.Welcome)
    master.hear(13, m.Join(Endpoint("10.0.0.9", 4000)))
    assert [order for order in master.orders(13) if isinstance(order, m.Probe)]


def test_the_job_waits_below_its_smallest_size_and_names_who_is_missing() -> None:
    master, orders = gathered(4)
    convict(master, orders, "b")
    status = master.job.status()
    assert status.phase == "gathering"
    assert "3 of 4 nodes (node b is excluded" in status.reason
    assert "a wrong result" in status.reason


def test_a_bandwidth_below_the_floor_ends_the_job() -> None:
    spec = structs.replace(SPEC, checks=m.CheckSpec(perf=True, perf_floor=1000.0))
    master, orders = gathered(2, spec)
    passed(master, orders)
    (end,) = master.orders(1)
    assert isinstance(end, m.End)
    assert end.exit_code == 1
    assert "1000 GB/s" in end.reason


# -------------------------------------------------------------------- while training


def train(master: Master, name: RoundName, slow: str, seconds: int, nodes: int) -> list[str]:
    """What is said while one of them takes three times as long as the others."""
    said: list[str] = []
    for number in range(seconds):
        master.now += 1.0
        for node in NODES[:nodes]:
            own = 0.9 if node == slow else 0.3
            master.hear(session_of(node), m.Steps(name, number, 1, 0.9, own, 0.9 - own))
            said += notes(master)
    return said


def test_steps_of_an_older_round_say_nothing() -> None:
    master, name = training(3)
    assert train(master, replace(name, number=9), "c", 60, 3) == []


# -------------------------------------------------------------------- a successor


def test_members_of_a_restored_round_are_trusted() -> None:
    master, name = training(2)
    again = Master(None, facts=master.facts, now=1000.0)
    again.feed(fx.Tick())
    for session, node in ((1, "a"), (2, "b")):
        (start,) = (one for one in master.told[session] if isinstance(one, m.Start))
        attach(again, session, node, attached=start, last_term=1, spec=again.job.spec)
        assert not asked(again, session)
    assert again.job.status().phase == "running"
    again.feed(fx.Detached(2, clean=True))
    again.hear(1, m.RanksFailed(name, ()), m.Stopped(name), m.Join(Endpoint("10.0.0.1", 4001)))
    assert not [order for order in again.orders(1) if isinstance(order, m.Probe)]


def test_the_perf_test_is_not_made_again_by_a_successor() -> None:
    master, _ = training(2, structs.replace(SPEC, checks=m.CheckSpec(perf=True)))
    again = Master(None, facts=master.facts, now=1000.0)
    again.feed(fx.Tick())
    assert again.job._streams.health._netcheck is None
    assert again.job.status().check == ""


# -------------------------------------------------------------------- names of hosts


@pytest.mark.parametrize(
    ("host", "address", "told"),
    [("same", "10.0.0.2", True), ("same", "10.0.0.1", False), ("other", "10.0.0.2", False)],
)
def test_two_nodes_with_one_host_name_are_named_once(host: str, address: str, told: bool) -> None:
    master = Master(SPEC)
    attach(master, 1, "a", host="same", address="10.0.0.1", spec=SPEC)
    attach(master, 2, "b", host=host, address=address, spec=SPEC)
    assert any("nodes a and b are both on a host named same" in n for n in notes(master)) == told
    master.feed(fx.Detached(2, clean=False))
    attach(master, 3, "b", host=host, address=address, spec=SPEC)
    assert not any("are both on" in note for note in notes(master))


def test_a_node_that_was_started_with_other_checks_is_told_of_by_their_names() -> None:
    master = Master(CHECKED)
    attach(
        master,
        1,
        "a",
        spec=structs.replace(CHECKED, checks=structs.replace(CHECKS, slow_ratio=3.0)),
    )
    assert "node a was started with different settings: slow_ratio=3.0 (the job: 1.5)" in notes(
        master
    )
