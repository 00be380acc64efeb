"""Short constructors of findings, and their texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from elasticrun.wire.types import Finding, Level

MIB: Final = 1024 * 1024
GIB: Final = 1024 * MIB


def ok(check: str, seen: str) -> Finding:
    """A finding without a problem."""
    return Finding(check, Level.OK, seen)


def warning(check: str, seen: str, todo: str) -> Finding:
    """A finding about something that may cause a problem for a job."""
    return Finding(check, Level.WARNING, seen, todo)


def failed(check: str, seen: str, todo: str) -> Finding:
    """A finding about something that makes this machine unfit for ranks."""
    return Finding(check, Level.FAILED, seen, todo)


def amount(size: float) -> str:
    """Bytes for people: `64 MiB`, `1.5 GiB`."""
    for unit, word in ((1024 * GIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {word}" if size < 100 * unit else f"{size / unit:.0f} {word}"
    return f"{size:.0f} B"


def as_line(finding: Finding) -> str:
    """The finding as a log line."""
    return f"{finding.check}: {finding.seen}" + (f"; {finding.todo}" if finding.todo else "")


def failures(findings: Iterable[Finding]) -> list[Finding]:
    """The findings with level FAILED: this machine is unfit for ranks."""
    return [finding for finding in findings if finding.state is Level.FAILED]
