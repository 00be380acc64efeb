"""The worlds of a job under test: which ranks trained together, from when to when, and on which
nodes. All of it is read from the step log, that is, from what ranks did, not from what the launcher
believes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from elasticrun.testing.steps import Step

MOST_SHOWN: Final = 10
"""Numbers of steps that a sentence names."""


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that trained together, as far as they have said so."""

    round: int
    """Its number, as in the steps of its ranks; see `elasticrun.testing.Step`."""
    world_size: int
    restarts: int
    """Restarts that the job had been charged when it began; -1 where the script does not say."""
    began: float
    """When its first step was completed: CLOCK_MONOTONIC, seconds."""
    ended: float
    """When the last one was, so far."""
    nodes: Mapping[int, int]
    """Number of the node by group rank; empty where the script does not say."""
    pids: Mapping[int, int]
    """Process by rank."""
    first: int
    """The lowest step that a rank of it has completed: where it took up the work."""
    last: int
    """The highest."""
    whole: frozenset[int]
    """The steps that every one of its ranks has completed."""


def worlds(steps: Iterable[Step]) -> list[World]:
    """Every world in which at least one rank has completed a step, in the order of their first."""
    lives: dict[int, list[Step]] = {}
    for record in steps:
        lives.setdefault(record.round, []).append(record)
    return sorted(map(_world, lives.values()), key=lambda world: world.began)


def _world(steps: Sequence[Step]) -> World:
    size = steps[0].world_size
    who: dict[int, set[int]] = {}
    for record in steps:
        who.setdefault(record.step, set()).add(record.rank)
    return World(
        round=steps[0].round,
        world_size=size,
        restarts=steps[0].restarts,
        began=min(record.time for record in steps),
        ended=max(record.time for record in steps),
        nodes={r.group_rank: r.node for r in steps if r.group_rank >= 0 and r.node >= 0},
        pids={record.rank: record.pid for record in steps},
        first=min(who),
        last=max(who),
        whole=frozenset(step for step, ranks in who.items() if len(ranks) == size),
    )


def gap(found: Sequence[World]) -> str:
    """The steps that no whole world has completed though a later one was: a sentence, or "".

    A script that goes on from its last checkpoint may do a step twice, but leaves none out; the
    last step of all may have been interrupted."""
    if not found:
        return ""
    done = frozenset().union(*(world.whole for world in found))
    steps = range(min(world.first for world in found), max(world.last for world in found))
    if missing := [step for step in steps if step not in done]:
        more = " ..." if len(missing) > MOST_SHOWN else ""
        named = ", ".join(map(str, missing[:MOST_SHOWN]))
        return f"no whole world completed step {named}{more}; {story(found)}"
    return ""


def story(found: Sequence[World]) -> str:
    """The worlds in a few words, for a test that fails."""
    if not found:
        return "no rank has completed a step"
    start = found[0].began
    return "; ".join(
        f"a world of {world.world_size} from {world.began - start:.2f} s to "
        f"{world.ended - start:.2f} s, steps {world.first} to {world.last}"
        for world in found
    )
