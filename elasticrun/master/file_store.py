"""The master's record on its own disk: one file with its facts, replaced as a whole.

It is loaded, never replayed (decision 012). A problem with the file costs the record, never the
job: a file that is damaged, of another version, or on which masters keep failing is set aside with
a log line, and the round is restored from the agents.

One thread does all disk I/O. At most one write is in progress and one is pending, the newest: each
contains all facts, so those in between are skipped. Each version is written beside the last one,
synced, and renamed over it, so a crash or power loss leaves one of the two intact.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from elasticrun.core.persisted import Facts, aged
from elasticrun.host.runs.layout import replace_file
from elasticrun.host.system.processes import boot_id
from elasticrun.host.system.sandbox import start_thread
from elasticrun.wire.types import dumps, loads

FILE: Final = "record"
"""Name of the record's file: a line with version and checksum, then a line of JSON."""

VERSION: Final = 2
"""The format version; a file of another version is set aside."""

ASIDE: Final = ".aside"
"""Suffix of a record that is set aside; only the last one is kept."""

MAX_BYTES: Final = 64 * 1024 * 1024
"""A larger file counts as damaged; the record of 10,000 nodes is about 2 MB."""

MAX_CRASHES: Final = 3
CRASH_WINDOW: Final = 60.0
"""If MAX_CRASHES masters fail on a record within CRASH_WINDOW seconds, it is discarded."""

SLOW: Final = 2.0
"""Seconds after which an unfinished write is logged."""

GIVEN_UP: Final = 30.0
"""Seconds after which an unfinished write is given up, because nodes are waiting: the master
continues without a record."""

LOAD_LIMIT: Final = 5.0
"""Seconds for loading the record, while agents wait for this master."""

logger = logging.getLogger("elasticrun")

T = TypeVar("T")


class Damaged(Exception):
    """A record that cannot be loaded; the text says why."""


class FileStore:
    """One job's record in one folder; a `FactStore`. Create it in a running loop."""

    def __init__(self, folder: Path, *, now: Callable[[], float] | None = None) -> None:
        """`now`: seconds since boot, including suspension (tests replace it)."""
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        """Never done: the folder is locked, so no other master can lead with it."""
        self.term = 0
        self._disk = _Disk(folder, now or _since_boot)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = start_thread(self._run, "record")
        self._has_record = True
        self._newest: Facts | None = None
        self._waiting: list[Callable[[], None]] = []  # until the newest is written
        self._in_progress: list[Callable[[], None]] = []  # until the current write is done
        self._slow_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ FactStore

    def leads(self) -> bool:
        """See `FactStore.leads`."""
        return True

    async def load(self) -> Facts | None:
        """See `FactStore.load`. A damaged record is set aside; if the disk fails, the master
        continues without a record. Both are logged, and None is returned."""
        try:
            return await asyncio.wait_for(self._do(self._disk.open), LOAD_LIMIT)
        except TimeoutError:
            self._give_up(f"its disk has not answered for {LOAD_LIMIT:g} s")
        except Exception as wrong:
            self._give_up(str(wrong) or repr(wrong))
        return None

    def write(self, facts: Facts, done: Callable[[], None]) -> None:
        """See `FactStore.write`. If the record has failed, `done` is called at once."""
        if not self._has_record:
            done()
            return
        self._newest = facts
        self._waiting.append(done)
        if not self._in_progress:
            self._start_write(facts)

    def term_seen(self, term: int) -> None:
        """See `FactStore.term_seen`. No-op: this store does not assign terms."""

    async def close(self) -> None:
        """See `FactStore.close`. The file stays, so that a later master can tell nodes the
        outcome."""
        await self._run_last(self._disk.close)

    # ------------------------------------------------------------ a state on which masters fail

    async def crashed(self) -> None:
        """See `FactStore.crashed`. Also closes the store."""
        await self._run_last(self._disk.crashed)

    def discard(self, why: str) -> None:
        """Set the loaded record aside and start an empty one."""
        logger.warning("the record of this job is set aside: %s", why)
        self._queue.put(self._disk.start_empty)

    # ------------------------------------------------------------ to and from the thread

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def _do(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run the job in the thread; returns its result as a future."""
        ended: Future[T] = Future()

        def work() -> None:
            if ended.set_running_or_notify_cancel():
                try:
                    ended.set_result(job())
                except Exception as wrong:
                    ended.set_exception(wrong)

        self._queue.put(work)
        return asyncio.wrap_future(ended)

    def _start_write(self, facts: Facts) -> None:
        done = self._in_progress = self._waiting
        self._waiting = []
        self._slow_timer = self._loop.call_later(SLOW, self._on_slow)

        def save() -> None:
            try:
                self._disk.save(facts)
            except Exception:
                self._disk.set_aside()
                raise

        self._do(save).add_done_callback(partial(self._on_saved, done))

    def _on_saved(self, done: list[Callable[[], None]], saved: asyncio.Future[None]) -> None:
        wrong = saved.exception()
        if self._in_progress is not done:
            return  # this write was given up
        self._cancel_slow_timer()
        self._in_progress = []
        if wrong is not None:
            self._give_up(str(wrong) or repr(wrong))
        elif self._waiting and self._newest is not None:
            self._start_write(self._newest)
        for call in done:
            call()

    def _on_slow(self) -> None:
        logger.warning(
            "writes to the record of this job are slow: orders have waited for %g s", SLOW
        )
        self._slow_timer = self._loop.call_later(
            GIVEN_UP - SLOW, self._give_up, f"a write took longer than {GIVEN_UP:g} s"
        )

    def _cancel_slow_timer(self) -> None:
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None

    def _give_up(self, why: str) -> None:
        """Continue without a record: release everything that waits for it."""
        self._has_record = False
        self._cancel_slow_timer()
        logger.warning(
            "this job no longer has a record: %s; if its master dies, the agents restore the "
            "round, but not the list of excluded nodes",
            why,
        )
        self._queue.put(self._disk.set_aside)  # runs when the disk answers again
        waiting = self._in_progress + self._waiting
        self._in_progress, self._waiting = [], []
        for call in waiting:
            call()

    async def _run_last(self, job: Callable[[], None]) -> None:
        ended = self._do(job)
        self._queue.put(None)
        with contextlib.suppress(Exception):  # no node needs the result any longer
            await asyncio.wait_for(asyncio.shield(ended), 1.0)  # a slow disk may still do it


# ---------------------------------------------------------------- in the thread


class _Content(msgspec.Struct, frozen=True):
    """The content of the file."""

    boot: str  # boot id of the host when it was written
    at: float  # time of writing, in seconds since that boot
    facts: Facts | None  # None: the record is empty
    crashes: tuple[float, ...] = ()  # when masters failed on these facts


@dataclass
class _Disk:
    """The file; every method blocks and runs in the store's thread."""

    folder: Path
    now: Callable[[], float]
    _content: _Content | None = None  # the file's content; None: not open

    @property
    def path(self) -> Path:
        return self.folder / FILE

    def open(self) -> Facts | None:
        """The facts in the file; None if there are none. An unusable file is set aside. Raises
        OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for draft in self.folder.glob(f".{FILE}.*"):  # left by a master killed while writing
            draft.unlink(missing_ok=True)
        try:
            return self._load()
        except Damaged as wrong:
            logger.warning("the record %s is set aside: %s", self.path, wrong)
            self.start_empty()
            return None

    def start_empty(self) -> None:
        """Set the file aside and start an empty record."""
        self.set_aside()
        self._content = _Content(boot_id(), self.now(), None)

    def set_aside(self) -> None:
        """Rename the file, so that no later master uses its facts."""
        self.close()
        try:
            os.replace(self.path, f"{self.path}{ASIDE}")
        except FileNotFoundError:
            pass
        except OSError as wrong:
            logger.warning("%s cannot be set aside: %s", self.path, wrong.strerror or wrong)

    def save(self, facts: Facts) -> None:
        """Replace the file with these facts. Raises OSError."""
        if self._content is None:
            raise OSError("it is not open")
        crashes = self._recent(self._content)
        self._write(_Content(boot_id(), self.now(), facts, crashes))

    def crashed(self) -> None:
        """Count this master as failed on this state, and close. Raises OSError."""
        if (content := self._content) is not None:
            # `at` stays the time of the facts, unless the host has rebooted since.
            at = content.at if content.boot == boot_id() else self.now()
            crashes = (*self._recent(content), self.now())
            self._write(_Content(boot_id(), at, content.facts, crashes))
        self.close()

    def close(self) -> None:
        """Close; may be called when not open."""
        self._content = None

    def _write(self, content: _Content) -> None:
        body = dumps(content).encode()
        head = b"elasticrun record %d %08x" % (VERSION, zlib.crc32(body))
        try:
            replace_file(self.path, b"%s\n%s\n" % (head, body), sync=True)
        except FileNotFoundError:
            raise OSError(f"{self.folder} has been removed") from None
        self._content = content

    def _load(self) -> Facts | None:
        try:
            with open(self.path, "rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            self._content = _Content(boot_id(), self.now(), None)
            return None
        content = self._content = _parsed(data)
        crashes = len(self._recent(content))
        if crashes >= MAX_CRASHES:
            raise Damaged(f"{crashes} masters have failed on it within {CRASH_WINDOW:g} s")
        facts = content.facts
        if facts is None or content.boot != boot_id():
            return facts
        return aged(facts, max(0.0, self.now() - content.at))

    def _recent(self, content: _Content) -> tuple[float, ...]:
        """The crashes within CRASH_WINDOW. Those before a reboot do not count: their times are not
        comparable."""
        if content.boot != boot_id():
            return ()
        return tuple(at for at in content.crashes if at >= self.now() - CRASH_WINDOW)


def _parsed(data: bytes) -> _Content:
    """Parse the file's bytes. Raises Damaged."""
    head, _, body = data.partition(b"\n")
    words = head.split(b" ")
    if words[:2] != [b"elasticrun", b"record"] or len(words) != 4:
        raise Damaged("it is damaged (it has no header)")
    if len(data) > MAX_BYTES:
        raise Damaged(f"it is damaged (it is longer than {MAX_BYTES} bytes)")
    if words[2] != b"%d" % VERSION:
        version = words[2].decode(errors="replace")
        raise Damaged(f"it has version {version}, but this elasticrun writes {VERSION}")
    if words[3] != b"%08x" % zlib.crc32(body.removesuffix(b"\n")):
        raise Damaged("it is damaged (its checksum differs)")
    try:
        return loads(body, _Content)
    except (ValueError, TypeError) as wrong:
        raise Damaged(f"its facts have another version ({wrong})") from None


def _since_boot() -> float:
    """Seconds since boot: a clock that all masters of this host share, and that nobody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
