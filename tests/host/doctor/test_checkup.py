"""All checks together: side by side, in order, bounded."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elasticrun.host.doctor import checkup
from elasticrun.host.doctor.checkup import CheckFamily, Subject
from elasticrun.host.doctor.disk import JobFolder
from elasticrun.host.doctor.verdict import amount, as_line, failures, ok
from elasticrun.wire.types import Finding, Level


def test_they_run_side_by_side_and_are_told_in_order() -> None:
    """Each waits for all others: one after the other they would never end."""
    together = threading.Barrier(3)

    def look(name: str) -> Callable[[], list[Finding]]:
        return lambda: [ok(name, str(together.wait(240) >= 0))]

    found = checkup.run([CheckFamily(name, look(name), limit=240) for name in "abc"])
    assert [finding.check for finding in found] == ["a", "b", "c"]


def test_one_that_hangs_is_left_to_itself(tmp_path: Path) -> None:
    """A read of a pipe that nobody writes to hangs as a dead file server does."""
    os.mkfifo(tmp_path / "pipe")
    hangs = [CheckFamily("disk", (tmp_path / "pipe").open, limit=0.2, late=Level.FAILED)]  # type: ignore[arg-type, list-item]
    well = CheckFamily("well", lambda: [ok("well", "seen")], limit=240)
    began = time.monotonic()
    late, fine = checkup.run([*hangs, well])
    assert time.monotonic() - began < 120  # it was not waited for
    assert late.state is Level.FAILED
    assert late.seen == "no answer within 0.2 s"
    assert fine.state is Level.OK
    os.close(os.open(tmp_path / "pipe", os.O_WRONLY))  # the thread may go


def test_a_check_that_breaks_is_no_verdict_on_the_machine() -> None:
    def look() -> list[Finding]:
        raise RuntimeError("a defect")

    (only,) = checkup.run([CheckFamily("mine", look)])
    assert only.state is Level.WARNING
    assert "RuntimeError: a defect" in only.seen


def test_a_real_machine_has_one_finding_at_least_from_each() -> None:
    subject = Subject(nproc=1, folders=(JobFolder("log", os.getcwd()),), environ=dict(os.environ))
    # one that is late tells nothing but its family's name
    wanted = [replace(check, limit=240) for check in checkup.checks(subject)]
    found = {finding.check for finding in checkup.run(wanted)}
    assert {
        "disk, log folder",
        "shared memory",
        "open files",
        "locked memory",
        "cores",
        "host name",
        "reverse name",
        "kernel log",
    } <= found


def test_words() -> None:
    assert [amount(n) for n in (5, 2048, 64 * 2**20, 3 * 2**29, 200 * 2**30)] == [
        "5 B",
        "2 KiB",
        "64 MiB",
        "1.5 GiB",
        "200 GiB",
    ]
    bad = Finding("ports", Level.FAILED, "closed", "open them")
    assert as_line(bad) == "ports: closed; open them"
    assert as_line(ok("ports", "open")) == "ports: open"
    assert failures([ok("a", "b"), bad]) == [bad]
