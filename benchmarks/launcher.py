"""Compares elasticrun with torchrun, in one run: speed, memory, CPU use, and leftovers.

    python benchmarks/launcher.py [--quick] [--only WORD] [--json FILE]

Each row is measured for both launchers in turn, several times; the table shows medians, the ratio
and the target. Results go to benchmarks/results/ with the date and the machine, or to FILE.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import report
import rows
from stage import ELASTICRUN, TORCHRUN, TookTooLong


@dataclass(frozen=True)
class Bar:
    """The target of a row: at most `value` in its unit, at most `ratio` times torchrun's value."""

    value: float | None = None
    ratio: float | None = None

    def __str__(self) -> str:
        parts = []
        if self.value is not None:
            parts.append(f"≤ {self.value:g}")
        if self.ratio is not None:
            parts.append(f"≤ {self.ratio:g} × torchrun")
        return " and ".join(parts)

    def met(self, ours: float, theirs: float | None) -> bool:
        """Whether these medians meet the target; False if torchrun's is needed and unknown."""
        good = self.value is None or ours <= self.value
        return good and (self.ratio is None or (theirs is not None and ours <= self.ratio * theirs))


@dataclass
class Row:
    """One line of the table, with all its samples by launcher."""

    name: str
    unit: str
    bar: Bar
    samples: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def median(self, launcher: str) -> float | None:
        """The median of a launcher's samples; None without samples."""
        found = self.samples.get(launcher)
        return statistics.median(found) if found else None

    def verdict(self) -> str:
        """Whether the target is met, as text; "" without a target."""
        ours, theirs = self.median(ELASTICRUN), self.median(TORCHRUN)
        if ours is None:
            return "not measured"
        if not str(self.bar):
            return ""
        return "yes" if self.bar.met(ours, theirs) else "**no**"

    def markdown(self) -> str:
        """The line as Markdown."""
        cells = [self.name]
        for launcher in (TORCHRUN, ELASTICRUN):
            middle, count = self.median(launcher), len(self.samples.get(launcher, []))
            cells.append("-" if middle is None else f"{middle:.3g} {self.unit} ({count})")
        ours, theirs = self.median(ELASTICRUN), self.median(TORCHRUN)
        cells.append(f"{ours / theirs:.3f}" if ours is not None and theirs else "-")
        cells += [str(self.bar), self.verdict()]
        return "| " + " | ".join(cells) + " |"


def measure(row: Row, rounds: int, take: Callable[[str], list[float]]) -> Row:
    """Take samples of both launchers in turn, and print the row."""
    for number in range(rounds):
        for launcher in (TORCHRUN, ELASTICRUN) if number % 2 == 0 else (ELASTICRUN, TORCHRUN):
            try:
                row.samples.setdefault(launcher, []).extend(take(launcher))
            except TookTooLong as late:
                row.missing[launcher] = str(late)
                print(f"  {row.name}, {launcher}: {late}", file=sys.stderr)
    print(row.markdown(), flush=True)
    return row


def speed_rows(quick: bool) -> list[tuple[Row, int, Callable[[str], list[float]]]]:
    """The rows measured in seconds and megabytes: each row, the number of rounds, the
    measurement."""
    some, few = (2, 1) if quick else (7, 3)
    plan = [
        (Row("command → first all_reduce", "s", Bar(ratio=0.5)), some, rows.cold_start),
        (
            Row("the same, a warm process is there", "s", Bar(ratio=0.2)),
            some,
            rows.warm_start,
        ),
        (
            Row("a rank dies → next life's first all_reduce", "s", Bar(0.15, 0.05)),
            some - 1,
            rows.restart,
        ),
        (
            Row("one node of two: a rank dies → both run again", "s", Bar(0.25)),
            few,
            rows.two_nodes,
        ),
        (Row("agent at rest, RSS", "MB", Bar(60)), few, rows.resident),
        (Row("whole job, PSS", "MB", Bar(ratio=0.85)), few, rows.proportional),
    ]
    for name, module, script in (
        ("DDP with nn.Transformer", "torch", "ddp_transformer.py"),
        ("HF Trainer", "transformers", "hf_trainer.py"),
        ("Lightning", "lightning", "lightning_fit.py"),
    ):
        if importlib.util.find_spec(module):
            take = partial(rows.script_restart, script=script)
            row = Row(f"the same, {name}", "s", Bar(ratio=1.0))
            plan.insert(-3, (row, few, take))
        else:
            print(f"{module} is not installed: its row is left out", file=sys.stderr)
    return plan


def processor_rows(seconds: float) -> list[Row]:
    """Measure the CPU use of agent, master and all launcher processes: one row each, printed."""
    used = {launcher: rows.cpu_percent(launcher, seconds) for launcher in (TORCHRUN, ELASTICRUN)}
    found = []
    for name in ("agent", "master", "all"):
        row = Row(f"CPU of {name} while training runs", "%", Bar(None if name == "all" else 0.5))
        row.samples = {launcher: use[name] for launcher, use in used.items() if name in use}
        print(row.markdown(), flush=True)
        found.append(row)
    return found


def cycle_report(quick: bool) -> dict[str, dict[str, float]]:
    """Measure and print consecutive crashes and restarts; torchrun gets fewer, because it hangs."""
    plan = {TORCHRUN: (5, 60.0) if quick else (20, 180.0)}
    plan[ELASTICRUN] = (20, 60.0) if quick else (200, 240.0)
    found = {}
    for launcher, (deaths, limit) in plan.items():
        found[launcher] = {"wanted": float(deaths), **rows.cycles(launcher, deaths, limit)}
    print("\n| crash and restart, in a row | torchrun | elasticrun |\n|---|---|---|")
    for name, count in found[ELASTICRUN].items():
        print(f"| {name} | {found[TORCHRUN][name]:g} | {count:g} |", flush=True)
    return found


def is_clean(found: dict[str, float]) -> bool:
    """Whether every crash was followed by a successful restart, and nothing was left behind."""
    wrong = ("wasted", "hangs", "exit code", "processes left", "shm left", "files left")
    grown = found["descriptors grown by"]
    return (
        found["worked"] == found["wanted"] and grown <= 0 and not any(found[name] for name in wrong)
    )


def main() -> int:
    """Measure, print, write. Returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="elasticrun beside torchrun.")
    parser.add_argument("--quick", action="store_true", help="few rounds, for a first look")
    parser.add_argument(
        "--only", default="", help="rows whose name contains this; also: cpu, cycles"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    about = report.begin()
    print("| from → to | torchrun | elasticrun | ratio | wanted | met |\n|---|---|---|---|---|---|")
    done = [
        measure(row, rounds, take)
        for row, rounds, take in speed_rows(options.quick)
        if options.only.lower() in row.name.lower()
    ]
    if options.only in ("", "cpu"):
        done += processor_rows(5.0 if options.quick else 30.0)
    cycles = cycle_report(options.quick) if options.only in ("", "cycles") else {}
    table = [
        {"row": r.name, "unit": r.unit, "wanted": str(r.bar), "met": r.verdict(), **r.samples}
        for r in done
    ]
    report.write("launcher", about, {"rows": table, "cycles": cycles}, options.json)
    missed = [row.name for row in done if row.verdict() not in ("yes", "")]
    if cycles and not is_clean(cycles[ELASTICRUN]):
        missed.append("crash and restart")
    return report.verdict(missed)


if __name__ == "__main__":
    sys.exit(main())
