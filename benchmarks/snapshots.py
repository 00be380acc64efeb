"""Measures the cost and benefit of snapshots, each figure compared with its floor in the same run.

    python benchmarks/snapshots.py [--quick] [--gib G] [--tensors N,...] [--only WORD] [--json FILE]

For one rank with G GiB of state, in 64 and in 4,096 tensors, under the real command and agent: the
stall of a snapshot, alternating with a copy of the same bytes in the same process; the first
snapshot after a SIGKILL; the checkpoint on disk, compared with a plain O_DIRECT write and torch's
own saves; the restore; and the seconds from the SIGKILL to the next training step. Then two ranks
train a small model, in blocks with a snapshot in every step and without, and two ranks train while
the memory for their first snapshot is prepared. The table shows medians,
with the worst value in parentheses. Results go to benchmarks/results/ with the date and the
machine, or to FILE.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import report
import snapshot_rows as rows
from stage import ELASTICRUN, TORCHRUN, TookTooLong

SAMPLES = 5

PEER = "–"
"""The name of a row that compares the figure of the row above with another floor or peer."""


@dataclass
class Row:
    """One line of the table: our figure, its floor or peer, and the targets."""

    name: str
    unit: str = "s"
    ours: Sequence[float] = ()
    floor: Sequence[float] = ()
    floor_name: str = ""
    most: float | None = None
    """Target for our median, in the unit."""
    ratio: float | None = None
    """Target for our median as a multiple of the floor's."""

    def met(self) -> bool | None:
        """Whether the targets are met; None without targets."""
        if self.most is None and self.ratio is None:
            return None
        if not self.ours or (self.ratio is not None and not self.floor):
            return False
        middle = statistics.median(self.ours)
        good = self.most is None or middle <= self.most
        return good and (self.ratio is None or middle <= self.ratio * statistics.median(self.floor))

    def markdown(self) -> str:
        """The line as Markdown."""
        cells = [self.name, self._cell(self.floor, self.floor_name), self._cell(self.ours)]
        both = self.ours and self.floor
        ratio = statistics.median(self.ours) / statistics.median(self.floor) if both else None
        cells.append("" if ratio is None else f"{ratio:.2f}")
        wanted = [] if self.ratio is None else [f"≤ {self.ratio:g} ×"]
        wanted += [] if self.most is None else [f"≤ {self.most:g} {self.unit}"]
        cells.append(" and ".join(wanted))
        cells.append({None: "", True: "met", False: "**missed**"}[self.met()])
        return "| " + " | ".join(cells) + " |"

    def _cell(self, found: Sequence[float], name: str = "") -> str:
        if not found:
            return f"{name}: -" if name else "-"
        middle, worst, unit = statistics.median(found), max(found), self.unit
        if unit == "s" and worst < 1:
            middle, worst, unit = middle * 1000, worst * 1000, "ms"
        return f"{name + ': ' if name else ''}{middle:.3g} {unit} ({worst:.3g})"


@dataclass
class Found:
    """All samples for one number of tensors, by name."""

    floors: rows.Samples = field(default_factory=dict)
    lives: rows.Samples = field(default_factory=dict)
    persists: rows.Samples = field(default_factory=dict)
    disk: rows.Samples = field(default_factory=dict)

    def table(self) -> list[Row]:
        """The rows for these samples."""
        floor, ours, kept = self.floors.get, self.lives.get, self.persists.get
        none: list[float] = []
        again = ours("killed → training again", none)
        return [
            Row(
                "stall of a snapshot",
                *("s", ours("stall", none), ours("memcpy", none), "memcpy in the same process"),
                ratio=1.15,
            ),
            Row(PEER, "s", ours("stall", none), floor("async_save", none), "torch async_save, shm"),
            Row(
                PEER,
                *("s", ours("stall", none), floor("async_save, default", none)),
                "torch async_save",
            ),
            Row(
                "first snapshot after a restart",
                *("s", ours("first after restart", none), ours("stall", none), "warm stall"),
                ratio=1.3,
            ),
            Row(
                PEER,
                *("s", ours("first after restart", none), floor("async_save, first", none)),
                "torch async_save, shm",
            ),
            Row("first snapshot of a job", "s", ours("first", none)),
            Row(
                "checkpoint on disk, fsync",
                *("s", kept("persist", none), floor("O_DIRECT", none), "O_DIRECT write"),
                ratio=1.3,
            ),
            Row(PEER, "s", kept("persist", none), floor("dcp.save", none), "dcp.save, fsync"),
            Row(
                "– CPU of the saver",
                *("CPU-s", kept("cpu of saver", none), floor("O_DIRECT cpu", none)),
                "O_DIRECT write",
                most=0.1,
            ),
            Row(
                "– CPU of agent, master, fork server, saver",
                *("CPU-s", kept("cpu of all", none), floor("dcp.save cpu", none), "dcp.save"),
            ),
            Row(
                "restore() from memory into existing tensors",
                *("s", ours("restore", none), ours("memcpy back", none), "memcpy, warm mapping"),
                ratio=1.3,
            ),
            Row(
                PEER,
                *("s", ours("restore", none), floor("memcpy back, fresh mapping", none)),
                "memcpy, fresh mapping",
            ),
            Row("rank killed → training again", "s", again, (), "", most=0.5),
            Row("– of it: death seen, rank swept, forked", "s", ours("to script", none)),
            Row("– imports", "s", ours("to imported", none)),
            Row("– process group, model", "s", ours("to made", none)),
            Row(
                "– restore() into memory that was never touched",
                *("s", ours("to restored", none), floor("first touch", none), "first touch of it"),
            ),
            Row("– the first step", "s", ours("to again", none)),
            Row(
                PEER,
                *("s", again, self.disk.get(ELASTICRUN, none)),
                "elasticrun, dcp.load from disk",
            ),
            Row(PEER, "s", again, self.disk.get(TORCHRUN, none), "torchrun, dcp.load from disk"),
        ]


def measure(gib: float, count: int, samples: int, only: str) -> Found:
    """Take the samples for one number of tensors, of measurements whose names contain `only`. One
    that takes too long is reported and left out."""
    found = Found()
    parts = {
        "floors": lambda: found.floors.update(rows.floors(gib, count, samples)),
        "lives": lambda: found.lives.update(rows.lives(gib, count, samples, samples)),
        "persists": lambda: found.persists.update(rows.persists(gib, count, samples)),
        "disk": lambda: found.disk.update(
            {name: rows.from_disk(name, gib, count, 2) for name in (ELASTICRUN, TORCHRUN)}
        ),
    }
    for name, take in parts.items():
        if only in name:
            try:
                take()
            except TookTooLong as late:
                print(f"  {name}: {late}", file=sys.stderr)
    return found


def training_row(pairs: int, steps: int) -> tuple[Row, dict[str, list[float]]]:
    """Measure how much a snapshot in every step slows down a small model. Returns the row and the
    samples."""
    try:
        blocks = rows.training(pairs, steps)
    except TookTooLong as late:
        print(f"  training: {late}", file=sys.stderr)
        blocks = []
    found = rows.by_name(blocks)
    taken = sum(int(b["taken"]) for b in blocks)
    wanted = steps * len(found.get("with snapshots", []))
    row = Row(
        f"a step of a small model on 2 ranks, a snapshot each ({taken} of {wanted} taken)",
        *("s", found.get("with snapshots", []), found.get("without", []), "without"),
        ratio=1.02,
    )
    return row, {**found, "taken": [float(taken)], "wanted": [float(wanted)]}


def first_rows(gib: float) -> tuple[list[Row], dict[str, list[float]]]:
    """Measure the steps until the first snapshot, whose memory is prepared meanwhile. Returns the
    rows and the samples."""
    try:
        found = rows.first(gib)
    except TookTooLong as late:
        print(f"  first: {late}", file=sys.stderr)
        found = {}
    alone, until = found.get("alone", []), found.get("until", [])
    table = [
        Row("a step until the first snapshot", "s", until, alone, "a step alone", ratio=1.2),
        Row("– the longest", "s", [max(until, default=0.0)], [max(alone, default=0.0)], "of those"),
        Row(
            "the step with the first snapshot",
            *("s", found.get("first", []), found.get("later", []), "with a later one"),
            ratio=1.2,
        ),
    ]
    return table, found


def main() -> int:
    """Measure, print, write. Returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="Snapshots beside their floors.")
    parser.add_argument("--quick", action="store_true", help="0.25 GiB, few samples")
    parser.add_argument("--gib", type=float, default=0.0, help="GiB of state; 1")
    parser.add_argument("--tensors", default="64,4096", help="numbers of tensors; 64,4096")
    only = ("", "floors", "lives", "persists", "disk", "training", "first")
    parser.add_argument("--only", default="", choices=only, help="one kind of measurement")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    gib = options.gib or (0.25 if options.quick else 1.0)
    samples = 2 if options.quick else SAMPLES
    about = report.begin()
    written: dict[str, object] = {"gib": gib}
    missed = list[str]()

    def show(table: Sequence[Row]) -> None:
        for row in table:
            if options.only and (not row.ours or (row.name == PEER and not row.floor)):
                continue
            if options.only and not row.floor:
                row.ratio = None  # its floor is not measured
            print(row.markdown(), flush=True)
            missed.extend([row.name] if row.met() is False else [])

    for count in map(int, options.tensors.split(",")):
        if options.only in ("training", "first"):
            break
        found = measure(gib, count, samples, options.only)
        print(f"\n| {gib:g} GiB in {count} tensors | floor, peer | elasticrun | ratio | wanted | |")
        print("|---|---|---|---|---|---|")
        show(found.table())
        written[f"{count} tensors"] = asdict(found)
    if options.only in ("", "training"):
        row, blocks = training_row(*((3, 50) if options.quick else (15, 100)))
        print("\n| training | without | with | ratio | wanted | |\n|---|---|---|---|---|---|")
        show([row])
        written["training"] = blocks
    if options.only in ("", "first"):
        table, steps = first_rows(gib)
        print("\n| memory is prepared | | with | ratio | wanted | |\n|---|---|---|---|---|---|")
        show(table)
        written["first"] = steps
    report.write("snapshots", about, written, options.json)
    return report.verdict(missed)


if __name__ == "__main__":
    sys.exit(main())
