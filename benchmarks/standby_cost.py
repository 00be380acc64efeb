"""Measures what standbys cost the steps of a training.

    python benchmarks/standby_cost.py [--seconds S] [--json FILE]

Two ranks on gloo that use all of their cores, and standbys that import torch._dynamo at idle
priority. While they do, their tracer is stopped in every other half second, and the standbys with
it: the steps of these windows are compared with those of the others. Once the standbys are parked,
the CPU time of them and their tracer is read twice.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from pathlib import Path

import psutil
import report
from stage import ELASTICRUN, SCRIPTS, Job, job
from watch_cost import RANKS, Step, result

WINDOW = 0.5
TRACER = "elasticrun: tracer of standbys"


def standbys(run: Job) -> list[psutil.Process]:
    """The tracer, and what it traces."""
    below = psutil.Process(run.agents[0].pid).children(recursive=True)
    (tracer,) = (one for one in below if " ".join(one.cmdline()) == TRACER)
    status = {one: Path(f"/proc/{one.pid}/status").read_text() for one in below}
    return [tracer, *(one for one in below if f"TracerPid:\t{tracer.pid}\n" in status[one])]


def cpu(processes: list[psutil.Process]) -> float:
    """Seconds of CPU that these have used."""
    return sum(sum(one.cpu_times()[:2]) for one in processes)


def is_parked(run: Job) -> bool:
    """Whether the standbys of all ranks are."""
    return (run.folder / "console-0").read_bytes().count(b": ready (") == RANKS


def measure(seconds: float) -> tuple[list[Step], list[tuple[float, bool]], float, float]:
    """Steps; the time at which each window began, and whether standbys ran in it; CPU seconds of
    the standbys while they were importing; the same during two seconds in which they were parked,
    -1: they were not."""
    windows: list[tuple[float, bool]] = []
    with job(ELASTICRUN) as run:
        out = run.folder / "said"
        words = (f"{SCRIPTS}/watched.py", str(seconds), str(out))
        flags = ("--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=1", "--standby=1")
        loud = {"LOGLEVEL": "DEBUG"}
        run.start(*flags, script="dynamo_first.py", arguments=words, more=loud)
        console = run.folder / "console-0"
        while console.read_bytes().count(b": rehearsing") < RANKS:
            time.sleep(0.1)
        tracer, *others = standbys(run)
        began, runs = cpu([tracer, *others]), True
        while not is_parked(run) and run.agents[0].poll() is None:
            os.kill(tracer.pid, signal.SIGCONT if runs else signal.SIGSTOP)
            windows.append((time.monotonic(), runs))
            time.sleep(WINDOW)
            runs = not runs
        used, parked = 0.0, -1.0
        if is_parked(run):
            tracer.send_signal(signal.SIGCONT)
            used = cpu([tracer, *others]) - began
            time.sleep(1.0)
            before = cpu([tracer, *others])
            time.sleep(2.0)
            parked = cpu([tracer, *others]) - before
        run.until(lambda: run.agents[0].poll() is not None, seconds + 300)
        return result(out).steps, windows, used, parked


def slower(steps: list[Step], windows: list[tuple[float, bool]]) -> list[float]:
    """For each window in which standbys run: by which fraction its median step is longer than that
    of the window before it."""
    ratios: list[float] = []
    before = 0.0
    for began, runs in windows:
        inside = [took for at, took in steps if began <= at < began + WINDOW - took]
        middle = statistics.median(inside) if inside else 0.0
        if runs and before and middle:
            ratios.append(middle / before - 1)
        before = 0.0 if runs else middle
    return ratios


def main() -> None:
    """Measure, print, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    about = report.begin()
    steps, windows, used, parked = measure(options.seconds)
    ratios = slower(steps, windows)
    found = {"slower": ratios, "importing": [used], "parked": [parked]}
    print(f"median step {statistics.median(took for _, took in steps) * 1000:.2f} ms")
    if ratios:
        print(
            f"while they import: {statistics.median(ratios):+.2%}, {len(ratios)} pairs of windows"
        )
    print(f"their CPU time: {used:.2f} s for imports; {parked:.2f} s in 2 s while parked")
    report.write("standby_cost", about, {"steps": found}, options.json)


if __name__ == "__main__":
    main()
