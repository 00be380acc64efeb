"""Crash and restart, again and again: no life is wasted and nothing piles up."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tests.harness import ELASTICRUN, SCRIPTS, World, await_exit


def crash(world: World, cycles: int, limit: float) -> None:
    """So many lives that end with SIGKILL of one rank, then one that ends well."""
    launched = world.launch(
        ELASTICRUN,
        *("--nproc-per-node=2", f"--max-restarts={cycles}", "--restart-backoff=0"),
        *(str(SCRIPTS / "crash_cycles.py"), str(cycles)),
    )
    counts: list[dict[str, int]] = []
    for life in range(cycles + 1):
        peers = world.hub.ranks(2, restart=life)
        for peer in peers:
            assert world.hub.word(peer, "sum")["value"] == 2, life
        if life in (cycles // 5, cycles - 1):
            world.hub.ranks(2, restart=life)
            counts.append(census(world, launched.pid))
    assert launched.wait(limit) == 0, launched.stderr
    assert len(world.hub.peers) == 2 * (cycles + 1)  # no life without its all_reduce
    first, last = counts
    assert last["descriptors"] <= first["descriptors"] + 2, counts
    # two ranks and two stores more or less: one life is ending, the next one begins
    assert last["processes"] <= first["processes"] + 4, counts
    assert not await_exit([p.pid for p in world.survivors()], 10)
    assert not [name for name in os.listdir(world.tmp) if not name.startswith("torchelastic_")]
    left = [p for p in (world.scratch / "run").rglob("*") if p.is_file()]
    assert len(left) <= 1, left  # the lock file of the slot, which is reused


def census(world: World, agent: int) -> dict[str, int]:
    """How much there is of what could pile up."""
    return {
        "descriptors": len(os.listdir(f"/proc/{agent}/fd")),
        "processes": len(world.survivors()),
        "threads": psutil.Process(agent).num_threads(),
        "files": sum(1 for p in Path(world.tmp).rglob("*") if "attempt_" not in str(p)),
    }


@pytest.mark.slow
def test_thirty_times(world: World) -> None:
    crash(world, 30, 60)


@pytest.mark.soak
def test_two_hundred_times(world: World) -> None:
    crash(world, 200, 300)
