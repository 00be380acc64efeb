"""Healthy training of any shape raises no alarm; a fault is found, and the right rank named."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from elasticrun.wire import messages as m
from tests.core.sight import worlds
from tests.core.sight.worlds import FOR_EVER, Training, healthy
from tests.further import further

SEEDS = 10
HOUR = 3600.0


def alarms(seed: int, silent: float = 0.0) -> list[str]:
    """What is told of an hour of healthy training."""
    world = Training(healthy(seed), silent=silent).run(HOUR)
    assert not any("is over" in text for _, text in world.notes)
    told = [f"{at:.0f}: {text}" for at, text in world.notes if "ranks go on" not in text]
    return [text for text in told if "hang" in text or "still:" in text]


def test_healthy_training_raises_no_alarm() -> None:
    told = [text for seed in range(SEEDS) for text in alarms(seed)]
    assert not [text for text in told if "(weak): rank 0" not in text]
    assert len(told) > SEEDS // 2, "many a checkpoint must be long"


def test_a_host_that_answers_late_raises_no_alarm() -> None:
    """Whoever is silent at a look seems to have its interpreter held, but not at all looks."""
    told = [text for seed in range(10) for text in alarms(seed, silent=0.3)]
    assert not [text for text in told if "(weak): rank" not in text]


@further("test_healthy_training_raises_no_alarm")
def test_hundreds_of_healthy_trainings_raise_no_alarm() -> None:
    told = [text for seed in range(SEEDS, 250) for text in alarms(seed)]
    assert not [text for text in told if "(weak): rank 0" not in text]


FAULTS: dict[str, tuple[m.RankSeen, str, float]] = {
    "idle": (worlds.LOADS, "(strong)", 71.0),
    "stopped": (replace(worlds.LOADS, being=m.Being.STOPPED, answers=False), "(strong)", 70.0),
    "ended": (replace(worlds.LOADS, being=m.Being.ENDED, answers=False), "(certain)", 15.0),
    "held": (replace(worlds.LOADS, answers=False, holds=True), "(strong)", 71.0),
    "disk": (replace(worlds.LOADS, being=m.Being.DISK), "(strong)", 71.0),
    "busy": (worlds.COMPUTES, "(weak)", 131.0),
}


def with_fault(
    seed: int, odd: int, what: str, base: float = 0.0
) -> Callable[[int, int], list[tuple[str, float]]]:
    """A training of short steps in which one rank does this instead of its eighth."""
    base = base or random.Random(seed).uniform(0.2, 3.0)

    def plan(rank: int, step: int) -> list[tuple[str, float]]:
        if step == 8 and rank == odd:
            return [(what, FOR_EVER)]
        return [("compute", base), ("tp", 0.0), ("compute", base), ("dp", 0.0), ("world", 0.0)]

    return plan


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("seed", range(4))
def test_the_odd_rank_is_named_in_time(kind: str, seed: int) -> None:
    stuck, klass, within = FAULTS[kind]
    odd = random.Random(f"{kind} {seed}").randrange(8)
    world = Training(with_fault(seed, odd, "compute"), stuck).run(300.0)
    last = max(world.moved.values())
    told = [(at, text) for at, text in world.notes if "hang (" in text]
    assert told, world.notes
    at, text = told[0]
    assert klass in text
    assert f"rank {odd} (node {'ab'[odd // 4]})" in text
    assert at - last <= within
    assert (world.over_at is not None) == (klass == "(certain)")
    assert world.over_at is None or world.over_at - last <= 31.0


@pytest.mark.parametrize("base", [0.0, 9.0], ids=["short steps", "slow steps"])
@pytest.mark.parametrize("extra", ["dp broadcast [4]", "world barrier"])
def test_another_collective_is_certain(extra: str, base: float) -> None:
    world = Training(with_fault(1, 3, extra, base)).run(400.0)
    told = [(at, text) for at, text in world.notes if "hang (" in text]
    assert told, world.notes
    assert "(certain)" in told[0][1]
    assert told[0][0] - max(world.moved.values()) <= 15.0
    assert world.over_at is not None
