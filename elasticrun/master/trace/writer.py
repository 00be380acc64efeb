"""Writes the trace: all input and output of the state machine, for `elasticrun replay`.

The format is JSON lines in a ring of two files, `trace` and the older `trace.1`. The job does not
depend on it: a thread writes, its queue is bounded, and dropped events are counted in the trace. It
contains no unauthenticated session and no secret.

    {"trace": 3, "version": ..., "job": ..., "term": ..., "spec": ..., "facts": ...}   a head
    {"t": 12.5, "e": {"Heard": ...}, "mint": ["0badcafe"], "do": ["info: ...", "tell 1: ..."]}
    {"beats": [[12.6, 1, 3], [12.7, 2, 3]]}                  time, session, number of the heartbeat
    {"dropped": 17}                                          number of events missing here

A file that starts in the middle of a master's run has `"midst": true` in its head, with the newest
facts and every open stream: a replay starts there as a successor of that master would.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elasticrun import __version__
from elasticrun.core.events import Attached, Detached, Heard, JobEffect, JobEvent, Record
from elasticrun.core.persisted import Facts
from elasticrun.host.system.sandbox import start_thread
from elasticrun.master.trace.words import TRACE_VERSION, effect_in_words, event_to_plain
from elasticrun.wire.messages import Beat, JobSpec
from elasticrun.wire.types import mint_nonce, plain

FILE: Final = "trace"
OLDER: Final = ".1"
"""Suffix of the older file of the ring."""

RING_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of both files together; less on a small disk, see SPACE_FRACTION."""

SPACE_FRACTION: Final = 16
"""The ring uses at most 1/SPACE_FRACTION of the space that is free at its start, because the folder
may be in memory."""

MIN_RING_BYTES: Final = 256 * 1024
"""Minimum bytes of the ring; if SPACE_FRACTION permits less, no trace is written."""

MAX_QUEUED: Final = 20_000
"""Maximum number of queued steps; further ones are dropped and counted."""

BEATS_PER_LINE: Final = 512
BEATS_WAIT: Final = 1.0
"""Heartbeats are batched, because most events are heartbeats. A batch goes to the thread before the
next other event, when it has BEATS_PER_LINE, or with the first heartbeat BEATS_WAIT seconds after
its first one."""

logger = logging.getLogger("elasticrun")


@dataclass(frozen=True, slots=True)
class MasterStart:
    """The initial state of a master, for the head of its part of the trace."""

    job_id: str
    term: int
    spec: JobSpec | None
    facts: Facts | None


@dataclass(frozen=True, slots=True)
class _Step:
    event: JobEvent
    now: float
    minted: tuple[str, ...]
    effects: tuple[JobEffect, ...]
    raised: str = ""


_Beats = list[tuple[float, int, int]]


class TraceWriter:
    """Records the state machine's input and output in a thread. Also creates its nonces, which are
    part of the input."""

    def __init__(
        self,
        folder: Path,
        start: MasterStart,
        *,
        ring: int = RING_BYTES,
        mint: Callable[[], str] = mint_nonce,
        now: float | None = None,
    ) -> None:
        """`now`: the loop's time, if its clock is not `time.monotonic`."""
        self._start = start
        self._mint = mint
        self._minted: list[str] = []
        self._beats: _Beats = []
        self._dropped = 0
        self._queue: queue.SimpleQueue[_Step | _Beats | int | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._ring = _Ring(folder, start, ring, time.monotonic() if now is None else now)
        start_thread(self._run, "trace")

    # ------------------------------------------------------------ the loop's side

    def mint(self) -> str:
        """Create a nonce for the state machine."""
        nonce = self._mint()
        self._minted.append(nonce)
        return nonce

    def record(self, event: JobEvent, now: float, effects: list[JobEffect]) -> None:
        """Record an event and its effects; never blocks. At MAX_QUEUED the event is dropped and
        counted."""
        if not effects and isinstance(event, Heard) and isinstance(event.report, Beat):
            self._beats.append((now, event.session, event.report.number))
            if len(self._beats) >= BEATS_PER_LINE or now - self._beats[0][0] >= BEATS_WAIT:
                self._enqueue(None)
            return
        self._enqueue(_Step(event, now, self._nonces(), tuple(effects)))

    def record_fault(self, event: JobEvent, now: float, fault: Exception) -> None:
        """Record an event at which the state machine raised."""
        what = f"{type(fault).__name__}: {fault}"
        self._enqueue(_Step(event, now, self._nonces(), (), what))

    def close(self, limit: float) -> None:
        """Write what is queued and stop; blocks for `limit` seconds at most."""
        self._enqueue(None)
        self._queue.put(None)
        self._ended.wait(limit)

    def _nonces(self) -> tuple[str, ...]:
        minted, self._minted = tuple(self._minted), []
        return minted

    def _enqueue(self, step: _Step | None) -> None:
        """Queue the batched heartbeats, then the step; if the queue is full, count them as
        dropped."""
        beats, self._beats = self._beats, []
        if self._queue.qsize() >= MAX_QUEUED:
            self._dropped += len(beats) + (step is not None)
            return
        if self._dropped:
            self._queue.put(self._dropped)
            self._dropped = 0
        if beats:
            self._queue.put(beats)
        if step is not None:
            self._queue.put(step)

    # ------------------------------------------------------------ the thread's side

    def _run(self) -> None:
        try:
            self._ring.open()
            while (item := self._queue.get()) is not None:
                self._ring.write(item)
                if self._queue.empty():
                    self._ring.flush()
            self._ring.close()
        except Exception as wrong:  # the job does not depend on it
            logger.warning("tracing of this job stopped: %s", wrong)
            self._ring.abandon()
            while self._queue.get() is not None:
                pass
        finally:
            self._ended.set()


class _Ring:
    """The two files; used by the thread only. Raises OSError if the disk fails."""

    def __init__(self, folder: Path, start: MasterStart, most: int, began: float) -> None:
        self._path = folder / FILE
        self._older = folder / (FILE + OLDER)
        self._start = start
        self._most = most
        self._began = began
        self._file: Any = None
        self._size = 0
        self._facts = start.facts
        self._facts_at = 0.0
        self._streams: dict[int, Attached] = {}
        self._midst = False

    def open(self) -> None:
        """Open the file, to append to what earlier masters wrote. Raises OSError if the disk is
        nearly full."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        room = os.statvfs(self._path.parent)
        self._most = min(self._most, room.f_bavail * room.f_frsize // SPACE_FRACTION)
        if self._most < MIN_RING_BYTES:
            raise OSError(f"{self._path.parent} is full")
        self._open()
        if os.fstat(self._file.fileno()).st_size:
            self._put("")  # a killed master may have left an unfinished line
        self._head(self._began)

    def write(self, item: _Step | _Beats | int) -> None:
        """Write one line; begin a new file when this one is full."""
        if isinstance(item, int):
            self._put(json.dumps({"dropped": item}))
        elif isinstance(item, list):
            self._put(json.dumps({"beats": item}, separators=(",", ":")))
        else:
            self._put(json.dumps(self._line(item), separators=(",", ":")))
            self._track_state(item)
            if self._size > self._most // 2:
                self._rotate(item.now)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        """Close after a failure; buffered data is lost."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _open(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._file = open(fd, "a", encoding="utf-8")  # noqa: SIM115
        self._size = os.fstat(fd).st_size

    def _rotate(self, now: float) -> None:
        self._file.close()
        os.replace(self._path, self._older)
        self._open()
        self._midst = True
        self._head(now)
        self._size = 0  # without the head, which grows with the job

    def _put(self, line: str) -> None:
        self._size += self._file.write(line + "\n")

    def _line(self, step: _Step) -> dict[str, Any]:
        line: dict[str, Any] = {"t": step.now, "e": event_to_plain(step.event)}
        if step.minted:
            line["mint"] = step.minted
        if step.raised:
            line["raised"] = step.raised
        elif step.effects:
            line["do"] = [effect_in_words(effect) for effect in step.effects]
        return line

    def _track_state(self, step: _Step) -> None:
        if isinstance(step.event, Attached):
            self._streams[step.event.session] = step.event
        elif isinstance(step.event, Detached):
            self._streams.pop(step.event.session, None)
        for effect in step.effects:
            if isinstance(effect, Record):
                self._facts, self._facts_at = effect.facts, step.now

    def _head(self, now: float) -> None:
        start = self._start
        head: dict[str, Any] = {
            "trace": TRACE_VERSION,
            "version": __version__,
            "job": start.job_id,
            "term": start.term,
            "spec": plain(start.spec),
            "facts": plain(self._facts),
            "t": now,
            "wall": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        }
        if self._midst:
            head["midst"] = True
            head["facts_age"] = now - self._facts_at if self._facts_at else 0.0
            head["streams"] = [event_to_plain(event) for event in self._streams.values()]
        self._put(json.dumps(head, separators=(",", ":")))
