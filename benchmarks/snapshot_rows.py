"""The measurements of snapshots. Each starts real jobs (or a plain process, for a floor) and
returns samples, most by name, in seconds."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
from rows import NO_BACKOFF, only_elasticrun
from stage import ELASTICRUN, SCRIPTS, Job, TookTooLong, free_port, job

from elasticrun.testing.processes import is_master

Samples = dict[str, list[float]]

LIMIT = 240.0
"""Seconds that each wait in a measurement may take: with 1 GiB in pages that were never touched,
jobs are slow."""


def floors(gib: float, count: int, samples: int) -> Samples:
    """Measure memcpy, O_DIRECT and torch's own saves of the same state, in a plain process."""
    folder = Path(tempfile.mkdtemp(prefix="elasticrun-bench-"))
    words = (str(gib), str(count), str(samples), str(folder), str(free_port()))
    try:
        done = subprocess.run(
            (sys.executable, str(SCRIPTS / "snapshot_floors.py"), *words),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise TookTooLong(f"the floors: not within {late.timeout:g} s") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if done.returncode:
        raise TookTooLong(f"the floors ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: Samples = json.loads(done.stdout.splitlines()[-1])
    return found


def figures(run: Job) -> list[dict[str, float | str]]:
    """The samples that the job's ranks have written so far, one object each."""
    path = run.folder / "figures"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def by_name(rows: Sequence[dict[str, float | str]]) -> Samples:
    """The seconds of these samples by name, in the order in which they were written."""
    found: Samples = {}
    for row in rows:
        found.setdefault(str(row["name"]), []).append(float(row["seconds"]))
    return found


def lives(gib: float, count: int, samples: int, pairs: int) -> Samples:
    """Measure stalls compared with memcpy in a first life; then, after each of `pairs` pairs of
    SIGKILLs, the restore, the first snapshot after it, and the seconds from the death to the next
    training step."""
    deaths = 2 * pairs
    with job(ELASTICRUN) as run:
        words = (str(gib), str(count), str(samples), str(deaths + 1))
        flags = ("--nproc-per-node=1", f"--max-restarts={deaths}", *NO_BACKOFF)
        run.start(*flags, script="snapshot_lives.py", arguments=words)
        _await_lives(run, deaths)
        rows = figures(run)
        return {**by_name(rows), **_breakdown(run, deaths)}


AGAIN = "killed → training again"
PARTS = ("dies", "script", "imported", "made", "restored", "again")
"""The events from the death to the next step, in order."""


def _breakdown(run: Job, deaths: int) -> Samples:
    """Seconds from a death to the next training step, and between the events on the way. Only of
    lives with even numbers, whose memory was not touched before."""
    found: Samples = {}
    for life in range(2, deaths + 1, 2):
        at = [run.of("dies", life - 1), *(run.of(name, life) for name in PARTS[1:])]
        if all(at):
            times = [facts[0].time for facts in at]
            found.setdefault(AGAIN, []).append(times[-1] - times[0])
            for name, (before, after) in zip(PARTS[1:], itertools.pairwise(times), strict=True):
                found.setdefault(f"to {name}", []).append(after - before)
    return found


def from_disk(launcher: str, gib: float, count: int, deaths: int) -> list[float]:
    """Seconds from the death of a rank to the next training step, with the state loaded from
    disk."""
    with job(launcher) as run:
        words = (str(gib), str(count), str(deaths + 1))
        flags = (
            "--nproc-per-node=1",
            f"--max-restarts={deaths}",
            *only_elasticrun(launcher, *NO_BACKOFF),
        )
        run.start(*flags, script="snapshot_disk.py", arguments=words)
        _await_lives(run, deaths)
        return recoveries(run, deaths)


def _await_lives(run: Job, deaths: int) -> None:
    """Wait until every life has completed its first step, and the job has succeeded. Raises
    TookTooLong."""
    for life in range(deaths + 1):
        run.until(lambda life=life: bool(run.of("again", life)), LIMIT)
        if not run.of("again", life):
            raise TookTooLong(f"{run.launcher}: life {life} never trained\n{run.console()}")
    _await_end(run)


def _await_end(run: Job) -> None:
    agent = run.agents[0]
    run.until(lambda: agent.poll() is not None, LIMIT)
    if agent.wait(LIMIT):
        raise TookTooLong(f"{run.launcher} ended with {agent.poll()}\n{run.console()}")


def recoveries(run: Job, deaths: int) -> list[float]:
    """Seconds from each death to the next life's first training step."""
    pairs = ((run.of("dies", life), run.of("again", life + 1)) for life in range(deaths))
    return [again[0].time - died[0].time for died, again in pairs if died and again]


def persists(gib: float, count: int, samples: int) -> Samples:
    """For each checkpoint, the seconds from the end of `step()` to its marker, and the CPU seconds
    of the job's processes except the rank, by kind."""
    with job(ELASTICRUN) as run:
        words = (str(gib), str(count), str(samples))
        run.start("--nproc-per-node=1", script="snapshot_persist.py", arguments=words)
        used: list[dict[str, float]] = []
        for number in range(samples + 2):
            run.until(lambda number=number: len(run.of("ready")) > number, LIMIT)
            if len(run.of("ready")) <= number:
                raise TookTooLong(f"no checkpoint was written\n{run.console()}")
            used.append(cpu_seconds_by_kind(run, {fact.pid for fact in run.facts}))
        _await_end(run)
        found = by_name(figures(run))
        for before, after in list(itertools.pairwise(used))[1:]:
            spent = {kind: after[kind] - before.get(kind, 0.0) for kind in after}
            for kind, seconds in spent.items():
                found.setdefault(f"cpu of {kind}", []).append(seconds)
            found.setdefault("cpu of all", []).append(sum(spent.values()))
        return found


def cpu_seconds_by_kind(run: Job, ranks: set[int]) -> dict[str, float]:
    """CPU seconds so far of the job's processes except the ranks, by kind."""
    found: dict[str, float] = {}
    for process in run.processes():
        if process.pid not in ranks:
            with contextlib.suppress(OSError, psutil.Error):
                kind, used = kind_of(process), process.cpu_times()  # includes ended threads
                found[kind] = found.get(kind, 0.0) + used.user + used.system
    return found


def kind_of(process: psutil.Process) -> str:
    """The kind of a launcher's process, by its title."""
    words = " ".join(process.cmdline())
    for kind in ("master", "fork server", "saver"):
        if words.startswith(f"elasticrun: {kind}"):
            return kind
    return "master" if is_master(process.pid) else "agent"


def training(pairs: int, steps: int) -> list[dict[str, float | str]]:
    """Samples of the seconds per step of a small model on two ranks, in blocks with a snapshot in
    each step and without."""
    with job(ELASTICRUN) as run:
        words = (str(pairs), str(steps))
        run.start("--nproc-per-node=2", script="snapshot_training.py", arguments=words)
        _await_end(run)
        return figures(run)


def first(gib: float) -> Samples:
    """Seconds of a step of two ranks with half of the state each: without a Checkpointer, until the
    first snapshot, with the first one, and with later ones."""
    with job(ELASTICRUN) as run:
        run.start("--nproc-per-node=2", script="snapshot_first.py", arguments=(str(gib / 2),))
        _await_end(run)
        return by_name(figures(run))
