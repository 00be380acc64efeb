"""--event-log-handler: events of the agent and the workers, as torch's JSON lines.

The format is `torch.distributed.elastic.events.Event` with the metadata of torchrun's agent, field
by field. One difference: `timestamp` is set (milliseconds; torchrun leaves 0).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from elasticrun.agent.workers.exits import read_error_file
from elasticrun.wire import env
from elasticrun.wire.messages import Failure, Start

HANDLERS: Final = ("null", "console", "dynamic_rendezvous")
"""Only `console` writes anything, as under torchrun."""


def check_handler(name: str) -> None:
    """Raise ValueError with one sentence for a handler that torchrun does not have."""
    if name not in HANDLERS:
        raise ValueError(
            f"--event-log-handler={name} is not known: use one of {', '.join(HANDLERS)}"
        )


class EventLog:
    """Writes events; a no-op unless the handler is `console`.

    `write` takes a text and must not block (the agent's writer thread). In each method `now_ms` is
    wall time in milliseconds, and `run_seconds` the agent's run time.
    """

    def __init__(
        self,
        handler: str,
        write: Callable[[str], None],
        *,
        run_id: str,
        role: str,
        host: str,
        backend: str,
        entry_point: str,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        check_handler(handler)
        self._began = self._waiting_since = time.monotonic()
        self._write = write
        self.enabled = handler == "console" and _level(environ) <= logging.INFO
        self._constant = {"run_id": run_id, "role": role, "hostname": host, "rdzv_backend": backend}
        self._entry_point = entry_point

    @property
    def host(self) -> str:
        """The host name shown to users."""
        return self._constant["hostname"]

    @host.setter
    def host(self, name: str) -> None:
        self._constant["hostname"] = name

    @property
    def seconds(self) -> float:
        """Seconds since the agent's start."""
        return time.monotonic() - self._began

    # ------------------------------------------------------------ the lifecycle of ranks

    def round_began(self, start: Start) -> None:
        waited = time.monotonic() - self._waiting_since
        self.write_rendezvous(start, waited, time.time_ns() // 10**6)

    def ranks_stopping(self) -> None:
        """No-op: torch's agent has no such event."""

    def ranks_gone(self, *, done: bool) -> None:
        """Start to measure the wait for the next round, unless the ranks are done."""
        if not done:
            self._waiting_since = time.monotonic()

    def close(self) -> None:
        """No-op: the last events are written at the very end (`shutdown.write_last_events`)."""

    # ------------------------------------------------------------ the events

    def write_rendezvous(self, start: Start, waited_seconds: float, now_ms: int) -> None:
        """Write that a round has formed, for which this node has waited."""
        self._write_event("RENDEZVOUS", "AGENT", start, now_ms, duration_ms=waited_seconds * 1000)
        self._write_event("ASSIGN_WORKER_RANKS", "AGENT", start, now_ms, duration_ms=0.0)

    def write_started(self, start: Start, pids: Mapping[int, int], now_ms: int) -> None:
        """Write that the local ranks of a round have started; pids by local rank."""
        for local_rank, pid in sorted(pids.items()):
            self._worker("START", start, local_rank, pid, now_ms)

    def write_ended(
        self,
        start: Start | None,
        pids: Mapping[int, int],
        failures: Iterable[Failure],
        *,
        succeeded: bool,
        run_seconds: float,
        now_ms: int,
        agent_failure: str = "",
    ) -> None:
        """Write that the job has ended for this node. `failures`: those of its own ranks; `start`:
        None if no round has formed.

        As under torchrun, the agent "succeeded" if it has run its ranks to their end, whatever
        their result. It failed (`agent_failure`: the reason) on a signal, a lost master or too few
        nodes; then no events about ranks are written.
        """
        failed = {failure.local_rank: failure for failure in failures}
        if start is not None and not agent_failure:
            for local_rank, pid in sorted(pids.items()):
                failure = failed.get(local_rank)
                state = "SUCCEEDED" if succeeded else "FAILED" if failure else "TERMINATED"
                self._worker(state, start, local_rank, pid, now_ms, failure, run_seconds)
        state, why = ("FAILED", agent_failure) if agent_failure else ("SUCCEEDED", None)
        self._write_event(
            state, "AGENT", start, now_ms, total_run_time=int(run_seconds), raw_error=why
        )

    def _worker(
        self,
        state: str,
        start: Start,
        local_rank: int,
        pid: int,
        now_ms: int,
        failure: Failure | None = None,
        run_seconds: float = 0.0,
    ) -> None:
        more = {
            "local_rank": [local_rank],
            "role_rank": [start.role_first_rank + local_rank],
            "role_world_size": [start.role_world_size],
            "exit_code": [failure.exitcode if failure else None],
            "worker_pid": [failure.pid if failure else None],
        }
        raw_error = None
        if failure is not None and self.enabled:
            data = read_error_file(failure.error_file).data
            raw_error = json.dumps(data if data is not None else {"message": "<NONE>"})
        self._write_event(
            state, "WORKER", start, now_ms, more, raw_error=raw_error,
            global_rank=start.first_rank + local_rank, worker_id=str(pid),
            total_run_time=int(run_seconds),
        )  # fmt: skip

    def _write_event(
        self,
        state: str,
        source: str,
        start: Start | None,
        now_ms: int,
        more: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """`fields` override default metadata; `more` goes into the nested metadata."""
        if not self.enabled:
            return
        inner = {
            "group_world_size": start.group_world_size if start else None,
            "entry_point": self._entry_point,
            **(more or {}),
        }
        metadata = {
            "run_id": self._constant["run_id"],
            "global_rank": None,
            "group_rank": start.group_rank if start else None,
            "worker_id": None,
            "role": self._constant["role"],
            "hostname": self._constant["hostname"],
            "state": state,
            "total_run_time": 0,
            "rdzv_backend": self._constant["rdzv_backend"],
            "raw_error": None,
            "metadata": json.dumps(inner),
            "agent_restarts": start.info.restart_count if start else 0,
            "duration_ms": None,
            **fields,
        }
        event = {
            "name": f"torchelastic.worker.status.{state}",
            "source": source,
            "timestamp": now_ms,
            "metadata": metadata,
        }
        self._write(json.dumps(event) + "\n")


def _level(environ: Mapping[str, str]) -> int:
    """The LOGLEVEL, which torch's events obey too; INFO if it is unset or invalid."""
    word = environ.get(env.LOGLEVEL, "").strip().upper()
    if word.isdecimal():
        return int(word)
    level = logging.getLevelNamesMapping().get(word)
    return logging.INFO if level is None else level
