"""Tells another program what happens to the job: one JSON on its stdin, or by POST.

    {"event": "incident", "job": "run17", "name": "run17", "time": 1767225600.0, "incident": {...}}
    {"event": "hang", "job": ..., "name": ..., "time": ..., "over": false, "verdict": {...}}
    {"event": "slow", "job": ..., "name": ..., "time": ..., "node": "a", "sentence": "..."}
    {"event": "end", "job": ..., "name": ..., "time": 1767225661.5, "exit_code": 0, "reason": "..."}

Incidents and verdicts are told when they begin and when they are over. Nothing waits for it but the
end of the master, some seconds; a program that fails is tried again TRIES - 1 times, and told of
once.
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
"""Seconds that one try may take."""

TRIES: Final = 3
"""How often one event is told, until it is taken."""

PAUSE: Final = 1.0
"""Seconds between two tries."""

MAX_QUEUED: Final = 100
"""Events that wait; one more is dropped."""

logger = logging.getLogger("elasticrun")


def is_address(target: str) -> bool:
    """Whether events go to a URL rather than to a command."""
    return target.startswith(("http://", "https://"))


class Notifier:
    """Tells `target`, a URL or a command of the shell, in a thread."""

    def __init__(self, target: str, job: str, name: str = "") -> None:
        """`job`: its id; `name`: by which people know it."""
        self._target = target
        self._about = {"job": job, "name": name or job}
        self._queue: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED)
        self._closing = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="elasticrun-events", daemon=True)
        self._begun = False

    def put(self, event: str, **body: Any) -> None:
        """Tell of it; returns at once."""
        data = {"event": event, **self._about, "time": time.time(), **body}
        with contextlib.suppress(queue.Full, RuntimeError):  # RuntimeError: no thread can be had
            if not self._begun:
                self._thread.start()
                self._begun = True
            self._queue.put_nowait(msgspec.json.encode(data))

    def close(self, limit: float) -> None:
        """Wait `limit` seconds at most for what is to be told yet, without another try."""
        self._closing.set()
        if self._begun:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(limit)

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            for tried in range(1, TRIES + 1):
                why = self._tell(data)
                if not why or (tried < TRIES and self._closing.wait(PAUSE)):
                    break
            if why and not self._failed:
                self._failed = True
                logger.warning("--on-event: an event could not be told: %s", why)

    def _tell(self, data: bytes) -> str:
        """Why it was not taken; "" if it was."""
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
        _, said = process.communicate(data, LIMIT)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"the command took longer than {LIMIT:g} s"
    last = said.decode(errors="replace").strip().splitlines()[-1:]
    code = process.returncode
    return f"the command ended with {code}: {' '.join(last)[:200]}" if code else ""
