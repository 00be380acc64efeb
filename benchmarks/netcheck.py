"""Measures the cost of the network check beyond its timed work, with four agents on this machine.

    python benchmarks/netcheck.py [--agents N] [--rounds N] [--dlrover PROGRAM] [--json FILE]

Our figure comes from the master's trace: from the first probe order to the beginning of the round,
minus the timed work (in each pass, the longest of any node). The total wait of a user, from the
commands to the first all_reduce, is measured with and without the check. dlrover-run (named by
--dlrover or on PATH, in a separate environment) is measured by the timestamps of its log: from the
start of its node check to its result, minus the figures that it prints as its timed work. Its
master is started by hand, because it cannot check several nodes outside Kubernetes in another way.
Results go to benchmarks/results/ with the date and the machine, or to FILE.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import report
from nodes import FIRST_STEP_LIMIT, Nodes
from rows import last
from stage import COMMANDS, ELASTICRUN, MARK, SCRIPTS, Job, TookTooLong, free_port, job

from elasticrun.core.events import Heard
from elasticrun.master.trace.replay import Step, read
from elasticrun.testing.processes import Deadline, Waiter
from elasticrun.wire.messages import Probed

BAR = 2.0
"""Target: seconds of the whole check of four agents on one machine, beyond its timed work."""

DLROVER = "dlrover-run"
DLROVER_LIMIT = 180.0
"""Seconds within which dlrover-run must have a result; its own limit is 300."""

STAMP = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+)\]")


@dataclass(frozen=True)
class Check:
    """One check: its seconds from beginning to end, the seconds of its timed work, its number of
    passes."""

    whole: float
    timed: float
    passes: int

    @property
    def beyond(self) -> float:
        """Seconds beyond its timed work."""
        return self.whole - self.timed


# ---------------------------------------------------------------- ours


def ours(agents: int, *flags: str) -> tuple[float, Check | None]:
    """Seconds from the agents' commands to the first all_reduce of all ranks, and the check if
    `flags` request one."""
    with job(ELASTICRUN) as run:
        nodes = Nodes(run, str(agents), "--rdzv-conf=is_host=0", *flags)
        record = run.folder / "record"
        words = ("master", f"--port={nodes.port}", f"--nnodes={agents}", "--rdzv-id=bench", *flags)
        _start(run, (*COMMANDS[ELASTICRUN], *words, f"--state-dir={record}"), "master")
        began = nodes.add(agents)
        first = last(nodes.first_steps(agents, began, FIRST_STEP_LIMIT))
        return first - began, _in_trace(record)


def _in_trace(record: Path) -> Check | None:
    """The check in the master's trace; None if there was none."""
    begun, passes = 0.0, list[float]()
    for item in read(record):
        if not isinstance(item, Step):
            continue
        event = item.event
        if isinstance(event, Heard) and isinstance(event.report, Probed):
            assert event.report.ok, event.report.reason
            passes[-1] = max(passes[-1], event.report.timed)
        if any(re.match(r"tell .*: Probe\b", said) for said in item.output):
            begun = begun or item.at
            passes.append(0.0)
        if passes and any("round 1 begins" in said for said in item.output):
            return Check(item.at - begun, sum(passes), len(passes))
    if passes:
        raise TookTooLong("the check had no end")
    return None


def _start(run: Job, command: tuple[str, ...], name: str, **env: str) -> Path:
    """Start a process of this measurement. Returns the file with its output."""
    console = run.folder / f"console-{name}"
    with console.open("wb") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": str(run.temporary), MARK: run.marker, **env},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    run.agents.append(process)
    return console


# ---------------------------------------------------------------- dlrover-run


def theirs(program: Path, agents: int) -> tuple[float, Check]:
    """The same for dlrover-run: seconds from the commands to the check's result, and the check of
    the agent that took longest."""
    with job(DLROVER) as run:
        port = free_port()
        master = ("-m", "dlrover.python.master.main", "--platform", "local", "--job_name", "bench")
        _start(
            run,
            (
                str(program.with_name("python")),
                *master,
                "--node_num",
                str(agents),
                "--port",
                str(port),
            ),
            "master",
        )
        consoles = []
        began = time.monotonic()
        for number in range(agents):
            words = (f"--nnodes={agents}", "--nproc_per_node=1", "--network-check")
            script = (str(SCRIPTS / "step_log.py"), "0.01")
            told = {"NODE_ID": str(number), "NODE_RANK": str(number), "NODE_NUM": str(agents)}
            told |= {"NODE_TYPE": "worker", "ELASTIC_JOB_NAME": "bench", "OMP_NUM_THREADS": "1"}
            told |= {"POD_IP": "127.0.0.1", "DLROVER_MASTER_ADDR": f"127.0.0.1:{port}"}
            told |= {"PYTHONUNBUFFERED": "1", "BENCH_STEPS": str(run.folder)}
            told |= {"BENCH_SOCKET": str(run.folder / "facts"), "BENCH_NODE": str(number)}
            consoles.append(_start(run, (str(program), *words, *script), f"agent-{number}", **told))
        _await(run, consoles, "Network check result is True")
        waited = time.monotonic() - began
        return waited, max((_in_log(path.read_text()) for path in consoles), key=lambda c: c.whole)


def _await(run: Job, consoles: list[Path], text: str) -> None:
    """Wait until every one of these files contains the text. Raises TookTooLong."""
    watch = Waiter()
    try:
        watch.folder(str(run.folder))
        deadline = Deadline(DLROVER_LIMIT)
        while not all(text in path.read_text(errors="replace") for path in consoles):
            if deadline.over():
                raise TookTooLong(f"{DLROVER}: no result within {DLROVER_LIMIT:g} s")
            watch.wait(deadline.left())
    finally:
        watch.close()


def _in_log(log: str) -> Check:
    """The check of one agent, from its log."""
    lines = log.splitlines()
    (begun,) = (_stamp(line) for line in lines if "Starting node-check agent" in line)
    (ended,) = (_stamp(line) for line in lines if "Network check result is" in line)
    matmuls = [line for line in lines if "Time to execute _execute_cpu_matmul" in line]
    transfers = [line for line in lines if "Time to execute bm_allreduce" in line]
    took = [float(line.rpartition(" is ")[2].rstrip("s.")) for line in (*matmuls, *transfers)]
    return Check((ended - begun).total_seconds(), sum(took), len(transfers))


def _stamp(line: str) -> datetime.datetime:
    found = STAMP.match(line)
    assert found, line
    return datetime.datetime.strptime(f"{found[1]}+0000", "%Y-%m-%d %H:%M:%S,%f%z")


# ---------------------------------------------------------------- the table


def _row(name: str, found: list[float], bar: float | None = None) -> str:
    if not found:
        return f"| {name} | - | | |"
    text = f"{statistics.median(found):.3g} s"
    if len(found) > 1:
        text += f" (worst of {len(found)}: {max(found):.3g})"
    if bar is None:
        return f"| {name} | {text} | | |"
    return f"| {name} | {text} | ≤ {bar:g} s | {'met' if max(found) <= bar else '**missed**'} |"


def _peer(given: str, agents: int) -> tuple[list[tuple[float, Check]], str]:
    """dlrover-run's samples (only one, because it takes long), or why there is none."""
    program = shutil.which(given)
    if program is None:
        return [], f"{DLROVER} is not installed here (--dlrover PROGRAM): nothing to compare with"
    try:
        return [theirs(Path(program), agents)], ""
    except TookTooLong as late:
        return [], str(late)


def main() -> int:
    """Measure, print, write. Returns 1 if the target is missed."""
    parser = argparse.ArgumentParser(description="The cost of the network check.")
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dlrover", default=DLROVER, help="its program; default: that on PATH")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    about = report.begin()
    plain, checked, checks = list[float](), list[float](), list[Check]()
    for _ in range(options.rounds):
        plain.append(ours(options.agents)[0])
        waited, check = ours(options.agents, "--network-check")
        assert check is not None, "no probe was ordered"
        checked.append(waited)
        checks.append(check)
    peer, why = _peer(options.dlrover, options.agents)
    print(f"| {options.agents} agents of one rank, this machine | | wanted | |\n|---|---|---|---|")
    print(_row("network check beyond its timed work", [c.beyond for c in checks], BAR))
    print(_row("– the whole check", [c.whole for c in checks]))
    print(_row("– its timed work (matmul and all_reduce)", [c.timed for c in checks]))
    print(_row("commands → first all_reduce, with the check", checked))
    print(_row("commands → first all_reduce, without", plain))
    if why:
        print(f"\n{why}")
    else:
        print(_row(f"{DLROVER}: check beyond its timed work", [c.beyond for _, c in peer]))
        print(_row("– the whole check", [c.whole for _, c in peer]))
        print(_row("– its timed work", [c.timed for _, c in peer]))
        print(_row("– commands → its result", [waited for waited, _ in peer]))
    samples = {
        "agents": options.agents,
        "beyond": [c.beyond for c in checks],
        "whole": [c.whole for c in checks],
        "timed": [c.timed for c in checks],
        "passes": [c.passes for c in checks],
        "with": checked,
        "without": plain,
        DLROVER: [{"beyond": c.beyond, "whole": c.whole, "timed": c.timed} for _, c in peer],
    }
    report.write("netcheck", about, samples, options.json)
    return 0 if max(c.beyond for c in checks) <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
