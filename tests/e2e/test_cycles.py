"""Crash and restart, again and again: no life is wasted and nothing piles up."""

from __future__ import annotations

import os

import pytest

from tests.further import further
from tests.harness import ELASTICRUN, PATIENT, SCRIPTS, World, await_exit, await_true


def crash(world: World, cycles: int) -> None:
    """So many lives that end with SIGKILL of one rank, then one that ends well."""
    looks = (cycles // 5, cycles - 1)  # in these lives the job waits until it was looked at
    launched = world.launch(
        ELASTICRUN,
        *("--nproc-per-node=2", f"--max-restarts={cycles}", "--restart-backoff=0"),
        *(str(SCRIPTS / "crash_cycles.py"), *map(str, (cycles, *looks))),
        env=PATIENT,
    )
    first: dict[str, int] = {}
    for life in range(cycles + 1):
        peers = world.hub.ranks(2, restart=life)
        for peer in peers:
            assert world.hub.word(peer, "sum")["value"] == 2, life
        if life == looks[0]:
            first.update(census(world, launched.pid))
        if life == looks[1]:
            await_true(lambda: has_not_grown(first, world, launched.pid), f"less than {first}")
        if life in looks:
            peers[1].order("die")
    assert launched.wait() == 0, launched.stderr
    assert len(world.hub.peers) == 2 * (cycles + 1)  # no life without its all_reduce
    assert not await_exit([p.pid for p in world.survivors()])
    assert not [name for name in os.listdir(world.tmp) if not name.startswith("torchelastic_")]
    left = [p for p in (world.scratch / "run").rglob("*") if p.is_file()]
    assert len(left) <= 1, left  # the lock file of the slot, which is reused


def has_not_grown(first: dict[str, int], world: World, agent: int) -> bool:
    """Whether there is no more than at the first look; what is of the life before may still be on
    its way out."""
    last = census(world, agent)
    # two ranks and two stores more or less: one life is ending, the next one begins
    return (
        last["descriptors"] <= first["descriptors"] + 2
        and last["processes"] <= first["processes"] + 4
    )


def census(world: World, agent: int) -> dict[str, int]:
    """How much there is of what could pile up."""
    return {
        "descriptors": len(os.listdir(f"/proc/{agent}/fd")),
        "processes": len(world.survivors()),
    }


@further(
    "compat/test_defects::test_restarts_again_and_again",
    "forkserver/test_server::test_fifty_lives_leave_no_descriptor_and_no_process",
)
@pytest.mark.slow
def test_thirty_times(world: World) -> None:
    crash(world, 30)


@further("compat/test_defects::test_restarts_again_and_again")
def test_two_hundred_times(world: World) -> None:
    crash(world, 200)
