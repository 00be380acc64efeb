"""The master is killed at every single moment of a scenario, once before and once after each of its
acts, and another takes its place: with its record, and with nothing. Training must go on as if
nothing had happened: the same worlds, one at a time, the same bill, the same outcome."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
from msgspec.structs import replace

from elasticrun.core.events import JobEffect, JobEvent, Record
from elasticrun.core.job.job import Job
from elasticrun.core.job.streams import Streams
from elasticrun.core.persisted import Facts, RestartFacts
from elasticrun.wire.messages import Order, Start
from elasticrun.wire.types import RoundName, dumps, loads
from tests.further import cases, further
from tests.simulator.node import Node
from tests.simulator.script import read, run
from tests.simulator.world import Doom, World

pytestmark = pytest.mark.slow

RESTART = 0.3
"""Seconds from the death of a master to the next one's first step."""


@dataclass(frozen=True)
class Scenario:
    """What befalls a job, and how it stands at the end."""

    commands: str
    world_size: int  # 0: the job is over
    charged: int = 0
    exits: tuple[int, ...] = ()  # exit codes of the agents that ended by themselves, sorted
    rounds: int = 1  # that may step, if no master dies


SCENARIOS = {
    "a rank fails": Scenario(
        "job 2:2 max_restarts=3 restart_backoff=0\n0 node a b\n40 fail a 0 boom\n99 end", 2, 1,
        rounds=2,
    ),
    "ranks of both nodes fail at once": Scenario(
        "job 2:2 max_restarts=3 restart_backoff=0\n0 node a b\n"
        "40 fail a 0 boom\n40 fail b 0 boom\n99 end", 2, 1, rounds=2,
    ),
    "a rank fails and the budget is spent": Scenario(
        "job 2:2 max_restarts=0\n0 node a b\n40 fail a 0 boom\n99 end", 0, exits=(1, 1)
    ),
    "all is done": Scenario("job 2:2\n0 node a b\n40 done a\n41 done b\n99 end", 0, exits=(0, 0)),
    "a node dies": Scenario(
        "job 2:3\n0 node a b c\n40 kill c\n99 end", 2, rounds=2
    ),
    "a node vanishes": Scenario(
        "job 2:3\n0 node a b c\n40 vanish c\n129 end", 2, rounds=2
    ),
    "a node dies and comes back": Scenario(
        "job 2:2 max_restarts=1\n0 node a b\n40 kill b\n41 node b\n99 end", 2, rounds=2
    ),
    "a spare takes its place": Scenario(
        "job 2:2 max_restarts=1\n0 node a b\n5 node c\n40 kill a\n99 end", 2, rounds=2
    ),
    "a spare takes its place, with no restart left": Scenario(
        "job 2:2 max_restarts=0\n0 node a b\n5 node c\n40 kill b\n99 end", 2, rounds=2
    ),
    "one of a fixed number is lost": Scenario(
        "job 2:2 max_restarts=0\n0 node a b\n40 kill b\n99 end", 0, exits=(1,)
    ),
    "two roles and ranks of unequal number": Scenario(
        "job 2:2 max_restarts=1 restart_backoff=0\n0 node a nproc=2 role=actor\n"
        "0 node b nproc=3 role=learner\n40 fail b 1 boom\n99 end", 5, 1, rounds=2,
    ),
    "a node joins": Scenario(
        "job 1:2 grow=now last_call_timeout=1\n0 node a\n40 node b\n99 end", 2, rounds=2
    ),
    "a node leaves": Scenario(
        "job 1:2\n0 node a b\n40 signal SIGTERM b\n99 end", 1, exits=(1,), rounds=2
    ),
    "too few are left": Scenario(
        "job 2:3 join_timeout=20 max_restarts=2\n0 node a b\n40 kill b\n149 end", 0, exits=(1,)
    ),
}  # fmt: skip

BLIND = ("a rank fails", "a node dies and comes back")
"""Those that are played for a master without a record, too."""

KEPT = (
    ("a node dies and comes back", False),
    *product(
        ("ranks of both nodes fail at once", "all is done", "a node vanishes", "a node leaves",
         "a node dies and comes back", "a spare takes its place", "a node joins"),
        [True],
    ),
)  # fmt: skip
"""Those of `make test`: one of each kind of event, which differ from the others in the number of
nodes or in what is left of the budget."""


def play(
    scenario: Scenario,
    doom: Doom | None = None,
    *,
    record: bool = True,
    later: Doom | None = None,
    disk: float = 0.0,
) -> World:
    """The scenario in a world whose masters are followed by others. `later`: what befalls the first
    of those, its acts counted from its birth. `disk`: seconds that a record takes."""
    terms = iter(range(2, 1000))
    dooms = iter([] if later is None else [later])

    def prepare(world: World) -> None:
        def follow() -> None:
            facts = world.durable if record else None
            after = next(dooms, None)
            if after is not None:
                world.doom = Doom(number=world.acts + after.number, after=after.after)
            world.start_master(None, next(terms), facts)

        world.doom = doom
        world.record_delay = lambda: disk
        world.on_master_death = lambda: world.clock.after(RESTART, follow)
        world.on_record = round_trip
        places: dict[tuple[str, RoundName], Start] = {}

        def one_place(node: Node, order: Order) -> None:
            if isinstance(order, Start):
                first = places.setdefault((node.incarnation, order.round), order)
                assert order == first, "what is told again is what was told"

        world.on_order = one_place

    commands = scenario.commands
    if not record:  # where half of a round is lost with it, the others wait until that has stopped
        commands = commands.replace("\n", " master_lost_timeout=9 restart_grace=1\n", 1)
    return run(read(f"# {scenario}\nworld beats=1\n{commands}\n"), prepare)


def round_trip(facts: Facts) -> None:
    assert loads(dumps(facts), Facts) == facts


def in_words(world: World) -> str:
    return "\n".join(world.lines)


def check(world: World, scenario: Scenario, *, record: bool) -> None:
    """One world at a time, the right bill, the right end."""
    assert not world.worlds.faults, in_words(world)
    exits = sorted(life.exited.code for life in world.lives if life.exited)
    assert tuple(exits) == scenario.exits, in_words(world)
    if not scenario.world_size:
        assert not world.worlds.stepping, in_words(world)
        return
    status = world.master.job.status()
    assert status.phase == "running", in_words(world)
    assert status.world_size == scenario.world_size, in_words(world)
    assert len(world.worlds.stepping) == 1, in_words(world)
    if record:
        assert status.restart_count == scenario.charged, in_words(world)
        assert len(world.worlds.began) == scenario.rounds, in_words(world)
    else:
        assert status.restart_count <= scenario.charged, in_words(world)


@pytest.mark.parametrize(
    ("name", "record"),
    cases(
        product(SCENARIOS, [True, False]),
        kept=KEPT,
        several=True,
    ),
)
def test_killed_at_every_moment(name: str, record: bool) -> None:
    scenario = SCENARIOS[name]
    undisturbed = play(scenario)
    check(undisturbed, scenario, record=True)
    assert undisturbed.acts > 10
    for number in range(1, undisturbed.acts + 1):
        for after in (False, True):
            world = play(scenario, Doom(number=number, after=after), record=record)
            assert world.doom is None, "the master was to die and did not"
            check(world, scenario, record=record)


@further("test_killed_at_every_moment", "core/scripts/two_masters_die_between_fact_and_order.txt")
@pytest.mark.parametrize("name", BLIND)
def test_the_successor_is_killed_at_every_moment_too(name: str) -> None:
    scenario = SCENARIOS[name]
    acts = play(scenario).acts
    died = 0
    for number in range(1, acts + 1):
        for next_number in range(1, 14):
            later = Doom(number=next_number, after=(number + next_number) % 2 == 0)
            world = play(scenario, Doom(number=number), later=later)
            died += world.doom is None
            check(world, scenario, record=True)
    assert died > 100, "most of the successors must have died as well"


@pytest.mark.parametrize("name", cases(["a rank fails", "a node joins"], kept=["a rank fails"]))
def test_killed_while_the_disk_is_slow(name: str) -> None:
    """What was decided after a record that is not durable yet was told to nobody."""
    scenario = SCENARIOS[name]
    undisturbed = play(scenario, disk=0.4)
    check(undisturbed, scenario, record=True)
    for number in range(1, undisturbed.acts + 1):
        for after in (False, True):
            world = play(scenario, Doom(number=number, after=after), disk=0.4)
            check(world, scenario, record=True)


def test_the_proof_can_fail_by_its_bill(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a brain that records no charge."""
    step = Job.step

    def wrong(self: Job, event: JobEvent, now: float) -> list[JobEffect]:
        return [
            Record(replace(effect.facts, restarts=RestartFacts()))
            if isinstance(effect, Record)
            else effect
            for effect in step(self, event, now)
        ]

    monkeypatch.setattr(Job, "step", wrong)
    with pytest.raises(AssertionError):
        test_killed_at_every_moment("a rank fails", True)


def test_the_proof_can_fail_by_its_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a brain that tells nobody again what the master before it did not live to tell."""
    monkeypatch.setattr(Streams, "_repeat_start", lambda *_: None)
    with pytest.raises(AssertionError):
        test_killed_at_every_moment("all is done", True)
