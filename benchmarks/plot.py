"""Draws the README's figure from a file that launcher.py wrote.

python benchmarks/plot.py benchmarks/results/FILE.json docs/recovery.png
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROWS = {
    "a rank dies → next life's first all_reduce": "a rank dies,\none node",
    "one node of two: a rank dies → both run again": "a rank dies,\ntwo nodes",
    "command → first all_reduce": "cold start",
    "the same, HF Trainer": "a rank dies,\nHF Trainer",
    "the same, Lightning": "a rank dies,\nLightning",
}
COLOURS = {"torchrun": "#b9b9b9", "elasticrun": "#d1495b"}


def draw(source: Path, target: Path) -> None:
    """Draw medians as bars and every sample as a dot, on a logarithmic axis."""
    result = json.loads(source.read_text())
    rows = {row["row"]: row for row in result["rows"]}
    names = [name for name in ROWS if name in rows]
    figure, axes = plt.subplots(figsize=(8.4, 3.4), layout="constrained")
    for shift, launcher in ((-0.2, "torchrun"), (0.2, "elasticrun")):
        for place, name in enumerate(names):
            samples = rows[name][launcher]
            median = statistics.median(samples)
            label = launcher if place == 0 else None
            axes.bar(place + shift, median, 0.38, color=COLOURS[launcher], label=label)
            axes.plot([place + shift] * len(samples), samples, ".", color="#333333", markersize=3)
            above = max(samples) * 1.12
            axes.text(place + shift, above, f"{median:.2g} s", ha="center", fontsize=8)
    axes.set_yscale("log")
    axes.set_ylim(0.03, 20)
    axes.set_ylabel("seconds to the first all_reduce")
    axes.set_xticks(range(len(names)), [ROWS[name] for name in names], fontsize=8)
    axes.set_title(f"{result['date'][:10]}, {result['machine'].split(', load')[0]}", fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
