"""Measures what hang detection costs a training.

    python benchmarks/watch_cost.py [--rounds N] [--seconds S] [--json FILE]

Two ranks on gloo, alternately with `--on-hang=off` (no thread in the ranks, no queries) and with
the default. On a shared machine two equal runs differ by more than the detection could cost, so
three things are measured:

- CPU of the answering thread, as a share of the time: the most that a step can lose;
- CPU of agent, master and fork server, likewise, with and without detection;
- steps: the median with and without detection; and for ranks that are queried 100 times as often as
by an agent, in every other quarter of a second: a hundredth of the mean extra time of these steps
over those before them, because few steps contain a query.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import report
from stage import ELASTICRUN, Job, job

from elasticrun.agent.sight.pulse import PULSE_EVERY
from elasticrun.wire.progress import (
    ANSWER_BYTES,
    RankQuestion,
    address,
    bound_socket,
    encode_question,
    mint_name,
)

RANKS: Final = 2
BAR: Final = 0.001
OFTEN: Final = 100
"""How many times as often as by an agent the ranks of `steps_with_queries` are queried."""

WINDOW: Final = 0.25
"""Seconds of each period without queries, and of each period with them."""

Step = tuple[float, float]
"""The time at which a step began, and its seconds."""


@dataclass(frozen=True)
class Run:
    """The result of one job. `answers`: the CPU share of the answering thread, of the rank where it
    is largest; `ours`: that of the launcher's processes; `steps`: of all ranks."""

    answers: float
    ours: float
    steps: list[Step]


def train(run: Job, seconds: float, *flags: str, name: str = "") -> Run:
    """Run one job to its end. Returns what its ranks have written."""
    out = run.folder / "said"
    begin(run, out, seconds, *flags, name=name)
    run.until(lambda: run.agents[0].poll() is not None, seconds + 120)
    return result(out)


def begin(run: Job, out: Path, seconds: float, *flags: str, name: str = "") -> None:
    """Start the job. `name`: the address at which its ranks can be queried; "": none."""
    words = (str(seconds), str(out), *([name] if name else []))
    flags = ("--standalone", f"--nproc-per-node={RANKS}", *flags)
    run.start(*flags, script="watched.py", arguments=words)


def result(out: Path) -> Run:
    """What the ranks of a job have written."""
    said = [json.loads(Path(f"{out}-{rank}").read_text()) for rank in range(RANKS)]
    steps = [(at, took) for one in said for at, took in one["steps"]]
    return Run(
        max(one["cpu"] / one["wall"] for one in said), said[0]["ours"] / said[0]["wall"], steps
    )


def steps_with_queries(run: Job, seconds: float) -> list[Step]:
    """The steps of ranks that are queried in every other window by this process, and by no agent.
    In the other windows the same queries go to a socket of this process, so that sending costs the
    same."""
    name, out = mint_name(), run.folder / "said"
    begin(run, out, seconds, "--on-hang=off", name=name)
    number = 0
    with bound_socket(mint_name()) as asker, bound_socket(mint_name()) as nobody:
        while run.agents[0].poll() is None:
            asked = in_query_window(time.monotonic())
            for rank in range(RANKS):
                number += 1
                place = address(f"{name}-{rank}") if asked else nobody.getsockname()
                with suppress(OSError):  # the rank does not exist yet, or has not answered
                    asker.sendto(encode_question(RankQuestion(number)), place)
                    (asker if asked else nobody).recv(ANSWER_BYTES)
            time.sleep(PULSE_EVERY / OFTEN)
    return result(out).steps


def in_query_window(at: float) -> bool:
    """Whether this moment is in a window with queries."""
    return int(at / WINDOW) % 2 == 1


def slower_by_windows(steps: Iterable[Step]) -> float:
    """The fraction by which a step takes longer in a window with queries than in the window before
    it: the median over all pairs of windows."""
    windows: dict[int, list[float]] = defaultdict(list)
    for at, seconds in steps:
        windows[int(at / WINDOW)].append(seconds)
    pairs = [(windows[one - 1], windows[one]) for one in list(windows) if one % 2 == 1]
    ratios = [statistics.mean(on) / statistics.mean(off) for off, on in pairs if off]
    return statistics.median(ratios) - 1.0


def median(steps: Iterable[Step]) -> float:
    """The median duration of these steps in seconds."""
    return statistics.median(seconds for _, seconds in steps)


def main() -> int:
    """Measure, print, write. Returns 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    about = report.begin()
    off: list[Run] = []
    on: list[Run] = []
    often: list[float] = []
    for number in range(options.rounds):
        for runs in (off, on) if number % 2 == 0 else (on, off):
            with job(ELASTICRUN) as run:
                flags = ("--on-hang=off",) if runs is off else ()
                runs.append(train(run, options.seconds, *flags))
        with job(ELASTICRUN) as run:
            steps = steps_with_queries(run, options.seconds)
        often.append(slower_by_windows(steps) / OFTEN)
    answers = statistics.median(run.answers for run in on)
    ours = [statistics.median(run.ours for run in runs) for runs in (off, on)]
    step = [median(step for run in runs for step in run.steps) for runs in (off, on)]
    a_hundredth = statistics.median(often)
    print("| what | not watched | watched | cost | wanted |\n|---|---|---|---|---|")
    print(f"| thread that answers, CPU | - | {answers:.4%} | {answers:.4%} | <= {BAR:.1%} |")
    print(f"| our processes, CPU | {ours[0]:.2%} | {ours[1]:.2%} | {ours[1] - ours[0]:.2%} | |")
    slower = step[1] / step[0] - 1.0
    print(f"| a step | {step[0] * 1e3:.3f} ms | {step[1] * 1e3:.3f} ms | {slower:.2%} | |")
    print(f"| a step, by {OFTEN} times as many questions | | | {a_hundredth:.4%} | <= {BAR:.1%} |")
    found = {
        "answers": [run.answers for run in on],
        "ours": {"off": [run.ours for run in off], "on": [run.ours for run in on]},
        "steps": {
            "off": [median(run.steps) for run in off],
            "on": [median(run.steps) for run in on],
        },
        "asked often": often,
    }
    report.write("watch-cost", about, found, options.json)
    missed = [name for name, cost in (("CPU", answers), ("step", a_hundredth)) if cost > BAR]
    return report.verdict(missed)


if __name__ == "__main__":
    sys.exit(main())
