"""Injects each kind of hang, and shows what is reported, when, and with which rank and line.

    python benchmarks/hangs.py [--ranks 2 4 16] [--nodes 1 2] [--faults sleep stop ...]
                               [--torchrun] [--at-once N] [--json FILE]

Each is a real training on gloo (tests/scripts/faulty.py) in which rank 1 reaches its fault; two
nodes are two agents on this host. The time counts from the moment when rank 1 reaches the fault to
the launcher's line, so it includes the agents' detection. A fault that only looks like a hang ends
by itself after 95 s, and must not be reported. `--torchrun` runs torchrun with the same faults and
the smallest number of ranks, and shows what it prints within 90 s.

A job that hangs needs almost no CPU, so several run at a time; those that compute run alone.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import report
from stage import ELASTICRUN, TORCHRUN, Job, free_port, job

FAULTY: Final = Path(__file__).parents[1] / "tests/scripts/faulty.py"
AT: Final = "at the fault"
TOLD: Final = re.compile(r"(?:hang \((\w+)\)|(still)): (.*)\n")
DIED: Final = re.compile(r"^elasticrun(?:\[[^\]]+\])?: (rank \d+: [^\n]*)", re.MULTILINE)
START_LIMIT: Final = 180.0
TORCHRUN_LIMIT: Final = 90.0
POLL: Final = 0.1
"""Seconds between two reads of the consoles."""

NEVER_TOLD: Final = 110.0
ENDS: Final = 95.0
"""Seconds after which a fault that only looks like a hang ends by itself."""


@dataclass(frozen=True)
class Fault:
    """`klass`: the expected report; "" for none, "failure" if gloo ends the ranks at once.
    `within`: seconds within which it must be reported; `rank`: a pattern that matches a sentence
    with the right rank. `busy`: it uses at least one core."""

    klass: str
    within: float
    rank: str = r"^rank 1( \(node [^)]+\))?"
    busy: bool = False


FAULTS: Final = {
    "other": Fault("certain", 15.0, r"rank 1( \(node [^)]+\))? is in broadcast"),
    "skipped": Fault("certain", 15.0, r"rank 1( \(node [^)]+\))? is in barrier"),
    "order": Fault("certain", 15.0, r"rank 1 (\(node [^)]+\) )?waits for rank"),
    "sleep": Fault("strong", 70.0),
    "stop": Fault("strong", 70.0),
    "lock": Fault("strong", 70.0),
    "waits": Fault("strong", 70.0),
    "loader": Fault("strong", 70.0),
    "held": Fault("strong", 70.0),
    "held_busy": Fault("strong", 70.0, busy=True),
    "size": Fault("failure", 15.0, ""),
    "ended": Fault("failure", 15.0, ""),
    "spin": Fault("weak", 140.0, busy=True),
    "save": Fault("weak", 140.0, busy=True),
    "evaluate": Fault("weak", 140.0, busy=True),
    "slow": Fault("", ENDS),
    "compile": Fault("", ENDS, busy=True),
}


@dataclass(frozen=True)
class Row:
    """The result of one job. `seconds`: from the fault to the launcher's line, or to the failure;
    None if nothing was reported. `rank`: whether the sentence names the right one. `line`: "right",
    "wrong", or "" if the sentence names no line."""

    launcher: str
    fault: str
    ranks: int
    nodes: int
    klass: str
    seconds: float | None
    rank: bool
    line: str
    said: str

    @property
    def missed(self) -> str:
        """The target that this row has missed; "" for none."""
        wanted = FAULTS[self.fault]
        what = f"{self.fault}, {self.ranks} ranks, {self.nodes} nodes"
        if self.klass != wanted.klass:
            return f"{what}: {self.klass or 'nothing'}, not {wanted.klass or 'nothing'}"
        late = self.seconds is not None and self.seconds > wanted.within
        wrong = self.klass and not (self.rank and self.line != "wrong")
        return f"{what}: {self.seconds} s" if late else f"{what}: {self.said}" if wrong else ""

    def __str__(self) -> str:
        seconds = "never" if self.seconds is None else f"{self.seconds:.1f}"
        judged = self.klass not in ("", "failure")
        rank = "-" if not judged else "right" if self.rank else "wrong"
        cells = (self.fault, self.ranks, self.nodes, self.klass or "none", seconds, rank)
        return f"| {' | '.join(map(str, cells))} | {self.line or '-'} |"


def measure(launcher: str, fault: str, ranks: int, nodes: int) -> Row:
    """Run one job, and kill it once its fault is reported or the time limit is over."""
    wanted = FAULTS[fault]
    limit = TORCHRUN_LIMIT if launcher == TORCHRUN else wanted.within * 1.3 + 20.0
    seconds = ENDS if not wanted.klass else 3600.0
    port = free_port()
    with job(launcher) as run:
        for node in range(nodes):
            where = (
                ("--standalone",)
                if nodes == 1
                else (f"--nnodes={nodes}", f"--node-rank={node}", "--rdzv-backend=c10d",
                      f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=hangs",
                      "--local-addr=127.0.0.1")
            )  # fmt: skip
            run.start(
                *where, f"--nproc-per-node={ranks // nodes}", "--max-restarts=0",
                script=str(FAULTY), arguments=(fault, str(seconds)),
                more={"PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        klass, after, said = watch(run, limit)
    right = bool(klass) and re.search(wanted.rank, said) is not None
    line = ""
    if f"{FAULTY.name}:" in said:
        line = "right" if re.search(rf"\b{re.escape(fault_location(fault))}\b", said) else "wrong"
    return Row(launcher, fault, ranks, nodes, klass, after, right, line, said)


def watch(run: Job, limit: float) -> tuple[str, float | None, str]:
    """Wait for the job's first report or its end. Returns the report's class, the seconds from the
    fault, and its sentence; "", None, and the console output since the fault if it reports nothing
    within `limit` seconds or succeeds; "not started" as the class if it never reaches the fault."""
    at, end, said = 0.0, time.monotonic() + START_LIMIT, ""
    while (now := time.monotonic()) < end:
        said = "".join(one.read_text(errors="replace") for one in run.folder.glob("console-*"))
        if not at and AT in said:
            at, end = now, now + limit
        after = round(now - at, 1)
        if (found := TOLD.search(said)) is not None:
            return found[1] or found[2], after, found[3]
        codes = [agent.poll() for agent in run.agents]
        if any(codes):
            died = DIED.search(said)
            return "failure", after, died[1] if died else said[-200:]
        if None not in codes:
            break
        time.sleep(POLL)
    return "" if at else "not started", None, said.partition(AT)[2].strip()


def fault_location(fault: str) -> str:
    """Where rank 1 executes this fault, such as "faulty.py:41 sleep"."""
    lines = FAULTY.read_text().splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith(f"def {fault}(")), 0)
    number = next(n for n in range(first, len(lines)) if lines[n].endswith("# here"))
    return f"{FAULTY.name}:{number + 1} {fault}"


def measure_all(plan: Iterable[tuple[str, str, int, int]], at_once: int) -> list[Row]:
    """Measure these, `at_once` at a time, and print their lines in order."""
    rows = []
    with ThreadPoolExecutor(at_once) as pool:
        for future in [pool.submit(measure, *one) for one in plan]:
            rows.append(future.result())
            print(rows[-1], flush=True)
    return rows


def main() -> int:
    """Measure, print, write. Returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    asked = parser.parse_args()
    about = report.begin()
    print("| fault | ranks | nodes | class | told after (s) | rank | line |")
    print("| --- | ---: | ---: | --- | ---: | --- | --- |")
    sizes = [(ranks, nodes) for ranks in asked.ranks for nodes in asked.nodes]
    faults = sorted(asked.faults, key=lambda fault: FAULTS[fault].busy)
    quiet = [fault for fault in faults if not FAULTS[fault].busy]
    rows = measure_all([(ELASTICRUN, one, *size) for one in quiet for size in sizes], asked.at_once)
    busy = [fault for fault in faults if FAULTS[fault].busy]
    rows += measure_all([(ELASTICRUN, one, *size) for one in busy for size in sizes], 1)
    theirs: list[Row] = []
    if asked.torchrun:
        print("\ntorchrun:")
        few = min(asked.ranks)
        theirs = measure_all([(TORCHRUN, one, few, 1) for one in faults], asked.at_once)
    report.write("hangs", about, {"rows": [asdict(row) for row in rows + theirs]}, asked.json)
    print(Counter(row.klass or "none" for row in rows))
    return report.verdict([row.missed for row in rows if row.missed])


if __name__ == "__main__":
    sys.exit(main())
