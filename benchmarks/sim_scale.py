"""Runs the simulator at the size of the largest jobs: what a node costs the state machines as the
number of nodes grows.

    python benchmarks/sim_scale.py [--quick] [--factor F] [--hours H] [--json FILE] [--png FILE]

For 64 to 10,000 nodes of one rank each: the real state machines of the master and of every agent
under a virtual clock, while nodes die at random and return. The table shows the events (a message
that arrives, a deadline, a rank that starts or ends) per second of CPU, the rounds, the node-hours
in which living nodes did no work, and the growth exponent of CPU time per virtual hour.

The rate of deaths is the published one of a job of 16,384 GPUs: 419 unexpected interruptions in 54
days (Grattafiori et al., The Llama 3 Herd of Models, 2024, section 3.3.4 and table 5). With eight
GPUs per node that is 419 / (54 * 24 h) / 2,048 nodes = 1.58e-4 per node and hour: 1.6 in one hour
of 10,000 nodes. `--factor` multiplies it; by default the table has it once and ten times.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import random
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import report
from msgspec.structs import replace
from simulator import DEFAULT_SPEC, NodeSetup, Rank, World, Worlds

SIZES = (64, 256, 1000, 4000, 10_000)
DEATHS_PER_NODE_HOUR = 419 / (54 * 24) / 2048
AWAY = (120.0, 900.0)
"""Minimum and maximum seconds until a dead node returns, after a reboot or as a replacement."""

BAR = 1.1
"""Target: the maximum exponent."""


class Work(Worlds):
    """`Worlds` that adds up the node-seconds of work."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._since = 0.0
        self._size = 0
        self.node_seconds = 0.0

    def born(self, rank: Rank) -> None:
        """As `Worlds.born`."""
        super().born(rank)
        if rank.round in self.stepping:
            self.count(rank.world_size)

    def dead(self, rank: Rank) -> None:
        """As `Worlds.dead`."""
        super().dead(rank)
        if self._size and not self.stepping:
            self.count(0)

    def count(self, size: int) -> None:
        """Add up the work so far; from now on `size` nodes work."""
        now = self._world.clock.now
        self.node_seconds += self._size * (now - self._since)
        self._since, self._size = now, size


@dataclass
class Hour:
    """The results for one size."""

    nodes: int
    factor: float
    hours: float
    deaths: int
    rounds: int
    events: int  # things that happened in the simulated world
    beats: int  # of these
    cpu: float  # seconds
    down: float  # node-hours of nodes that were dead
    lost: float  # node-hours of living nodes without work
    rss: float  # MB, of the whole simulator until then

    def markdown(self) -> str:
        """A line of the table."""
        return (
            f"| {self.nodes:,} | {self.factor:g} | {self.deaths} | {self.rounds} | "
            f"{self.events:,} | {self.events / self.cpu:,.0f} | "
            f"{self.lost:.2f} | {self.down:.1f} | "
            f"{self.cpu / self.hours:.2f} s | {1e3 * self.cpu / self.hours / self.nodes:.2f} ms |"
        )


def hour(nodes: int, factor: float, hours: float, seed: int = 1) -> Hour:
    """Simulate `nodes` nodes that work and die for this many virtual hours."""
    rng = random.Random(seed)
    spec = replace(DEFAULT_SPEC, min_nodes=nodes * 3 // 4, max_nodes=nodes)
    world = World(beats=True, traced=False)
    work = world.worlds = Work(world)
    down = 0.0
    world.start_master(spec)
    end = hours * 3600.0
    deaths = 0

    def start(name: str) -> None:
        world.start_node(NodeSetup(name, spec))

    def die() -> None:
        nonlocal deaths, down
        living = [node for node in world.nodes.values() if node.alive]
        node = rng.choice(living)
        deaths += 1
        away = rng.uniform(*AWAY)
        down += min(away, end - world.clock.now)
        node.kill() if rng.random() < 0.5 else node.vanish()
        world.clock.after(away, lambda: start(node.name))
        plan()

    def plan() -> None:
        when = world.clock.now + rng.expovariate(nodes * DEATHS_PER_NODE_HOUR * factor / 3600.0)
        if when < end:
            world.clock.at(when, die)

    began = time.process_time()
    for index in range(nodes):
        start(f"n{index}")
    world.run_until(10.0)
    plan()
    world.run_until(end)
    cpu = time.process_time() - began
    work.count(0)
    assert world.over is None, world.over
    assert not work.faults, work.faults[:3]
    beats = sum(life.beats for life in world.lives)
    return Hour(
        nodes,
        factor,
        hours,
        deaths,
        len(work.began),
        world.clock.ran,
        beats,
        cpu,
        down / 3600.0,
        nodes * hours - down / 3600.0 - work.node_seconds / 3600.0,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0,
    )


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the line fitted to these points on logarithmic axes."""
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(y) for _, y in points]
    middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - middle_x) ** 2 for x in xs)


def draw(found: dict[str, object], hours: Sequence[Hour], target: Path) -> None:
    """Draw CPU per virtual hour over nodes, with the exponents and a line for the target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    factors = sorted({one.factor for one in hours})
    for colour, factor in zip(("#33658a", "#d1495b", "#7a9e3a"), factors, strict=False):
        mine = [one for one in hours if one.factor == factor]
        xs, ys = [one.nodes for one in mine], [one.cpu / one.hours for one in mine]
        label = f"{factor:g} × the published rate: exponent {found['exponents'][f'{factor:g}']:.2f}"  # type: ignore[index]
        axes.loglog(xs, ys, "o-", color=colour, label=label, markersize=4)
    anchor = hours[0]
    xs = [min(one.nodes for one in hours), max(one.nodes for one in hours)]
    ys = [anchor.cpu / anchor.hours * (x / anchor.nodes) ** BAR for x in xs]
    axes.loglog(xs, ys, ":", color="#777777", label=f"exponent {BAR:g}, the bar")
    axes.set_xlabel("nodes")
    axes.set_ylabel("CPU seconds per virtual hour")
    axes.set_title(f"{str(found['date'])[:10]}, {found['machine']}", fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(target, dpi=150)


def main() -> int:
    """Measure, print, write. Returns 1 if the target is missed."""
    parser = argparse.ArgumentParser(description="The brains at 64 to 10,000 simulated nodes.")
    parser.add_argument(
        "--quick", action="store_true", help="up to 1,000 nodes, a tenth of an hour"
    )
    parser.add_argument("--factor", type=float, action="append", help="of the published rate")
    parser.add_argument("--hours", type=float, default=1.0, help="virtual hours")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--png", type=Path, help="draw the picture into this file")
    options = parser.parse_args()
    sizes = SIZES[:3] if options.quick else SIZES
    length = 0.1 if options.quick else options.hours
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    print(f"{date}: {machine}, {length:g} virtual hours\n")
    print(
        "| nodes | rate | deaths | rounds | events | events per CPU second | node-hours lost | "
        "node-hours down | CPU per hour | per node |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    hours = []
    for factor in options.factor or (1.0, 10.0):
        for nodes in sizes:
            hours.append(hour(nodes, factor, length))
            print(hours[-1].markdown(), flush=True)
    exponents = {
        f"{factor:g}": exponent([(h.nodes, h.cpu) for h in hours if h.factor == factor])
        for factor in sorted({one.factor for one in hours})
    }
    about = {"date": date, "machine": machine}
    found = {"exponents": exponents, "rows": [asdict(one) for one in hours]}
    report.write("sim-scale", about, found, options.json)
    if options.png:
        draw({**about, **found}, hours, options.png)
        print(f"drawn into {options.png}")
    for factor, slope in exponents.items():
        verdict = "met" if slope <= BAR else "missed"
        print(f"{factor} × the published rate: exponent {slope:.2f}, wanted ≤ {BAR:g}: {verdict}")
    return 1 if max(exponents.values()) > BAR else 0


if __name__ == "__main__":
    sys.exit(main())
