"""Measures how the cost of a rendezvous grows with the number of nodes, compared with torch's c10d
rendezvous.

    python benchmarks/rendezvous_scale.py [--quick] [--json FILE] [--plot FILE]

elasticrun: a real master process and 64 to 1,000 sessions of real agents' links, from a few load
processes; all connect, send Hello and join, until each has its Start. c10d: one real TCPStore and
handlers of torch's dynamic rendezvous, one thread each in a few processes, as many as get their
ranks within the time limit; all call next_rendezvous at once. The growth exponent is the slope of a
straight line through log cost over log nodes. Bytes are the kernel's count for the sockets of
master and store (TCP payload in both directions).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
from crowd import HERE, Lines, cpu_of, merge_tallies, serving, wire
from stage import TookTooLong, free_port

DOCS = HERE.parent / "docs"
OURS = "elasticrun"
THEIRS = "c10d"
BAR = 2.0
"""Target: CPU seconds that the master may use for a rendezvous of 1,000 nodes."""

PROCESSES = 2


def ours(nodes: int, seconds: float) -> dict[str, float]:
    """Measure one rendezvous of this many nodes, and the cost of keeping them attached for
    `seconds`. CPU in seconds, `steady` in percent of a core."""
    with serving(nodes, PROCESSES) as (master, crowd):
        busy, loads = master.cpu(), crowd.cpu()
        attached = crowd.send(do="attach", every=0.0)
        crowd.send(do="join")
        done = crowd.send(do="started")
        used, clients = master.cpu() - busy, crowd.cpu() - loads
        carried = wire(master.port)
        time.sleep(2.0)  # until the last Running and the first heartbeats have been sent
        busy, began = master.cpu(), time.monotonic()
        time.sleep(seconds)
        steady = 100 * (master.cpu() - busy) / (time.monotonic() - began)
        found = {
            "nodes": float(nodes),
            "wall": done["last_start"] - attached["first_dial"],
            "join": done["last_start"] - done["first_join"],
            "server": used,
            "all": used + clients,
            "steady": steady,
            "rss": master.rss(),
            "redialled": float(done["orders"]["Welcome"] - nodes),
        }
        if carried is not None:
            found["bytes"] = carried.total / nodes
        return found


def theirs(nodes: int, patience: float) -> dict[str, float]:
    """The same with c10d, without keeping nodes attached. Raises TookTooLong if not all have their
    ranks within `patience` seconds."""
    port = free_port()
    load = str(HERE / "c10d_load.py")
    environ = {"BENCH_PATIENCE": str(patience), "LOGLEVEL": "ERROR"}
    everybody = [Lines(load, str(port), environ=environ)]
    try:
        everybody[0].answer(60.0)
        for number in range(PROCESSES):
            count = nodes // PROCESSES + (number < nodes % PROCESSES)
            everybody.append(Lines(load, str(port), str(count), str(nodes), environ=environ))
        store, loads = everybody[0], everybody[1:]
        for one in loads:
            one.ask({"do": "nothing"})
            one.answer(60.0)  # torch is imported
        before = [cpu_of(one.process.pid) for one in everybody]
        began = time.monotonic()
        for one in loads:
            one.ask({"do": "join"})
        done = merge_tallies([one.answer(2 * patience) for one in loads])
        used = [cpu_of(one.process.pid) - was for one, was in zip(everybody, before, strict=True)]
        if done["late"]:
            raise TookTooLong(f"not all of {nodes} within {patience:g} s {done['refused'] or ''}")
        found = {
            "nodes": float(nodes),
            "wall": done["last_start"] - began,
            "server": used[0],
            "all": sum(used),
            "rss": rss(store.process.pid),
        }
        carried = wire(port)
        if carried is not None:
            found["bytes"] = carried.total / nodes
        return found
    finally:
        for one in reversed(everybody):
            one.end()


def rss(pid: int) -> float:
    """The resident memory of a process in MB."""
    import psutil

    return float(psutil.Process(pid).memory_info().rss) / 1e6


def exponent(points: Sequence[dict[str, float]], cost: str) -> float | None:
    """The slope of log cost over log nodes; None for fewer than two sizes."""
    pairs = [(math.log(p["nodes"]), math.log(p[cost])) for p in points if p.get(cost, 0.0) > 0]
    if len({x for x, _ in pairs}) < 2:
        return None
    return statistics.linear_regression(*zip(*pairs, strict=True)).slope


# ---------------------------------------------------------------- what is printed and drawn

COLUMNS = (
    ("wall", "dial → all have their place", "{:.2f} s"),
    ("server", "CPU of master / store", "{:.2f} s"),
    ("all", "CPU of all, clients too", "{:.2f} s"),
    ("bytes", "bytes per node", "{:,.0f}"),
    ("rss", "RSS", "{:.0f} MB"),
    ("steady", "CPU at rest", "{:.1f} %"),
    ("redialled", "dialled twice", "{:.0f}"),
)


def line(name: str, point: dict[str, float]) -> str:
    """One size as a line of the table."""
    cells = [name, f"{point['nodes']:.0f}"]
    cells += [form.format(point[key]) if key in point else "-" for key, _, form in COLUMNS]
    return "| " + " | ".join(cells) + " |"


def draw(result: dict[str, Any], target: Path) -> None:
    """Draw CPU and bytes over nodes, on logarithmic axes, with the exponents."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
    plan = (("all", "CPU seconds, server and clients"), ("bytes", "bytes on the wire per node"))
    for axes, (cost, title) in zip(both, plan, strict=True):
        for name, colour in ((THEIRS, "#b9b9b9"), (OURS, "#d1495b")):
            points = [p for p in result[name] if cost in p]
            slope = result["exponents"][name].get(cost)
            label = name if slope is None else f"{name}: nodes^{slope:.2f}"
            where = [p["nodes"] for p in points]
            axes.plot(where, [p[cost] for p in points], "o", color=colour, label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("nodes")
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{result['date'][:10]}, {result['machine'].split(', load')[0]}", fontsize=7)
    figure.savefig(target, dpi=150)


def measure(quick: bool) -> dict[str, list[dict[str, float]]]:
    """Measure and print all sizes of both, c10d until it fails."""
    found: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
    samples = 1 if quick else 3
    for nodes in (64, 256) if quick else (64, 256, 1000):
        for _ in range(samples):
            found[OURS].append(ours(nodes, 3.0 if quick else 10.0))
            print(line(OURS, found[OURS][-1]), flush=True)
    patience = 20.0 if quick else 60.0
    for nodes in (8, 16, 32, 64) if quick else (8, 16, 32, 64, 128, 256, 512):
        try:
            found[THEIRS].append(theirs(nodes, patience))
            print(line(THEIRS, found[THEIRS][-1]), flush=True)
        except TookTooLong as late:
            print(f"| {THEIRS} | {nodes} | {late} |" + " |" * (len(COLUMNS) - 1), flush=True)
            break
    return found


def main() -> int:
    """Measure, print, draw, write. Returns 1 if the target is missed."""
    parser = argparse.ArgumentParser(description="What a rendezvous costs as nodes grow.")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a first look")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--plot", type=Path, default=DOCS / "rendezvous-scale.png")
    options = parser.parse_args()
    about = report.begin()
    print("| | nodes | " + " | ".join(title for _, title, _ in COLUMNS) + " |")
    print("|---|---" + "|---" * len(COLUMNS) + "|")
    found = measure(options.quick)
    exponents = {
        name: {
            cost: slope
            for cost in ("wall", "server", "all", "bytes")
            if (slope := exponent(points, cost)) is not None
        }
        for name, points in found.items()
    }
    print("\n| growth: cost ~ nodes^x | wall | server's CPU | all CPU | bytes per node |")
    print("|---|---|---|---|---|")
    for name, slopes in exponents.items():
        cells = (f"{slopes[c]:.2f}" if c in slopes else "-" for c in ("wall", "server", "all"))
        last = f"{slopes['bytes']:.2f}" if "bytes" in slopes else "-"
        print(f"| {name} | " + " | ".join([*cells, last]) + " |")
    result: dict[str, Any] = {**about, **found, "exponents": exponents}
    report.write("rendezvous", about, {**found, "exponents": exponents}, options.json)
    draw(result, options.plot)
    print(f"drawn in {options.plot}")
    largest = [p["server"] for p in found[OURS] if p["nodes"] == 1000]
    if not largest:
        return 0
    middle = statistics.median(largest)
    print(f"1,000 nodes: {middle:.2f} s of the master's CPU, wanted ≤ {BAR:g} s: ", end="")
    print("met" if middle <= BAR else "missed")
    return 0 if middle <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
