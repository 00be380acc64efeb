"""Exceptions of the Python API: torch's own classes if the caller has imported them, else
equivalents.

A caller who writes `except ChildFailedError` has imported torch's class, so that class must be
raised. A caller that has not imported torch should not spend a second on the import only to fail.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import ModuleType
from typing import Any, Final

from elasticrun.agent.shutdown import format_failures
from elasticrun.agent.workers.exits import read_error_file, signal_name
from elasticrun.wire.messages import Failure

_TORCH_ERRORS: Final = "torch.distributed.elastic.multiprocessing.errors"
_TORCH_SIGNALS: Final = "torch.distributed.elastic.multiprocessing.api"


class LaunchError(RuntimeError):
    """The job ended, but not because of a failed rank or a signal: too few nodes, no master, a
    killed agent, unwritable logs. The message is one sentence; `exit_code` is the exit code of the
    command `elasticrun` in this case."""

    def __init__(self, reason: str, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass
class ProcessFailure:
    """One failed rank, with the fields of torch's class of this name."""

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any] = field(default_factory=dict)
    message: str | dict[str, Any] = ""
    timestamp: int = 0

    def signal_name(self) -> str:
        """The name of the signal that killed it, `<N/A>` if it exited by itself."""
        return signal_name(self.exitcode) if self.exitcode < 0 else "<N/A>"

    def timestamp_isoformat(self) -> str:
        """When it failed, like `2026-11-21_02:57:32`."""
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")  # noqa: DTZ006


class ChildFailedError(Exception):
    """Ranks failed and no restart was left. `failures` is keyed by global rank. What
    `child_failed_error` returns overrides both methods: the root cause is that of the whole job, on
    any node."""

    def __init__(self, name: str, failures: dict[int, Any]) -> None:
        self.name = name
        self.failures = failures
        super().__init__(self.format_msg())

    def get_first_failure(self) -> tuple[int, Any]:
        """Global rank and failure with the earliest timestamp."""
        rank = min(self.failures, key=lambda rank: self.failures[rank].timestamp)
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """The text of the exception: here, `name` only. Torch's parameters have no effect."""
        return self.name


class SignalException(Exception):
    """This process received a death signal and therefore stopped the ranks."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


def child_failed_error(name: str, failures: Sequence[Failure]) -> Exception:
    """The exception for these failures, the root cause first. Its class is a subclass of torch's
    ChildFailedError, or of ours, with the same name."""
    torch = sys.modules.get(_TORCH_ERRORS)
    base: type[Any] = getattr(torch, "ChildFailedError", ChildFailedError)
    root = failures[0]
    text = format_failures(name, failures, root)

    class Rooted(base):  # type: ignore[misc]
        # torch's methods take the earliest whole second as the cause, and read files that may be
        # on another node.
        def get_first_failure(self) -> tuple[int, Any]:
            return root.rank, self.failures[root.rank]

        def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
            return text

        def __reduce__(self) -> tuple[Any, ...]:
            return child_failed_error, (name, tuple(failures))

    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Rooted, attribute, getattr(base, attribute))
    by_rank = {f.rank: _process_failure(f, torch) for f in failures}
    raised: Exception = Rooted(name, by_rank)
    return raised


def signal_exception(signum: int) -> Exception:
    """The exception for a death signal that this process received."""
    torch = sys.modules.get(_TORCH_SIGNALS)
    kind: type[Any] = getattr(torch, "SignalException", SignalException)
    number = signal.Signals(signum)
    raised: Exception = kind(f"Process {os.getpid()} got signal: {number}", sigval=number)
    return raised


def _process_failure(failure: Failure, torch: ModuleType | None) -> Any:
    kind: type[Any] = getattr(torch, "ProcessFailure", ProcessFailure)
    # No file, so that torch does not read one that may be corrupt.
    made = kind(failure.local_rank, failure.pid, failure.exitcode, "")
    data = read_error_file(failure.error_file).data
    made.error_file = failure.error_file or "<N/A>"
    made.timestamp = failure.time_us // 1_000_000 or int(time.time())  # 0 for a hang
    if data is not None:
        made.message = data["message"]
        made.error_file_data = data
    elif failure.traceback:
        extra = {"py_callstack": failure.traceback, "timestamp": str(made.timestamp)}
        made.message = {"message": failure.message, "extraInfo": extra}
        made.error_file_data = {"message": json.loads(json.dumps(made.message))}
    else:
        made.message = failure.message
        made.error_file_data = {"message": failure.message}
    return made
