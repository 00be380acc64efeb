"""Where output goes: converts torch's LogsSpecs to our LogPlan and back, and reaches the caller's
console.

Under torch's launcher a thread of the caller prints tee'd output, so `redirect_stdout`, notebooks
and pytest see it. Our agent is another process. Where `sys.stdout` is not descriptor 1 of the
caller, the agent writes into a pipe, and a thread of the caller prints what it reads from it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from elasticrun.config import LogPlan


class HasLogs(Protocol):
    """The fields of LaunchConfig that concern output."""

    logs_specs: Any
    log_line_prefix_template: str | None
    duplicate_stdout_filters: list[str] | None
    duplicate_stderr_filters: list[str] | None


class DefaultLogsSpecs:
    """Has the fields of torch's class of this name, for configurations made from flags.

    Streams are torch's numbers: 0 none, 1 stdout, 2 stderr, 3 both."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: int | Mapping[int, int] = 0,
        tee: int | Mapping[int, int] = 0,
        local_ranks_filter: set[int] | None = None,
        plugin: str | None = None,
    ) -> None:
        """`plugin` names an entry point in `torchrun.logs_specs` that is used instead."""
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter
        self._plugin = plugin

    @property
    def root_log_dir(self) -> str | None:
        """The base folder; None: one under $TMPDIR."""
        return self._root_log_dir


def log_plan_of(config: HasLogs) -> LogPlan:
    """Convert to a LogPlan. Raises ValueError for a LogsSpecs class of the caller: the agent is
    another process, which can load a class by name but cannot receive an object."""
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
    """The inverse of `log_plan_of`."""
    return DefaultLogsSpecs(
        plan.log_dir,
        plan.redirects or plan.redirects_all,
        plan.tee or plan.tee_all,
        set(plan.local_ranks_filter) if plan.local_ranks_filter else None,
        plan.logs_specs,
    )


def _words(value: Any) -> tuple[int, dict[int, int]]:
    """One Std for all ranks, or Stds by local rank (ranks not named have none)."""
    if isinstance(value, Mapping):
        return 0, {int(rank): int(std) for rank, std in value.items()}
    return int(value), {}


class Consoles:
    """The descriptors on which an agent prints tee'd output."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        self.fds = (self._shown_by(sys.stdout, 1), self._shown_by(sys.stderr, 2))

    def _shown_by(self, stream: TextIO | None, own: int) -> int:
        with contextlib.suppress(OSError, ValueError):  # it has no descriptor, or is closed
            if stream is None or stream.closed or stream.fileno() == own:
                return own
        assert stream is not None
        self._copies.append(_Copy(stream))
        return self._copies[-1].write_end

    def start(self) -> None:
        """Close our write ends, now that the agent has its copies: its exit then gives EOF. Start
        the threads."""
        for copy in self._copies:
            os.close(copy.write_end)
            copy.thread.start()

    def wait(self) -> None:
        """Wait until all output of the agent is printed; call it after the agent has exited."""
        for copy in self._copies:
            copy.thread.join()


class _Copy:
    """A pipe and the thread that prints what arrives on it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._read_end, self.write_end = os.pipe()
        self.thread = threading.Thread(target=self._run, name="elasticrun-shown", daemon=True)

    def _run(self) -> None:
        """Print until EOF. Keep reading even if the stream no longer accepts output, because the
        agent must not block on a full pipe."""
        taken = True
        with io.TextIOWrapper(io.FileIO(self._read_end), "utf-8", errors="replace") as lines:
            for line in lines:
                if taken:
                    try:
                        self._stream.write(line)
                        self._stream.flush()
                    except (OSError, ValueError):  # closed in the meantime
                        taken = False
