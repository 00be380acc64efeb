"""The kernel's log: planted lines as kernels write them, and the real one without waiting."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from elasticrun.host.doctor import kernel
from elasticrun.wire.types import Level

NOW = 200_000.0
"""Seconds since boot."""

HOUR_AGO = int((NOW - 3600) * 1e6)
TWO_DAYS_AGO = int((NOW - 2 * 86400) * 1e6)

OOM = (
    "Memory cgroup out of memory: Killed process 4711 (python3) total-vm:1kB, anon-rss:1kB, "
    "UID:0 pgtables:1kB oom_score_adj:0"
)
GLOBAL_OOM = "Out of memory: Killed process 4712 (train) total-vm:1kB, anon-rss:1kB"
XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def plant(root: Path, *lines: tuple[int, str]) -> Path:
    (root / "dev").mkdir(parents=True)
    text = "".join(f"3,{n},{when},-;{said}\n KEY=value\n" for n, (when, said) in enumerate(lines))
    (root / "dev/kmsg").write_text(text)
    return root


def test_nothing(tmp_path: Path) -> None:
    root = plant(tmp_path, (HOUR_AGO, "usb 1-1: new device"), (TWO_DAYS_AGO, OOM))
    (only,) = kernel.examine(root, NOW)
    assert only.state is Level.OK


def test_processes_that_were_killed(tmp_path: Path) -> None:
    root = plant(tmp_path, (TWO_DAYS_AGO, OOM), (HOUR_AGO, OOM), (int(NOW * 1e6) - 5, GLOBAL_OOM))
    (only,) = kernel.examine(root, NOW)
    assert only.state is Level.WARNING
    assert only.seen.startswith("the kernel's OOM killer killed a process 2 times")
    assert "0 s ago (train, pid 4712)" in only.seen


def test_to_an_agent_that_starts_what_was_killed_before_is_no_matter(tmp_path: Path) -> None:
    root = plant(tmp_path, (HOUR_AGO, OOM), (HOUR_AGO, XID.format(79)))
    killed, xid = kernel.examine(root, NOW, starts=True)
    assert (killed.state, killed.todo) == (Level.OK, "")
    assert killed.seen.startswith("the kernel's OOM killer killed a process once")
    assert (xid.state, "Xid 79" in xid.seen) == (Level.WARNING, True)


@pytest.mark.parametrize(
    ("lines", "said", "clear"),
    [
        (
            [(HOUR_AGO, OOM), (int(NOW * 1e6) - 5_000_000, GLOBAL_OOM)],
            "the kernel's OOM killer killed a process 5 s ago (train, pid 4712)",
            False,
        ),
        (
            [(int(NOW * 1e6) - 9_000_000, OOM), (int(NOW * 1e6) - 5_000_000, GLOBAL_OOM)],
            "the kernel's OOM killer killed a process 9 s ago (python3, pid 4711)",
            False,
        ),
        ([(HOUR_AGO, OOM)], "it was killed by a signal, and the kernel recorded no OOM kill", True),
    ],
)
def test_of_a_kill(tmp_path: Path, lines: list[tuple[int, str]], said: str, clear: bool) -> None:
    word = kernel.explain_kill(4711, plant(tmp_path, *lines), NOW)
    assert (word.text, word.clear) == (said, clear)


def test_xids(tmp_path: Path) -> None:
    lines = [(HOUR_AGO, XID.format(79)), (HOUR_AGO + 1, XID.format(13)), (HOUR_AGO, XID.format(79))]
    bus, program = kernel.examine(plant(tmp_path, *lines), NOW)
    assert "Xid 79 of PCI:0000:3b:00 2 times" in bus.seen
    assert "60 min ago" in bus.seen
    assert "drain the node" in bus.todo
    assert "Xid 13 of PCI:0000:3b:00 once" in program.seen
    assert "bug of a program" in program.todo
    assert {bus.state, program.state} == {Level.WARNING}


def test_a_machine_check(tmp_path: Path) -> None:
    said = "mce: [Hardware Error]: Machine check events logged"
    (only,) = kernel.examine(plant(tmp_path, (HOUR_AGO, said)), NOW)
    assert only.state is Level.WARNING
    assert "the hardware reported an error once" in only.seen


def test_where_it_may_not_be_read(tmp_path: Path) -> None:
    (only,) = kernel.examine(tmp_path, NOW)
    assert only.state is Level.OK
    assert "cannot be read here" in only.seen


def test_a_log_that_never_ends_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe whose writer lives is what /dev/kmsg is: more may come at any time."""
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / "dev/kmsg")
    reader = os.open(tmp_path / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(tmp_path / "dev/kmsg", os.O_WRONLY)
    try:
        os.write(writer, f"3,1,{HOUR_AGO},-;{OOM}\n".encode())
        (only,) = kernel.examine(tmp_path, NOW)
    finally:
        os.close(writer)
        os.close(reader)
    assert only.state is Level.WARNING


def test_a_kernel_that_writes_faster_than_we_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EPIPE on every read: no file can be made to say that."""
    plant(tmp_path)
    tries = itertools.count()

    def overwritten(_fd: int, _size: int) -> bytes:
        assert next(tries) < 100_000, "it never gives up"
        raise BrokenPipeError

    monkeypatch.setattr(kernel.os, "read", overwritten)
    (only,) = kernel.examine(tmp_path, NOW)
    assert only.state is Level.OK


def test_the_real_one() -> None:
    path = Path("/dev/kmsg")
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as wrong:
        pytest.skip(f"the kernel's log cannot be read here: {wrong}")
    records = list(kernel.read(path, time.monotonic()))
    assert records, "a kernel that has booted has said something"
    assert all(record.age >= 0 for record in records)
