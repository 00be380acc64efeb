"""Sends the job's events to another program: one JSON object as a line on its stdin, or by POST.

    {"event": "incident", "job": "run17", "name": "run17", "time": 1767225600.0, "incident": {...}}
    {"event": "hang", "job": ..., "name": ..., "time": ..., "over": false, "verdict": {...}}
    {"event": "slow", "job": ..., "name": ..., "time": ..., "node": "a", "sentence": "..."}
    {"event": "end", "job": ..., "name": ..., "time": 1767225661.5, "exit_code": 0, "reason": "..."}

Incidents and verdicts are sent when they start and again when they are over. Only the master's exit
waits for this (`outward.END_LIMIT`). A failed delivery is retried TRIES - 1 times; only the first
event that was not delivered is logged.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.request
from typing import Any, Final

import msgspec

LIMIT: Final = 10.0
"""Seconds for one try."""

TRIES: Final = 3
"""Maximum number of tries per event."""

PAUSE: Final = 1.0
"""Seconds between two tries."""

MAX_QUEUED: Final = 100
"""Maximum number of queued events; further ones are dropped."""

logger = logging.getLogger("elasticrun")


def is_address(target: str) -> bool:
    """Whether events go to a URL instead of a command."""
    return target.startswith(("http://", "https://"))


class Notifier:
    """Sends events to `target`, a URL or a shell command, in a thread."""

    def __init__(self, target: str, job: str, name: str = "") -> None:
        """`job`: the job's id; `name`: its name for people, "" if it has only its id."""
        self._target = target
        self._about = {"job": job, "name": name or job}
        self._queue: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED)
        self._closing = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="elasticrun-events", daemon=True)
        self._started = False

    def put(self, event: str, **body: Any) -> None:
        """Queue an event, or drop it if MAX_QUEUED are queued; never blocks."""
        data = {"event": event, **self._about, "time": time.time(), **body}
        with contextlib.suppress(queue.Full, RuntimeError):  # RuntimeError: no thread can start
            if not self._started:
                self._thread.start()
                self._started = True
            self._queue.put_nowait(msgspec.json.encode(data))

    def close(self, limit: float) -> None:
        """Wait for queued events, `limit` seconds at most, without retries."""
        self._closing.set()
        if self._started:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(limit)

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            for tried in range(1, TRIES + 1):
                why = self._deliver(data)
                if not why or (tried < TRIES and self._closing.wait(PAUSE)):
                    break
            if why and not self._failed:
                self._failed = True
                logger.warning("--on-event: an event was not delivered: %s", why)

    def _deliver(self, data: bytes) -> str:
        """Why the delivery failed; "" if it succeeded."""
        return _post(self._target, data) if is_address(self._target) else _run(self._target, data)


def _post(url: str, data: bytes) -> str:
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT):
            return ""
    except (OSError, ValueError, http.client.HTTPException) as wrong:
        return f"{type(wrong).__name__}: {wrong}"


def _run(command: str, data: bytes) -> str:
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as wrong:
        return str(wrong)
    try:
        _, errors = process.communicate(data + b"\n", LIMIT)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"the command took longer than {LIMIT:g} s"
    last = errors.decode(errors="replace").strip().splitlines()[-1:]
    code = process.returncode
    return f"the command ended with {code}: {' '.join(last)[:200]}" if code else ""
