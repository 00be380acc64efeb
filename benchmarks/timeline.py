"""Plots where the milliseconds of a start and of a restart go, by process and phase.

    python benchmarks/timeline.py [--rounds N] [--json FILE] [--plot docs/timeline.png]

It measures a cold start, a start from a warm process and a restart after the death of one of two
ranks. The times come from the DEBUG lines of launcher and master and from the script's reports. Of
several rounds, the one with the median total is shown, with torchrun's median of the same run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import report
import rows
from stage import ELASTICRUN, TORCHRUN, Fact, Job, job

from elasticrun.agent import warm
from elasticrun.host.system.processes import start_time
from elasticrun.wire.env import WARM_SERVER

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LINE = re.compile(r"^[VIWE]\d{4} (\d\d):(\d\d):(\d\d)\.(\d{6}) (\d+) \S+\] (.*)$")
COLOURS = {
    "launcher": "#4c78a8",
    "job master": "#f2a541",
    "fork server": "#9b8ac4",
    "ranks": "#d1495b",
}


@dataclass(frozen=True)
class Span:
    """One phase of one process, in seconds since the beginning."""

    who: str
    what: str
    began: float
    ended: float


@dataclass(frozen=True)
class Picture:
    """One start or restart: its spans, and the total seconds."""

    spans: tuple[Span, ...]
    whole: float


def log_lines(run: Job) -> list[tuple[float, str]]:
    """The DEBUG lines of launcher and master, with their CLOCK_MONOTONIC times."""
    midnight = time.time() - time.time() % 86400
    apart = time.time() - time.monotonic()
    found = []
    for line in (run.folder / "console-0").read_text(errors="replace").splitlines():
        match = LINE.match(line)
        if match:
            hours, minutes, seconds, micros = map(int, match.groups()[:4])
            moment = midnight + 3600 * hours + 60 * minutes + seconds + micros / 1e6
            found.append((moment - apart, match[6]))
    return found


def first_time(lines: list[tuple[float, str]], words: str) -> float:
    """The time of the first line that contains these words."""
    return next(at for at, text in lines if words in text)


def first(facts: list[Fact]) -> float:
    """The time of the earliest of these facts."""
    return min(fact.time for fact in facts)


def started_at(pid: int) -> float:
    """The time at which a process was started, by CLOCK_MONOTONIC, with the kernel's resolution of
    0.01 s."""
    ticks = start_time(pid)
    assert ticks is not None, f"process {pid} has ended"
    slept = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return ticks / os.sysconf("SC_CLK_TCK") - slept


def start(run: Job, more: Mapping[str, str]) -> Picture:
    """Run a job: the picture from the command to the first all_reduce of both ranks."""
    words = ("0", "0", "for-ever")
    debug = {"LOGLEVEL": "DEBUG", **more}
    run.start("--nproc-per-node=2", script="steps.py", arguments=words, more=debug)
    run.until(lambda: len(run.of("allreduce")) == 2, rows.START_LIMIT)
    master = next(started_at(p.pid) for p in run.processes() if rows.name_of(p) == "master")
    lines = log_lines(run)
    ready = first_time(lines, "ranks will be started by fork")
    serving = first_time(lines, "serving job")
    begins = first_time(lines, "round 1 begins")
    spans = [
        Span("launcher", "Python, command line", run.began, master),
        Span("launcher", "imports grpc and the agent", master, first_time(lines, "log directory")),
        Span("job master", "Python, imports, listens", master, serving),
        Span("fork server", "warm or imports torch", master, ready),
        Span("job master", "nodes join", serving, begins),
        *rank_spans(run, begins, 0),
    ]
    return picture(spans, run.began, rows.last(run.of("allreduce")))


def rank_spans(run: Job, begins: float, life: int) -> list[Span]:
    """The spans from the beginning of a round to the first all_reduce of its ranks."""
    script, imported = first(run.of("begins", life)), rows.last(run.of("imported", life))
    grouped = rows.last(run.of("grouped", life))
    return [
        Span("ranks", "forked", begins, script),
        Span("ranks", "import torch", script, imported),
        Span("ranks", "init_process_group", imported, grouped),
        Span("ranks", "all_reduce", grouped, rows.last(run.of("allreduce", life))),
    ]


def restart(run: Job) -> Picture:
    """Run a job: the picture from the death of one of two ranks to the first all_reduce of the next
    life."""
    flags = ("--nproc-per-node=2", "--max-restarts=1", *rows.NO_BACKOFF)
    debug = {"LOGLEVEL": "DEBUG"}
    run.start(*flags, script="steps.py", arguments=("1", "0.5", "for-ever"), more=debug)
    run.until(lambda: len(run.of("allreduce", 1)) == 2, rows.START_LIMIT)
    lines = log_lines(run)
    died = run.of("dies")[0].time
    heard, over = first_time(lines, "killed by SIGKILL"), first_time(lines, "round 1 is over")
    begins = first_time(lines, "round 2 begins")
    spans = [
        Span("fork server", "reaps it and tells", died, heard),
        Span("launcher", "stops the other rank", heard, begins),
        Span("job master", "decides", over, begins),
        *rank_spans(run, begins, 1),
    ]
    return picture(spans, died, rows.last(run.of("allreduce", 1)))


def picture(spans: list[Span], began: float, ended: float) -> Picture:
    """The picture of these spans, with times relative to `began`."""
    moved = [Span(s.who, s.what, max(0.0, s.began - began), s.ended - began) for s in spans]
    return Picture(tuple(moved), ended - began)


def cold_start_picture() -> Picture:
    """The picture of a start without a warm process."""
    with job(ELASTICRUN) as run:
        return start(run, {})


def warm_start_picture() -> Picture:
    """The picture of a start from a warm process."""
    with job(ELASTICRUN) as run:
        place = run.folder / "warm.sock"
        answer, pid = warm.start(place, 600.0, run.environment())
        assert answer.startswith("ok"), answer
        try:
            return start(run, {WARM_SERVER: str(place)})
        finally:
            os.kill(pid, signal.SIGKILL)


def restart_picture() -> Picture:
    """The picture of a restart."""
    with job(ELASTICRUN) as run:
        return restart(run)


PICTURES: dict[str, tuple[Callable[[], Picture], Callable[[str], list[float]]]] = {
    "cold start": (cold_start_picture, rows.cold_start),
    "start from a warm process": (warm_start_picture, rows.cold_start),
    "a rank dies": (restart_picture, rows.restart),
}


def median(pictures: list[Picture]) -> Picture:
    """The picture with the median total (the lower one of two)."""
    return sorted(pictures, key=lambda one: one.whole)[(len(pictures) - 1) // 2]


def draw(found: Mapping[str, tuple[Picture, float]], about: Mapping[str, str], file: Path) -> None:
    """Draw one panel per picture, with a row and a bar for each phase."""
    heights = [len(picture.spans) for picture, _ in found.values()]
    figure, panels = plt.subplots(
        len(found), 1, figsize=(9.0, 8.2), height_ratios=heights, layout="constrained"
    )
    for axes, (name, (shown, theirs)) in zip(panels, found.items(), strict=True):
        for place, span in enumerate(shown.spans):
            width = 1000 * (span.ended - span.began)
            axes.barh(place, width, 0.7, 1000 * span.began, color=COLOURS[span.who])
            text = f" {span.who}: {span.what}, {width:.0f} ms"
            late = span.began > 0.55 * shown.whole
            x = 1000 * (span.began if late else span.ended)
            axes.text(x, place, text + " ", va="center", ha="right" if late else "left", fontsize=8)
        axes.invert_yaxis()
        axes.set_yticks([])
        axes.set_xlim(0, 1000 * shown.whole * 1.02)
        axes.set_title(
            f"{name}: {1000 * shown.whole:.0f} ms to the first all_reduce of both ranks "
            f"(torchrun: {1000 * theirs:.0f} ms)",
            fontsize=9,
            loc="left",
        )
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel(
        f"milliseconds; {about['date'][:10]}, {about['machine'].split(', load')[0]}", fontsize=8
    )
    figure.savefig(file, dpi=150)


def main() -> int:
    """Measure, print, write, draw."""
    parser = argparse.ArgumentParser(description="Where the milliseconds of a start go.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--plot", type=Path, help="draw this picture")
    options = parser.parse_args()
    about = report.begin()
    found: dict[str, tuple[Picture, float]] = {}
    for name, (ours, theirs) in PICTURES.items():
        pictures, others = [], []
        for _ in range(options.rounds):
            pictures.append(ours())
            others += theirs(TORCHRUN)
        found[name] = median(pictures), statistics.median(others) if others else float("nan")
        print(f"\n{name}: {found[name][0].whole:.3f} s, torchrun {found[name][1]:.3f} s\n")
        print("| process | what | from | to | ms |\n|---|---|---|---|---|")
        for span in found[name][0].spans:
            length = 1000 * (span.ended - span.began)
            print(
                f"| {span.who} | {span.what} | {span.began:.3f} | {span.ended:.3f} | {length:.0f} |"
            )
    results = {name: {**asdict(shown), "torchrun": other} for name, (shown, other) in found.items()}
    report.write("timeline", about, results, options.json)
    if options.plot:
        draw(found, about, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
