"""The master's record on its own disk: one file with its facts, replaced as a whole.

Loaded, never replayed (decision 012). Whatever is wrong with it costs the record, never the job: a
file that is damaged, of another version, or on which masters keep failing is set aside under
another name with one line, and the agents bring the round back.

One thread does all that touches the disk. At most one write is on its way and one waits, the
newest: facts are complete, so those in between are worth nothing. Each version is written beside
the last one, synchronized, and renamed over it: a crash or a power cut leaves one of the two whole.
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
"""A line with version and checksum, then a line of JSON."""

VERSION: Final = 2
"""Of the file's format; a file of another version is set aside."""

ASIDE: Final = ".aside"
"""Suffix of a record that is set aside; only the last one is kept."""

MAX_BYTES: Final = 64 * 1024 * 1024
"""A record that is larger is damaged: that of 10,000 nodes has 2 MB."""

MAX_CRASHES: Final = 3
CRASH_WINDOW: Final = 60.0
"""So many masters that failed on one state within so many seconds: the state is to blame."""

SLOW: Final = 2.0
"""Seconds after which a write that has not come back is told."""

GIVEN_UP: Final = 30.0
"""Seconds after which the master goes on without a record: the disk hangs, and nodes wait."""

LOAD_LIMIT: Final = 5.0
"""Seconds that opening and loading may take; agents wait for this master meanwhile."""

logger = logging.getLogger("elasticrun")

T = TypeVar("T")


class Damaged(Exception):
    """A record that cannot be loaded; the text says why."""


class FileStore:
    """One job's record in one folder; a `FactStore`. To be made in a running loop."""

    def __init__(self, folder: Path, *, now: Callable[[], float] | None = None) -> None:
        """`now`: seconds since this host was started, asleep or not (for tests)."""
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        """Never done: nobody else can lead with this folder."""
        self.term = 0
        self._disk = _Disk(folder, now or _since_boot)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = start_thread(self._run, "record")
        self._works = True
        self._newest: Facts | None = None
        self._waiting: list[Callable[[], None]] = []  # for the newest to be written
        self._on_its_way: list[Callable[[], None]] = []  # for what the thread is writing
        self._watch: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ the promise of a FactStore

    def leads(self) -> bool:
        """See `FactStore.leads`."""
        return True

    async def load(self) -> Facts | None:
        """See `FactStore.load`. A record that cannot be used is set aside, with one line."""
        try:
            return await asyncio.wait_for(self._do(self._disk.open), LOAD_LIMIT)
        except TimeoutError:
            self._go_without(f"its disk has not answered for {LOAD_LIMIT:g} s")
        except Exception as wrong:
            self._go_without(str(wrong) or repr(wrong))
        return None

    def write(self, facts: Facts, done: Callable[[], None]) -> None:
        """See `FactStore.write`. Where the record has failed, `done` is called at once."""
        if not self._works:
            done()
            return
        self._newest = facts
        self._waiting.append(done)
        if not self._on_its_way:
            self._send(facts)

    def heard_of(self, term: int) -> None:
        """See `FactStore.heard_of`: terms are not from here."""

    async def close(self) -> None:
        """See `FactStore.close`; what was written stays, for those who arrive late."""
        await self._last_job(self._disk.close)

    # ------------------------------------------------------------ when the state is to blame

    async def crashed(self) -> None:
        """This master ends because its brain failed on this state: the next one must know."""
        await self._last_job(self._disk.crashed)

    def set_aside(self, why: str) -> None:
        """The facts that were loaded are of no use; begin an empty record."""
        logger.warning("the record of this job is set aside: %s", why)
        self._jobs.put(self._disk.begin_anew)

    # ------------------------------------------------------------ to and from the thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _do(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Have the thread do it, and hear what came of that."""
        ended: Future[T] = Future()

        def work() -> None:
            if ended.set_running_or_notify_cancel():
                try:
                    ended.set_result(job())
                except Exception as wrong:
                    ended.set_exception(wrong)

        self._jobs.put(work)
        return asyncio.wrap_future(ended)

    def _send(self, facts: Facts) -> None:
        done = self._on_its_way = self._waiting
        self._waiting = []
        self._watch = self._loop.call_later(SLOW, self._slow)

        def save() -> None:
            try:
                self._disk.save(facts)
            except Exception:
                self._disk.put_aside()
                raise

        self._do(save).add_done_callback(partial(self._came_back, done))

    def _came_back(self, done: list[Callable[[], None]], saved: asyncio.Future[None]) -> None:
        wrong = saved.exception()
        if self._on_its_way is not done:
            return  # it had been given up
        self._unwatch()
        self._on_its_way = []
        if wrong is not None:
            self._go_without(str(wrong) or repr(wrong))
        elif self._waiting and self._newest is not None:
            self._send(self._newest)
        for call in done:
            call()

    def _slow(self) -> None:
        logger.warning("the record of this job is slow: orders wait for it since %g s", SLOW)
        self._watch = self._loop.call_later(
            GIVEN_UP - SLOW, self._go_without, f"a write has taken {GIVEN_UP:g} s"
        )

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _go_without(self, why: str) -> None:
        """No record from now on: what waits for one passes."""
        self._works = False
        self._unwatch()
        logger.warning(
            "this job has no record any more: %s; should its master die, the agents bring the "
            "round back, but not who was left out",
            why,
        )
        self._jobs.put(self._disk.put_aside)  # comes to it when the disk answers again
        waiting = self._on_its_way + self._waiting
        self._on_its_way, self._waiting = [], []
        for call in waiting:
            call()

    async def _last_job(self, job: Callable[[], None]) -> None:
        ended = self._do(job)
        self._jobs.put(None)
        with contextlib.suppress(Exception):  # there is nobody left whom it would matter to
            await asyncio.wait_for(asyncio.shield(ended), 1.0)  # a slow disk may still come to it


# ---------------------------------------------------------------- in the thread


class _Content(msgspec.Struct, frozen=True):
    """What the file holds."""

    boot: str  # of the host when it was written
    at: float  # then, in seconds since that boot
    facts: Facts | None  # None: only crashes are known
    crashes: tuple[float, ...] = ()  # in seconds since that boot: masters failed on these facts


@dataclass
class _Disk:
    """The file; every method blocks and belongs to the store's thread."""

    folder: Path
    now: Callable[[], float]
    _content: _Content | None = None  # as it stands in the file; None: it is not open

    @property
    def path(self) -> Path:
        return self.folder / FILE

    def open(self) -> Facts | None:
        """The facts in the file, if there are any that can be used. OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for draft in self.folder.glob(f".{FILE}.*"):  # of a master that was killed as it wrote
            draft.unlink(missing_ok=True)
        try:
            return self._load()
        except Damaged as wrong:
            logger.warning("the record %s is set aside: %s", self.path, wrong)
            self.begin_anew()
            return None

    def begin_anew(self) -> None:
        """Set the file aside and begin an empty record."""
        self.put_aside()
        self._content = _Content(boot_id(), self.now(), None)

    def put_aside(self) -> None:
        """Rename the file, so that no later master takes its facts for current."""
        self.close()
        try:
            os.replace(self.path, f"{self.path}{ASIDE}")
        except FileNotFoundError:
            pass
        except OSError as wrong:
            logger.warning("%s cannot be set aside: %s", self.path, wrong.strerror or wrong)

    def save(self, facts: Facts) -> None:
        """Replace the file by these facts. OSError."""
        if self._content is None:
            raise OSError("it is not open")
        crashes = self._recent(self._content)
        self._write(_Content(boot_id(), self.now(), facts, crashes))

    def crashed(self) -> None:
        """Count this master among those that failed on this state, and end. OSError."""
        if (content := self._content) is not None:
            # `at` stays the moment of the facts, unless the host has been started anew since.
            at = content.at if content.boot == boot_id() else self.now()
            crashes = (*self._recent(content), self.now())
            self._write(_Content(boot_id(), at, content.facts, crashes))
        self.close()

    def close(self) -> None:
        """End; harmless when it is not open."""
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
        """The crashes that count. Clocks of another boot say nothing."""
        if content.boot != boot_id():
            return ()
        return tuple(at for at in content.crashes if at >= self.now() - CRASH_WINDOW)


def _parsed(data: bytes) -> _Content:
    """Raises Damaged."""
    head, _, body = data.partition(b"\n")
    words = head.split(b" ")
    if words[:2] != [b"elasticrun", b"record"] or len(words) != 4 or len(data) > MAX_BYTES:
        raise Damaged("it is damaged (it has no header)")
    if words[2] != b"%d" % VERSION:
        version = words[2].decode(errors="replace")
        raise Damaged(f"it is of version {version}, and this elasticrun writes {VERSION}")
    if words[3] != b"%08x" % zlib.crc32(body.removesuffix(b"\n")):
        raise Damaged("it is damaged (its checksum differs)")
    try:
        return loads(body, _Content)
    except (ValueError, TypeError) as wrong:
        raise Damaged(f"its facts are of another version ({wrong})") from None


def _since_boot() -> float:
    """Seconds since this host was started: one clock for all its masters, whatever is set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
