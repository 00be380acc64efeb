"""A class of the entry-point group `torchrun.logs_specs`, named by --logs-specs.

The contract is torch's (`LogsSpecs.reify(envs) -> LogsDest`), so its words are torch's types and
torch is loaded here, late, in the agent; a line says so because it costs memory and time.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Final

from elasticrun.config import LogPlan

GROUP: Final = "torchrun.logs_specs"

logger = logging.getLogger("elasticrun")


@dataclass(slots=True)
class Destinations:
    """The shape of torch's LogsDest: by local rank the file of each stream ("" is the launcher's
    own stream), which of them are copied to the console, and where errors are described."""

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogsPlugin:
    """The user's LogsSpecs. Raises what the plug-in raises; ValueError if there is none."""

    def __init__(self, plan: LogPlan, nproc: int) -> None:
        name = plan.logs_specs or ""
        points = list(metadata.entry_points(group=GROUP, name=name))
        if not points:
            raise ValueError(f"no entry point of that name in the group {GROUP}")
        logger.warning("loading torch in the agent for --logs-specs %s", name)
        std = importlib.import_module("torch.distributed.elastic.multiprocessing").Std

        def words(every: int, by_rank: Mapping[int, int]) -> Any:
            if not by_rank:
                return std(every)
            return {i: std(by_rank.get(i, every)) for i in range(nproc)}

        self._specs = points[0].load()(
            log_dir=plan.log_dir,
            redirects=words(plan.redirects_all, plan.redirects),
            tee=words(plan.tee_all, plan.tee),
            local_ranks_filter=set(plan.local_ranks_filter) if plan.local_ranks_filter else None,
        )

    def reify(self, envs: Mapping[int, dict[str, str]]) -> Destinations:
        """Ask the plug-in; it may change `envs` too (torch's own sets the error file there)."""
        return destinations_of(self._specs.reify(dict(envs)))


def destinations_of(dest: Any) -> Destinations:
    """A LogsDest of torch, of whatever version, as ours; what it does not have is empty."""
    ours = Destinations()
    for name in ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files"):
        files = getattr(dest, name, None) or {}
        setattr(ours, name, {int(rank): str(path) for rank, path in files.items()})
    ours.filtered_stdout = str(getattr(dest, "filtered_stdout", "") or "")
    ours.filtered_stderr = str(getattr(dest, "filtered_stderr", "") or "")
    return ours
