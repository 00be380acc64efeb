"""What an event costs the master's brain as nodes grow: lines of it that run, never seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from msgspec.structs import replace

from elasticrun.core.events import Attached, Detached, Heard, JobEvent, Tick
from elasticrun.core.job.job import Job
from elasticrun.core.nodes.membership import Membership
from elasticrun.wire.messages import Beat, CheckSpec, Join, Order, Probe, Probed, ProbePhase
from tests.simulator.node import Node, NodeSetup
from tests.simulator.script import DEFAULT_SPEC
from tests.simulator.world import World

pytestmark = pytest.mark.slow

SMALL, LARGE = 50, 500


@contextmanager
def counting() -> Iterator[list[int]]:
    """The number of lines of elasticrun.core that run meanwhile, as the one item of a list."""
    count = [0]

    def line(frame: FrameType, event: str, _: Any) -> Any:
        count[0] += event == "line"
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if "elasticrun/core" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield count
    finally:
        sys.settrace(before)


def running(nodes: int) -> World:
    """A job of so many nodes; one more would have room."""
    spec = replace(DEFAULT_SPEC, min_nodes=nodes // 2, max_nodes=nodes + 2, last_call_timeout=2.0)
    world = World(beats=True, beat_interval=10.0, traced=False)
    world.start_master(spec)
    for index in range(nodes):
        world.start_node(NodeSetup(f"n{index}", spec))
    world.run_until(90.0)  # the round is not young any more: who comes now waits at the door
    assert len(world.worlds.stepping) == 1
    return world


def cost(job: Job, event: JobEvent, now: float) -> int:
    with counting() as count:
        job.step(event, now)
        job.next_deadline()
    return count[0]


def costs(world: World) -> dict[str, int]:
    job, now = world.master.job, world.clock.now
    node = world.nodes["n7"]
    session = node.stream.session
    offer = world.nodes["n8"].group.status().offered_store
    first, second = (Node(world, NodeSetup(name, node.setup.spec), name) for name in ("x", "y"))
    # the first to wait at the door changes what the record must say, which is written every 10 s
    job.step(Attached(10**6, first.hello()), now)
    job.step(Heard(10**6, Join(offer)), now)
    return {
        "a beat": cost(job, Heard(session, Beat(99)), now),
        "a tick": cost(job, Tick(), now),
        "a stream breaks": cost(job, Detached(session, False), now),
        "it is back": cost(job, Attached(10**6 + 1, node.hello()), now),
        "a newcomer": cost(job, Attached(10**6 + 2, second.hello()), now),
        "it joins": cost(job, Heard(10**6 + 2, Join(offer)), now),
    }


def test_no_event_of_one_node_looks_at_the_others() -> None:
    small, large = costs(running(SMALL)), costs(running(LARGE))
    for what, lines in large.items():
        assert lines <= 1.2 * small[what] + 10, f"{what}: {small[what]} -> {lines} lines"


def cost_of_an_answer(nodes: int) -> int:
    """Lines for one answer while all of so many nodes are probed."""
    spec = replace(DEFAULT_SPEC, min_nodes=nodes, max_nodes=nodes, checks=CheckSpec(network=True))
    world = World(traced=False)
    orders: dict[str, Probe] = {}

    def note(node: Node, order: Order) -> None:
        if isinstance(order, Probe):
            orders[node.name] = order

    world.on_order = note
    world.start_master(spec)
    for index in range(nodes):
        world.start_node(NodeSetup(f"n{index}", spec))
    world.run_until(1.1)
    assert len(orders) == nodes, "all are probed, and none has answered"
    stream = world.nodes["n7"].stream
    done = ProbePhase.DONE
    said = Probed(orders["n7"].check, True, done, False, False, "", 0.01, 1e9, (), 0.2, 0.1)
    return cost(world.master.job, Heard(stream.session, said), world.clock.now)


def test_an_answer_to_a_probe_looks_at_no_other_node() -> None:
    assert cost_of_an_answer(LARGE) <= 1.2 * cost_of_an_answer(SMALL) + 10


def test_a_round_costs_each_node_the_same() -> None:
    """From the death of one node to the next round of the others."""

    def round_of(nodes: int) -> float:
        world = running(nodes)
        world.nodes["n3"].kill()
        with counting() as count:
            world.run_until(world.clock.now + 5.0)
        assert len(world.worlds.began) == 2
        return count[0] / nodes

    assert round_of(LARGE) <= 1.2 * round_of(SMALL)


def test_counting_sees_what_looks_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof can fail: the list of silences is O(nodes)."""
    heard = Membership.on_message

    def curious(self: Membership, session: int, now: float) -> str | None:
        self.facts(now)
        return heard(self, session, now)

    small, large = running(SMALL), running(LARGE)
    monkeypatch.setattr(Membership, "on_message", curious)
    assert costs(large)["a beat"] > 5 * costs(small)["a beat"]
