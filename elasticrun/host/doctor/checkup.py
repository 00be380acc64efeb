"""Runs all families of checks in parallel, each with a time limit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from elasticrun.host.doctor import disk, kernel, names, reach, resources, software
from elasticrun.host.doctor.disk import JobFolder
from elasticrun.host.doctor.reach import Answer
from elasticrun.host.doctor.verdict import warning
from elasticrun.wire.types import Finding, Level

LIMIT: Final = 10.0
"""Seconds for one family; a resolver gives up after five, or after ten with two name servers."""

ACCELERATOR_LIMIT: Final = 45.0
"""Seconds for the accelerator's checks. Only a backup, because the child processes that query
drivers have their own limits."""


@dataclass(frozen=True, slots=True)
class CheckFamily:
    """One family of checks. `limit`: seconds; `late`: the level of its finding if it does not
    finish in time."""

    name: str
    run: Callable[[], Iterable[Finding]]
    limit: float = LIMIT
    late: Level = Level.WARNING


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked, and for which job.

    nproc: number of ranks on this node, 0: unknown. ranks: number of ranks of the whole job at its
    largest, as far as known. several: whether the job has other nodes. data: folders by the names
    of --data. accelerator: its name, "" for the detected one. starts: an agent is starting, so
    earlier OOM kills do not matter."""

    nproc: int = 0
    ranks: int = 1
    several: bool = False
    folders: tuple[JobFolder, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    accelerator: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    starts: bool = False


def checks(subject: Subject) -> list[CheckFamily]:
    """The families of checks that need only this machine."""
    environ = subject.environ
    return [
        CheckFamily(software.CHECK, software.examine),
        *(_disk(folder) for folder in subject.folders),
        *(_data(name, path) for name, path in subject.data.items()),
        CheckFamily(resources.SHM, lambda: resources.examine_shm(subject.nproc)),
        CheckFamily("limits", lambda: resources.examine_limits(subject.ranks)),
        CheckFamily(resources.CORES, lambda: resources.examine_cores(subject.nproc, environ)),
        CheckFamily(names.CHECK, lambda: names.examine(subject.several, environ)),
        CheckFamily(names.REVERSE, names.reverse),
        CheckFamily(kernel.CHECK, lambda: kernel.examine(starts=subject.starts)),
        CheckFamily("accelerator", lambda: _accelerator(subject), ACCELERATOR_LIMIT, Level.FAILED),
    ]


def _disk(folder: JobFolder) -> CheckFamily:
    # A rank that accesses a hanging file system cannot even be killed.
    late = Level.FAILED if folder.needed else Level.WARNING
    return CheckFamily(folder.check, lambda: disk.examine(folder), late=late)


def _data(name: str, path: str) -> CheckFamily:
    return CheckFamily(f"data, {name}", lambda: disk.examine_data(name, path), late=Level.FAILED)


def _accelerator(subject: Subject) -> Iterable[Finding]:
    # Imported late, in this check's own thread, so that nothing else waits for it.
    from elasticrun.host import accelerators

    kind = accelerators.accelerator_for(subject.accelerator, subject.environ)
    return kind.examine(subject.nproc, subject.environ)


def reachability(answers: Sequence[Answer], dialled: str) -> list[Finding]:
    """Findings from the master's answers to ReachMe; `dialled`: the master's numeric address."""
    if not answers:
        return []
    return [
        *reach.examine_clock(answers),
        *reach.examine_ports(answers, dialled),
        *reach.examine_mtu(answers[0].reached, dialled),
    ]


def run(wanted: Sequence[CheckFamily]) -> list[Finding]:
    """Run the families, each in a thread; returns their findings in order. Blocks until each has
    finished or timed out; abandons a thread that hangs."""
    done: queue.SimpleQueue[tuple[int, list[Finding]]] = queue.SimpleQueue()
    began = time.monotonic()
    for place, check in enumerate(wanted):
        name = f"elasticrun-check-{place}"
        threading.Thread(
            target=_run_check, args=(place, check, done), name=name, daemon=True
        ).start()
    found: dict[int, list[Finding]] = {}
    missing = dict(enumerate(wanted))
    while missing:
        end = began + min(check.limit for check in missing.values())
        try:
            place, findings = done.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            over = [p for p, check in missing.items() if began + check.limit <= end]
            found |= {p: [_timed_out(missing.pop(p))] for p in over}
            continue
        if missing.pop(place, None) is not None:
            found[place] = findings
    return [finding for place in sorted(found) for finding in found[place]]


def _run_check(
    place: int, check: CheckFamily, done: queue.SimpleQueue[tuple[int, list[Finding]]]
) -> None:
    try:
        findings = list(check.run())
    except Exception as wrong:  # a failing check does not mean that the machine cannot train
        seen = f"the check itself failed: {type(wrong).__name__}: {wrong}"
        findings = [warning(check.name, seen, "report it as a bug in elasticrun")]
    done.put((place, findings))


def _timed_out(check: CheckFamily) -> Finding:
    seen = f"no answer within {check.limit:g} s"
    todo = "find what hangs: a file system, a name server, a driver"
    return Finding(check.name, check.late, seen, todo)
