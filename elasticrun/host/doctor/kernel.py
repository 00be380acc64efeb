"""Checks the kernel's log for OOM kills and for reports of the GPU driver."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elasticrun.host.doctor.verdict import ok, warning
from elasticrun.wire.types import Finding

CHECK: Final = "kernel log"

SINCE: Final = 24 * 3600.0
"""Maximum age in seconds of an entry that counts."""

JUST_NOW: Final = 60.0
"""Maximum age in seconds of an OOM kill that may explain the death of a process just now."""

MAX_BYTES: Final = 16 * 1024 * 1024
"""Maximum bytes read from a log; the kernel's default is a quarter of a megabyte."""

RECORD: Final = 8192
"""Bytes of the read buffer. The kernel returns one record per read, and fails if the buffer is
smaller than the record."""

APPLICATION: Final = frozenset({13, 31, 43, 45, 68, 69, 109})
"""Xids that are usually caused by a program's own error (NVIDIA's Xid catalog)."""

_LINE: Final = re.compile(r"\d+,\d+,(\d+),[^;]*;(.*)")
_OOM: Final = re.compile(r"(?:Out of memory|out of memory).*?Killed process (\d+) \(([^)]*)\)")
_XID: Final = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
_MCE: Final = re.compile(r"\[Hardware Error\]: (?:Machine check|event severity: fatal)")


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One line of the log and its age in seconds."""

    age: float
    text: str


@dataclass(frozen=True, slots=True)
class KillReport:
    """What the log says about a killed process. `clear`: the log could be read and shows no OOM
    kill."""

    text: str
    clear: bool


def examine(
    root: Path = Path("/"), now: float | None = None, *, starts: bool = False
) -> list[Finding]:
    """Findings from the log of the last 24 hours. `starts`: an agent is starting, so OOM kills are
    reported but are no warnings. `now`: seconds since boot."""
    try:
        records = list(read(root / "dev/kmsg", now))
    except OSError as wrong:
        return [ok(CHECK, f"it cannot be read here: {_why(wrong)}")]
    recent = [record for record in records if record.age <= SINCE]
    killed = [ok(CHECK, one.seen) if starts else one for one in _oom_kills(recent)]
    found = [*killed, *_xids(recent), *_machine_checks(recent)]
    return found or [ok(CHECK, "no process killed for memory and no Xid in the last 24 hours")]


def explain_kill(pid: int, root: Path = Path("/"), now: float | None = None) -> KillReport:
    """What the log says about a process that was killed just now by somebody else."""
    try:
        records = list(read(root / "dev/kmsg", now))
    except OSError as wrong:
        cannot = f"the kernel's log cannot be read here ({_why(wrong)})"
        return KillReport(
            f"the cause of the kill is unknown: no OOM kill was counted, and {cannot}; "
            "read it as root with dmesg",
            clear=False,
        )
    kills = list(_kills([record for record in records if record.age <= JUST_NOW]))
    if not kills:
        return KillReport(
            "it was killed by a signal, and the kernel recorded no OOM kill", clear=True
        )
    age, killed, name = min(kills, key=lambda kill: (kill[1] != str(pid), kill[0]))
    return KillReport(
        f"the kernel's OOM killer killed a process {_ago(age)} ({name}, pid {killed})",
        clear=False,
    )


def _why(wrong: OSError) -> str:
    return (wrong.strerror or str(wrong)).lower()


def read(path: Path, now: float | None) -> Iterator[KernelLine]:
    """Yield the records that exist now; does not wait for new ones. `now`: seconds since boot.
    Raises OSError."""
    now = time.monotonic() if now is None else now
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        text = b"".join(_pieces(fd)).decode(errors="replace")
    finally:
        os.close(fd)
    for line in text.splitlines():
        if parts := _LINE.match(line):
            yield KernelLine(max(0.0, now - int(parts[1]) / 1e6), parts[2])


def _pieces(fd: int) -> Iterator[bytes]:
    size = 0
    while size < MAX_BYTES:
        try:
            piece = os.read(fd, RECORD)
        except BlockingIOError:
            return
        except BrokenPipeError:  # the next record was overwritten before we read it
            size += RECORD  # ends the loop even if the kernel keeps writing faster than we read
            continue
        if not piece:
            return
        size += len(piece)
        yield piece


def _kills(records: list[KernelLine]) -> Iterator[tuple[float, str, str]]:
    """Age, pid and name of each OOM-killed process."""
    for record in records:
        if m := _OOM.search(record.text):
            yield record.age, m[1], m[2]


def _oom_kills(records: list[KernelLine]) -> Iterator[Finding]:
    kills = list(_kills(records))
    if kills:
        age, pid, name = min(kills)
        yield warning(
            CHECK,
            f"the kernel's OOM killer killed a process {_times(len(kills))} in the last 24 hours, "
            f"the last one {_ago(age)} ({name}, pid {pid})",
            "give the job more memory, or use less: fewer data loader workers, smaller batches",
        )


def _xids(records: list[KernelLine]) -> Iterator[Finding]:
    """One finding for each GPU and Xid, at most sixteen."""
    latest: dict[tuple[str, int], list[float]] = {}
    for record in records:
        if m := _XID.search(record.text):
            latest.setdefault((m[1], int(m[2])), []).append(record.age)
    for (device, xid), ages in list(latest.items())[:16]:
        own = xid in APPLICATION
        yield warning(
            CHECK,
            f"the GPU driver reported Xid {xid} of {device} {_times(len(ages))} in the last 24 "
            f"hours, the last one {_ago(min(ages))}",
            "it is usually a bug of a program: check what ran there"
            if own
            else f"look Xid {xid} up in NVIDIA's catalog; reset the GPU or drain the node",
        )


def _machine_checks(records: list[KernelLine]) -> Iterator[Finding]:
    ages = [record.age for record in records if _MCE.search(record.text)]
    if ages:
        yield warning(
            CHECK,
            f"the hardware reported an error {_times(len(ages))} in the last 24 hours, the last "
            f"one {_ago(min(ages))}",
            "read the log (dmesg, rasdaemon); drain the node if it happens again",
        )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _ago(age: float) -> str:
    if age < 120:
        return f"{age:.0f} s ago"
    return f"{age / 60:.0f} min ago" if age < 7200 else f"{age / 3600:.0f} h ago"
