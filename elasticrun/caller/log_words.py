"""Where output goes, in torch's words (LogsSpecs) and in ours (LogPlan)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from elasticrun.config import LogPlan


class HasLogs(Protocol):
    """The fields of LaunchConfig that are about output."""

    logs_specs: Any
    log_line_prefix_template: str | None
    duplicate_stdout_filters: list[str] | None
    duplicate_stderr_filters: list[str] | None


class DefaultLogsSpecs:
    """The shape of torch's class of this name, for configurations that the flags have made.

    Words for streams are torch's numbers: 0 none, 1 stdout, 2 stderr, 3 both."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: int | Mapping[int, int] = 0,
        tee: int | Mapping[int, int] = 0,
        local_ranks_filter: set[int] | None = None,
        plugin: str | None = None,
    ) -> None:
        """`plugin` is the name of an entry point of `torchrun.logs_specs` to be used instead."""
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter
        self._plugin = plugin

    @property
    def root_log_dir(self) -> str | None:
        """The base folder, None for one under $TMPDIR."""
        return self._root_log_dir


def log_words(config: HasLogs) -> LogPlan:
    """Where the output goes. Raises ValueError for a LogsSpecs of the caller's own: the agent is
    another process, which can load a class by its name but cannot be given an object."""
    specs = DefaultLogsSpecs() if config.logs_specs is None else config.logs_specs
    if type(specs).__name__ != "DefaultLogsSpecs":
        raise ValueError(
            f"logs_specs is a {type(specs).__name__}: register the class in the entry-point group "
            "torchrun.logs_specs and name it by --logs-specs"
        )
    redirects_all, redirects = _words(specs._redirects)
    tee_all, tee = _words(specs._tee)
    shown = specs._local_ranks_filter
    return LogPlan(
        log_dir=specs._root_log_dir,
        redirects=redirects,
        redirects_all=redirects_all,
        tee=tee,
        tee_all=tee_all,
        local_ranks_filter=tuple(sorted(shown)) if shown else None,
        stdout_filters=tuple(config.duplicate_stdout_filters or ()),
        stderr_filters=tuple(config.duplicate_stderr_filters or ()),
        prefix_template=config.log_line_prefix_template or "",
        logs_specs=getattr(specs, "_plugin", None),
    )


def specs_of(plan: LogPlan) -> DefaultLogsSpecs:
    """The other direction."""
    return DefaultLogsSpecs(
        plan.log_dir,
        plan.redirects or plan.redirects_all,
        plan.tee or plan.tee_all,
        set(plan.local_ranks_filter) if plan.local_ranks_filter else None,
        plan.logs_specs,
    )


def _words(value: Any) -> tuple[int, dict[int, int]]:
    """A Std for all ranks, or Stds by local rank (ranks that are not named have none)."""
    if isinstance(value, Mapping):
        return 0, {int(rank): int(std) for rank, std in value.items()}
    return int(value), {}
