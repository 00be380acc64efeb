"""The CPU: what ranks compute on where there is nothing else, or where the user says so."""

from __future__ import annotations

import os
from collections.abc import Mapping

from elasticrun.accelerators.base import Accelerator
from elasticrun.wire.findings import Finding


def cores() -> int:
    """Cores that this process may be scheduled on, as torch counts them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Cpu(Accelerator):
    """The cores of this node; ranks share them, so no number of ranks is too large."""

    name = "cpu"
    device = "cpu"
    backend = "gloo"
    visible_variable = ""

    def count(self, environ: Mapping[str, str]) -> int | None:
        return cores()

    def examine(self, wanted: int, environ: Mapping[str, str]) -> tuple[Finding, ...]:
        return ()  # quota, cores and memory of the machine are the doctor's own checks
