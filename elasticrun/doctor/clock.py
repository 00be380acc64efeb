"""This host's clock against the master's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from elasticrun.doctor.ports import Answer
from elasticrun.doctor.verdict import ok, warning
from elasticrun.wire.types import Finding

CHECK: Final = "clock"

MOST: Final = 1.0
"""Seconds that clocks may differ: logs of several nodes are still in order for the eye. Nothing of
elasticrun's depends on it, but certificates and file systems do."""


def examine(answers: Sequence[Answer]) -> list[Finding]:
    """From the quickest of some answers, since half of what an answer takes is what the result may
    be wrong by."""
    if not answers:
        return []
    best = min(answers, key=lambda answer: answer.received_us - answer.sent_us)
    middle = (best.sent_us + best.received_us) / 2
    ahead = (middle - best.reached.clock_us) / 1e6
    doubt = (best.received_us - best.sent_us) / 2e6
    side = "ahead of" if ahead > 0 else "behind"
    seen = (
        f"this host's clock is {_amount(abs(ahead))} {side} that of the master's host "
        f"{best.reached.host} (to within {_amount(doubt)})"
    )
    if abs(ahead) - doubt > MOST:
        return [warning(CHECK, seen, "set both by NTP (chronyc tracking, timedatectl)")]
    return [ok(CHECK, seen)]


def _amount(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
