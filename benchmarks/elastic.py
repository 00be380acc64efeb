"""Compares elasticrun with torchrun, in one run: the cost of nodes that join, leave or fall silent.

    python benchmarks/elastic.py [--quick] [--only WORD] [--ours] [--json FILE] [--plot FILE]

Real processes, gloo, a script that knows no launcher (scripts/step_log.py); every agent is a node.
Each row is measured for both launchers in turn, torchrun once; the table shows medians, worst cases
and targets. If torchrun reaches no further step, the cell says what it did instead. Results go to
benchmarks/results/ with the date and the machine, or to FILE.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import elastic_rows as rows
import report
import rows as launcher_rows
from stage import COMMANDS, ELASTICRUN, NVRX, TORCHRUN, TookTooLong

Take = Callable[[], list[float]]


@dataclass
class Row:
    """One line of the table: its measurement, its target, its result."""

    name: str
    unit: str
    most: float | None
    """The target: the worst sample must not exceed it. None: no target."""
    ours: Take
    theirs: Take | str
    """How torchrun is measured, or why it is not."""
    rounds: int = 1
    samples: dict[str, list[float]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    def measure(self) -> None:
        """Take the samples: torchrun's once, elasticrun's `rounds` times."""
        if isinstance(self.theirs, str):
            self.said[TORCHRUN] = self.theirs
        else:
            self._sample(TORCHRUN, self.theirs)
        for _ in range(self.rounds):
            self._sample(ELASTICRUN, self.ours)

    def _sample(self, launcher: str, take: Take) -> None:
        try:
            self.samples.setdefault(launcher, []).extend(take())
        except TookTooLong as late:
            self.said[launcher] = str(late).splitlines()[0].removeprefix(f"{launcher}: ")
            print(f"  {self.name}, {launcher}: {late}", file=sys.stderr)

    def cell(self, launcher: str) -> str:
        """Median, worst value and count; without samples, why there are none."""
        found = self.samples.get(launcher)
        if not found:
            return self.said.get(launcher, "-")
        text = f"{statistics.median(found):.3g} {self.unit}".strip()
        if len(found) > 1:
            text += f" (worst of {len(found)}: {max(found):.3g})"
        return text + (f"; {self.said[launcher]}" if launcher in self.said else "")

    def verdict(self) -> str:
        """Whether the target is met, as text; "" without a target."""
        if self.most is None:
            return ""
        found = self.samples.get(ELASTICRUN)
        good = bool(found) and ELASTICRUN not in self.said and max(found or [0.0]) <= self.most
        return "met" if good else "**missed**"

    def markdown(self) -> str:
        """The line as Markdown."""
        bar = "" if self.most is None else f"≤ {self.most:g} {self.unit}".strip()
        cells = (self.name, self.cell(TORCHRUN), self.cell(ELASTICRUN), bar, self.verdict())
        return "| " + " | ".join(cells) + " |"


NO_MASTER = "has none: its store lives and dies with an agent"
NO_RECORD = "its store and its state are gone with the host"


def join_rows(few: int) -> list[Row]:
    """The rows about nodes that join."""
    young = partial(rows.join, nnodes="2:3", age=2.0)
    room = partial(rows.join, nnodes="2:4", age=2.0)
    old = partial(rows.join, nnodes="2:3", age=62.0, flags=("--grow=now",))
    start = rows.start_together
    return [
        Row(
            "2 agents of `1:4` started together → first step of world 2",
            *("s", 1.5, partial(start, ELASTICRUN), partial(start, TORCHRUN), few),
        ),
        Row(
            "the same, a warm process is there",
            *("s", 1.5, partial(start, ELASTICRUN, warm=True), "has none", few),
        ),
        Row(
            "a node joins a young round and fills it (`2:3`): its command → first step of world 3",
            *("s", 1.5, partial(young, ELASTICRUN), partial(young, TORCHRUN), few),
        ),
        Row(
            "the same with room for more (`2:4`), so that last call is waited for",
            *("s", None, partial(room, ELASTICRUN), "not measured again", few),
        ),
        Row(
            "the same, a round older than a minute, `--grow=now` (`2:3`)",
            *("s", 1.5, partial(old, ELASTICRUN), "not measured again", 1),
        ),
    ]


def loss_rows(few: int) -> list[Row]:
    """The rows about nodes that are killed or fall silent."""
    lose = rows.lose_a_node
    silent = partial(lose, host=False, freeze=True)
    sooner = partial(silent, conf="--rdzv-conf=heartbeat_timeout=2")
    made = []
    for name, host in (
        ("another node than the host", False),
        ("the master's (store's) host", True),
    ):
        take = partial(lose, host=host)
        made.append(
            Row(
                f"kill -9 of an agent and its ranks, {name} → survivors' first step",
                *("s", 0.3, partial(take, ELASTICRUN), partial(take, TORCHRUN), few),
            )
        )
    setup = rows.lose_a_node_with_setup
    nvrx = rows.lose_a_rank_under_nvrx if NVRX in COMMANDS else "has none; NVRX_PYTHON is not set"
    return [
        *made,
        Row(
            "kill -9 of one of two nodes, 5 s of setup in the script → the survivor's first step",
            *("s", None, partial(setup, ELASTICRUN), partial(setup, TORCHRUN), few),
        ),
        Row(
            "the same, with the setup kept in a recoverable function (left: NVRx in process)",
            *("s", 0.5, partial(setup, ELASTICRUN, recovers=True), nvrx, few),
        ),
        Row(
            "a node falls silent (SIGSTOP of all it has) → survivors' first step",
            *("s", 6.0, partial(silent, ELASTICRUN), partial(silent, TORCHRUN), few),
        ),
        Row(
            "the same with `--rdzv-conf=heartbeat_timeout=2`",
            *("s", None, partial(sooner, ELASTICRUN), "cannot be configured", few),
        ),
    ]


def master_rows(few: int) -> list[Row]:
    """The rows about a master that is killed, alone or with its host."""
    found: dict[str, list[float]] = {}

    def lose() -> list[float]:
        found.update(rows.lose_the_master())
        return found["back"]

    def also(name: str) -> list[float]:
        return found.get(name, [])

    return [
        Row("kill -9 of the master while training → it answers again", "s", 1.0, lose, NO_MASTER),
        Row("– the longest pause between two steps", "ms", None, partial(also, "pause"), NO_MASTER),
        Row("– ranks started anew", "", 0.0, partial(also, "anew"), NO_MASTER),
        Row(
            "with etcd: kill -9 of all on the master's host → survivors' first step",
            *("s", 10.0, rows.lose_the_masters_host, NO_RECORD, few),
        ),
    ]


def stall_rows(quick: bool) -> list[Row]:
    """The rows about events that must cost nothing, and the number of rounds of a slow start."""
    made = [
        Row(
            f"{what} stands still for {seconds:g} s: ranks started anew",
            *("", 0.0, partial(rows.stalls, what, seconds), "not measured"),
        )
        for what, seconds in (("an agent", 3.0), ("the master", 10.0))
    ]
    if not quick:
        made.append(
            Row(
                "8 agents of `2:8` started over 40 s: rounds",
                *("", 2.0, partial(rows.trickle, ELASTICRUN), "one for each (not measured)"),
            )
        )
    return made


def rank_row(few: int) -> list[Row]:
    """The row about a rank that dies on one node of two."""
    take = launcher_rows.two_nodes
    name = "a rank dies on one node of two → first all_reduce of both"
    return [Row(name, "s", 0.25, partial(take, ELASTICRUN), partial(take, TORCHRUN), few)]


COLOURS = {TORCHRUN: "#b9b9b9", ELASTICRUN: "#d1495b"}


def draw(done: list[Row], about: dict[str, str], target: Path) -> None:
    """Draw the rows in seconds: medians as bars, every sample as a dot, on a logarithmic axis. For
    torchrun without a sample, the reason."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    timed = [row for row in done if row.unit == "s" and row.samples.get(ELASTICRUN)][::-1]
    figure, axes = plt.subplots(figsize=(9, 0.62 * len(timed) + 1), layout="constrained")
    for place, row in enumerate(timed):
        for shift, launcher in ((0.2, TORCHRUN), (-0.2, ELASTICRUN)):
            found = row.samples.get(launcher, [])
            height = place + shift
            if found:
                middle = statistics.median(found)
                axes.barh(height, middle, 0.36, color=COLOURS[launcher])
                axes.plot(found, [height] * len(found), ".", color="#333333", markersize=3)
                axes.text(max(found) * 1.08, height, f"{middle:.2g} s", va="center", fontsize=7)
            elif row.said.get(launcher):
                axes.text(
                    0.052, height, row.said[launcher], va="center", fontsize=7, color="#777777"
                )
    for launcher, colour in COLOURS.items():
        axes.barh(0, 0, color=colour, label=launcher)
    axes.set_xscale("log")
    axes.set_xlim(0.05, 200)
    names = [row.name.replace(" → ", "\n→ ").replace("`", "") for row in timed]
    axes.set_yticks(range(len(timed)), names, fontsize=7)
    axes.set_xlabel("seconds")
    axes.set_title(f"{about['date'][:10]}, {about['machine'].split(', load')[0]}", fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(target, dpi=150)


def main() -> int:
    """Measure, print, write. Returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="What nodes that come and go cost.")
    parser.add_argument("--quick", action="store_true", help="one sample a row")
    parser.add_argument("--only", default="", help="rows whose name contains this word")
    parser.add_argument("--ours", action="store_true", help="leave torchrun out")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--plot", type=Path, help="draw the rows in seconds (PNG)")
    options = parser.parse_args()
    about = report.begin()
    print("| event → what | torchrun | elasticrun | wanted | |\n|---|---|---|---|---|")
    few = 1 if options.quick else 3
    plan = [
        *join_rows(few),
        *loss_rows(few),
        *rank_row(few),
        *master_rows(few),
        *stall_rows(options.quick),
    ]
    done = [row for row in plan if options.only.lower() in row.name.lower()]
    for row in done:
        if options.ours:
            row.theirs = "left out"
        row.measure()
        print(row.markdown(), flush=True)
    table = [
        {"row": r.name, "unit": r.unit, "most": r.most, "met": r.verdict()}
        | {"said": r.said, **r.samples}
        for r in done
    ]
    report.write("elastic", about, {"rows": table}, options.json)
    if options.plot:
        draw(done, about, options.plot)
    missed = [row.name for row in done if "missed" in row.verdict()]
    return report.verdict(missed)


if __name__ == "__main__":
    sys.exit(main())
