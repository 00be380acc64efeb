"""Where output goes: in torch's words (LogsSpecs), in ours (LogPlan), and on the caller's console.

Under torch's launcher a thread of the caller prints what is tee'd, so `redirect_stdout`, a notebook
and pytest see it. The agent is another process: where `sys.stdout` is not descriptor 1 of the
caller, it writes into a pipe, and a thread of the caller prints what comes out.
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


class Consoles:
    """Where an agent shows what is tee'd, as descriptors to hand to it."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        self.fds = tuple(
            self._shown_by(stream, own) for stream, own in ((sys.stdout, 1), (sys.stderr, 2))
        )

    def _shown_by(self, stream: TextIO | None, own: int) -> int:
        with contextlib.suppress(OSError, ValueError):  # it has no descriptor, or is closed
            if stream is None or stream.closed or stream.fileno() == own:
                return own
        assert stream is not None
        self._copies.append(_Copy(stream))
        return self._copies[-1].write_end

    def begin(self) -> None:
        """The agent has its ends; ours are closed, so that its end is heard."""
        for copy in self._copies:
            os.close(copy.write_end)
            copy.thread.start()

    def wait(self) -> None:
        """Until all that the agent has written is printed; call it once the agent has ended."""
        for copy in self._copies:
            copy.thread.join()


class _Copy:
    """One pipe and the thread that prints what comes out of it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._read_end, self.write_end = os.pipe()
        self.thread = threading.Thread(target=self._run, name="elasticrun-shown", daemon=True)

    def _run(self) -> None:
        """Reads to the end also where the stream takes nothing any more: an agent that writes is
        not to wait for it."""
        taken = True
        with io.TextIOWrapper(io.FileIO(self._read_end), "utf-8", errors="replace") as lines:
            for line in lines:
                if taken:
                    try:
                        self._stream.write(line)
                        self._stream.flush()
                    except (OSError, ValueError):  # closed meanwhile
                        taken = False
