"""What a second fork server that is made ready beside training costs a step.

    python benchmarks/aside.py [--rounds N] [--seconds S] [--json FILE]

Two ranks keep both cores of a small machine busy (DDP with nn.Transformer). In turn with
`--preload=off` and as by default: steps per second over the same time, in which the second fork
server is started and imports. The bar: not slower by more than 1 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import report
from stage import ELASTICRUN, job

BAR = 1.01


def pace(seconds: float, *flags: str) -> float:
    """Steps per second of rank 0."""
    with job(ELASTICRUN) as run:
        words = (str(seconds), "count")
        run.start("--nproc-per-node=2", *flags, script="ddp_transformer.py", arguments=words)
        run.until(lambda: run.agents[0].poll() is not None, seconds + 120)
        return float((run.folder / "count").read_text())


def main() -> int:
    """Measure, print, write; 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description="What making ready aside costs a step.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    about = report.begin()
    samples: dict[str, list[float]] = {"off": [], "by default": []}
    for number in range(options.rounds):
        order = list(samples) if number % 2 == 0 else list(samples)[::-1]
        for name in order:
            flags = ("--preload=off",) if name == "off" else ()
            samples[name].append(pace(options.seconds, *flags))
    off, default = (statistics.median(samples[name]) for name in ("off", "by default"))
    print(
        "| steps per second | --preload=off | by default | slower | wanted |\n|---|---|---|---|---|"
    )
    print(
        f"| DDP with nn.Transformer | {off:.1f} | {default:.1f} | {off / default:.3f} | ≤ {BAR} |"
    )
    report.write("aside", about, samples, options.json)
    return report.verdict([] if off / default <= BAR else ["a step beside the second fork server"])


if __name__ == "__main__":
    sys.exit(main())
