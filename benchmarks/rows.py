"""The measurements of the launcher table. Each takes a launcher's name and returns samples.

A sample is one number in the row's unit. The launchers alternate on the same machine, so that a
slow minute of the machine affects both.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from stage import ELASTICRUN, TORCHRUN, Fact, Job, TookTooLong, free_port, job

from elasticrun.agent import warm
from elasticrun.wire.env import WARM_SERVER

START_LIMIT = 60.0
"""Seconds within which a job of two ranks must complete its first all_reduce."""

RESTART_LIMIT = 20.0
"""Seconds after which a restart counts as a hang: with its stale store torchrun hangs for 100 s."""

NO_BACKOFF = ("--restart-backoff=0",)


def only_elasticrun(launcher: str, *flags: str) -> tuple[str, ...]:
    """These flags for elasticrun; none for torchrun, which does not have them."""
    return flags if launcher == ELASTICRUN else ()


def last(facts: Sequence[Fact]) -> float:
    """The time of the latest of these facts."""
    return max(fact.time for fact in facts)


def cold_start(launcher: str) -> list[float]:
    """Seconds from the command to the first all_reduce of both ranks."""
    with job(launcher) as run:
        run.start("--nproc-per-node=2", script="steps.py", arguments=("0", "0"))
        run.until(lambda: len(run.of("allreduce")) == 2, START_LIMIT)
        return [last(run.of("allreduce")) - run.began]


@contextlib.contextmanager
def warm_process(run: Job) -> Iterator[dict[str, str]]:
    """A warm process for the next job; yields the environment that its commands need."""
    place = run.folder / "warm.sock"
    said, pid = warm.start(place, 600.0, run.environment())
    assert said.startswith("ok"), said
    try:
        yield {WARM_SERVER: str(place)}
    finally:
        os.kill(pid, signal.SIGKILL)


def warm_start(launcher: str) -> list[float]:
    """The same with a warm process; for torchrun, which has none, a cold start."""
    if launcher == TORCHRUN:
        return cold_start(launcher)
    with job(launcher) as run, warm_process(run) as more:
        run.start("--nproc-per-node=2", script="steps.py", arguments=("0", "0"), more=more)
        run.until(lambda: len(run.of("allreduce")) == 2, START_LIMIT)
        return [last(run.of("allreduce")) - run.began]


def has_reached(run: Job, life: int, ranks: int) -> bool:
    """Whether `ranks` ranks of this life, or of a later one, have completed their first
    all_reduce."""
    lives = [fact.life for fact in run.of("allreduce") if fact.life >= life]
    return any(lives.count(reached) >= ranks for reached in set(lives))


def recoveries(run: Job, deaths: int, ranks: int, limit: float) -> list[float]:
    """Seconds from each death to the first all_reduce of all ranks of the next life.

    A life that does not get that far is a wasted restart. It is left out, because the time from its
    predecessor's death spans several lives and is no sample of a successful restart."""
    with contextlib.suppress(TookTooLong):
        for life in range(deaths + 1):
            run.until(lambda life=life: has_reached(run, life, ranks), limit)
    found = []
    for life in range(deaths):
        died, again = run.of("dies", life), run.of("allreduce", life + 1)
        if died and len(again) == ranks:
            found.append(last(again) - died[0].time)
    return found


def restart(launcher: str) -> list[float]:
    """Seconds from the death of one of two ranks to the next life's first all_reduce, three times
    in one job."""
    with job(launcher) as run:
        flags = ("--nproc-per-node=2", "--max-restarts=3", *only_elasticrun(launcher, *NO_BACKOFF))
        run.start(*flags, script="steps.py", arguments=("3", "0.5"))
        return recoveries(run, 3, 2, RESTART_LIMIT)


def script_restart(launcher: str, script: str) -> list[float]:
    """The same for a script with many imports, after two seconds of training."""
    seconds = 2.0
    with job(launcher) as run:
        flags = ("--nproc-per-node=2", "--max-restarts=1", *only_elasticrun(launcher, *NO_BACKOFF))
        run.start(*flags, script=script, arguments=(str(seconds),))
        return recoveries(run, 1, 2, seconds + START_LIMIT)


def two_nodes(launcher: str) -> list[float]:
    """Seconds from the death of the rank of one node of two to the next first all_reduce of both
    nodes' ranks."""
    with job(launcher) as run:
        endpoint = f"127.0.0.1:{free_port()}"
        for _ in range(2):
            run.start(
                *("--nnodes=2", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=bench"),
                *(f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1"),
                *only_elasticrun(launcher, *NO_BACKOFF),
                script="steps.py",
                arguments=("2", "0.5"),
            )
        return recoveries_two_nodes(run)


def recoveries_two_nodes(run: Job) -> list[float]:
    """As `recoveries`, for two deaths of two nodes with one rank each. Lives are distinguished by
    pid, because under torchrun the nodes' restart counts diverge."""
    found: list[float] = []
    with contextlib.suppress(TookTooLong):
        for death in range(2):
            run.until(lambda d=death: len(run.of("dies")) > d, START_LIMIT)
            died = run.of("dies")[death].time
            old = {fact.pid for fact in run.facts if fact.time <= died}

            def again(old: set[int] = old) -> list[Fact]:
                return [fact for fact in run.of("allreduce") if fact.pid not in old]

            run.until(lambda: len(again()) >= 2, RESTART_LIMIT)
            if len(again()) >= 2:
                found.append(last(again()[:2]) - died)
    return found


def resident(launcher: str) -> list[float]:
    """RSS in MB of the launcher while its two ranks train."""
    with job(launcher) as run:
        start_training(run)
        return [psutil.Process(run.agents[0].pid).memory_info().rss / 1e6]


def proportional(launcher: str) -> list[float]:
    """PSS in MB of all processes of a job of two ranks."""
    with job(launcher) as run:
        start_training(run)
        return [sum(pss(process.pid) for process in run.processes()) / 1e6]


def pss(pid: int) -> int:
    """Proportional set size of a process in bytes: each process counts its share of shared
    pages."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line[:4] == "Pss:")


def start_training(run: Job, settle: float = 3.0) -> None:
    """Start a job of two ranks, and let it train for `settle` seconds."""
    run.start("--nproc-per-node=2", script="steps.py", arguments=("0", "0", "for-ever"))
    run.until(lambda: len(run.of("allreduce")) == 2, START_LIMIT)
    time.sleep(settle)


def cpu_percent(launcher: str, seconds: float) -> dict[str, list[float]]:
    """Percent of one core that the launcher's processes use while two ranks train, by kind (agent,
    master, fork server, other, all)."""
    with job(launcher) as run:
        start_training(run)
        ranks = {fact.pid for fact in run.of("allreduce")}
        watched = [p for p in run.processes() if p.pid not in ranks]
        before = {p.pid: cpu_seconds(p.pid) for p in watched}
        began = time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - began
        used = {name_of(p): [100 * (cpu_seconds(p.pid) - before[p.pid]) / passed] for p in watched}
        used["all"] = [sum(value[0] for value in used.values())]
        return used


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, from the scheduler's counter in nanoseconds."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def name_of(process: psutil.Process) -> str:
    """The kind of a launcher's process."""
    command = " ".join(process.cmdline())
    for name, mark in (
        ("master", "elasticrun: master"),
        ("fork server", "elasticrun: fork server"),
    ):
        if mark in command:
            return name
    return "agent" if "elasticrun" in command or "distributed.run" in command else "other"


def cycles(launcher: str, deaths: int, limit: float) -> dict[str, float]:
    """Crash and restart `deaths` times in a row. Returns how many restarts worked, were wasted or
    hung, and what was left behind."""
    with job(launcher) as run:
        shm = set(os.listdir("/dev/shm"))
        flags = (
            "--nproc-per-node=2",
            f"--max-restarts={deaths}",
            *only_elasticrun(launcher, *NO_BACKOFF),
        )
        words = (str(deaths), "0.02")
        run.start(*flags, script="steps.py", arguments=words, own_store=False)
        agent = run.agents[0]
        descriptors: dict[int, int] = {}
        end, hangs = time.monotonic() + limit, 0
        try:
            for life in range(deaths + 1):
                rest = min(RESTART_LIMIT, max(0.1, end - time.monotonic()))
                run.until(lambda life=life: has_reached(run, life, 2), rest)
                if agent.poll() is None:
                    with contextlib.suppress(OSError):
                        descriptors[life] = len(os.listdir(f"/proc/{agent.pid}/fd"))
            run.until(lambda: agent.poll() is not None, START_LIMIT)
        except TookTooLong:
            hangs = 1
        code = agent.poll()
        worked = sum(len(run.of("allreduce", life)) == 2 for life in range(1, deaths + 1))
        tried = max((fact.life for fact in run.facts), default=0)
        settled = [count for life, count in sorted(descriptors.items()) if life >= 5]
        left = [p for p in run.processes() if code is not None]
        return {
            "restarts": float(tried),
            "worked": float(worked),
            "wasted": float(tried - worked),
            "hangs": float(hangs),
            "exit code": float(-1 if code is None else code),
            "processes left": float(len(left)),
            "descriptors grown by": float(settled[-1] - settled[0]) if settled else 0.0,
            "shm left": float(len(set(os.listdir("/dev/shm")) - shm)),
            "files left": float(files_beyond_logs(run.temporary)),
        }


def files_beyond_logs(folder: Path) -> int:
    """The number of files in $TMPDIR outside the log folders, which belong to the user."""
    return sum(1 for p in folder.rglob("*") if p.is_file() and "attempt_" not in str(p))
