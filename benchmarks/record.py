"""Measures the master's record: writing facts to disk, and loading those of a month.

    python benchmarks/record.py [--days N] [--nodes N]

The facts are those of a simulated job: the real state machine, with a failed rank or a lost node
about every hour, written by the real store to a real disk. Loading is timed in a fresh store, from
the open to the first output of the restored state machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

from msgspec import structs
from simulator import DEFAULT_SPEC, NodeSetup, World

from elasticrun.core.events import Tick
from elasticrun.core.job.job import Job
from elasticrun.core.persisted import Facts
from elasticrun.master.file_store import FileStore
from elasticrun.wire.types import mint_nonce

DAY = 24 * 3600.0
LOAD_BAR = 0.3
"""Target: seconds for which a master may be away without harm."""


def simulate(days: float, nodes: int) -> list[Facts]:
    """All versions of the facts of a simulated job of `nodes` nodes that runs for `days` days, with
    a failure about every hour."""
    chance = random.Random(4711)
    spec = structs.replace(
        DEFAULT_SPEC, min_nodes=nodes // 2, max_nodes=nodes, max_restarts=10**6, grow="now"
    )
    world = World(beats=True, beat_interval=30.0)
    found: list[Facts] = []
    world.on_record = found.append
    world.start_master(spec)
    for number in range(nodes):
        world.start_node(NodeSetup(f"node-{number:04d}", spec, nproc=2))
    while world.clock.now < days * DAY:
        world.run_until(world.clock.now + chance.uniform(1800.0, 5400.0))
        name = chance.choice(list(world.nodes))
        node = world.nodes[name]
        if node.ranks and chance.random() < 0.7:
            node.end_rank(next(iter(node.ranks.values())), 1, "ValueError: of this hour")
        else:
            node.kill()
            world.run_until(world.clock.now + 120.0)
            world.start_node(NodeSetup(name, spec, nproc=2))
        world.lines.clear()
    return found


async def write_all(folder: Path, versions: list[Facts]) -> list[float]:
    """Write all versions to a store in `folder`. Returns for each the milliseconds until the orders
    that depend on it may be sent."""
    store = FileStore(folder)
    await store.load()
    took = []
    for facts in versions:
        done = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        store.write(facts, lambda done=done: done.set_result(None))
        await done
        took.append((time.perf_counter() - began) * 1000)
    await store.close()
    return took


async def load_time(folder: Path) -> float:
    """Seconds until a restarted master has loaded its facts and its state machine has answered."""
    began = time.perf_counter()
    store = FileStore(folder)
    facts = await store.load()
    assert facts is not None
    Job(None, 0, mint_nonce, facts).step(Tick(), 1e6)
    took = time.perf_counter() - began
    await store.close()
    return took


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--nodes", type=int, default=16)
    asked = parser.parse_args()
    began = time.perf_counter()
    versions = simulate(asked.days, asked.nodes)
    last = versions[-1]
    print(
        f"{asked.days:g} simulated days of {asked.nodes} nodes: {last.number} rounds, "
        f"{last.restarts.count} restarts, {len(versions)} records "
        f"(simulated in {time.perf_counter() - began:.0f} s)"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        took = sorted(asyncio.run(write_all(folder, versions)))
        size = sum(path.stat().st_size for path in folder.iterdir())
        loads = [asyncio.run(load_time(folder)) for _ in range(5)]
    print(
        f"fact to order   p50 {statistics.median(took):7.2f} ms   "
        f"p99 {took[len(took) * 99 // 100]:7.2f} ms   max {took[-1]:7.2f} ms"
    )
    print(f"on disk         {size / 1024:11.0f} kB")
    print(
        f"load            median {statistics.median(loads):6.3f} s   max {max(loads):6.3f} s   "
        f"(wanted: {LOAD_BAR} s)"
    )


if __name__ == "__main__":
    main()
