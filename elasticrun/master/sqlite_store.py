"""The master's record on its own disk: `state.sqlite`, facts only, one row a field.

Loaded, never replayed (decision 012). Whatever is wrong with it costs the record, never the job: a
file that is damaged, of another version, or on which masters keep failing is set aside under
another name with one line, and the agents bring the round back.

One thread does all that touches the disk. At most one write is on its way and one waits, the
newest: facts are complete, so those in between are worth nothing. synchronous=NORMAL: a commit
survives the death of the process without waiting for the disk; a power cut may lose the last ones,
and then the agents report a higher round, which counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import structs

from elasticrun.core.persisted import Facts, aged
from elasticrun.system.processes import boot_id
from elasticrun.system.sandbox import start_thread
from elasticrun.wire.types import plain, typed

FILE: Final = "state.sqlite"
SCHEMA: Final = 1
"""PRAGMA user_version of our tables; the file of another version is set aside."""

ASIDE: Final = ".aside"
"""Added to the name of a record that is set aside; only the last one is kept."""

MAX_CRASHES: Final = 3
CRASH_WINDOW: Final = 60.0
"""So many masters that failed on one state within so many seconds: the state is to blame."""

SLOW: Final = 2.0
"""Seconds after which a write that has not come back is told."""

GIVEN_UP: Final = 30.0
"""Seconds after which the master goes on without a record: the disk hangs, and nodes wait."""

LOAD_LIMIT: Final = 5.0
"""Seconds that opening and loading may take; agents wait for this master meanwhile."""

WAL_BYTES: Final = 1024 * 1024
"""The write-ahead log is cut back to this size at each checkpoint."""

_TABLES: Final = """
CREATE TABLE facts (field TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE crashes (boot TEXT NOT NULL, at REAL NOT NULL);
"""
_WRITTEN: Final = "written"  # the row that says when: [boot id, seconds since boot]

logger = logging.getLogger("elasticrun")

T = TypeVar("T")


class Damaged(Exception):
    """A record that cannot be loaded; the text says why."""


class SqliteStore:
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


@dataclass
class _Disk:
    """The file; every method blocks and belongs to the store's thread."""

    folder: Path
    now: Callable[[], float]
    _db: sqlite3.Connection | None = None
    _inode: int = 0
    _rows: dict[str, Any] = field(default_factory=dict)  # as they stand in the file

    @property
    def path(self) -> Path:
        return self.folder / FILE

    def open(self) -> Facts | None:
        """The facts in the file, if there are any that can be used. OSError, sqlite3.Error."""
        try:
            return self._open()
        except (Damaged, sqlite3.DatabaseError) as wrong:
            if isinstance(wrong, sqlite3.OperationalError) and "malformed" not in str(wrong):
                raise  # the disk, not the file
            logger.warning("the record %s is set aside: %s", self.path, wrong)
            self.begin_anew()
            return None

    def begin_anew(self) -> None:
        """Put the file out of the way and make an empty one."""
        self.put_aside()
        self._open()

    def put_aside(self) -> None:
        """No later master may take what is here for true."""
        self.close()
        # The file first: a log without it is dropped, but it would be read without its log.
        try:
            os.replace(self.path, f"{self.path}{ASIDE}")
        except FileNotFoundError:
            pass
        except OSError as wrong:
            logger.warning("%s cannot be set aside: %s", self.path, wrong.strerror or wrong)
        for log in (f"{self.path}-wal", f"{self.path}-shm"):
            with contextlib.suppress(OSError):
                os.unlink(log)

    def save(self, facts: Facts) -> None:
        """Commit what has changed. OSError, sqlite3.Error."""
        db = self._db
        if db is None:
            raise OSError("it is not open")
        rows = structs.asdict(facts)
        changed = [
            (name, json.dumps(plain(value), separators=(",", ":")))
            for name, value in rows.items()
            if name not in self._rows or self._rows[name] != value
        ]
        changed.append((_WRITTEN, json.dumps([boot_id(), self.now()])))
        db.execute("BEGIN IMMEDIATE")
        try:
            db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", changed)
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
        self._rows = rows
        if not self._is_ours():
            raise OSError(f"{self.path} has been taken away")

    def crashed(self) -> None:
        """Count this master among those that failed on this state, and end."""
        if self._db is not None:
            self._db.execute("INSERT INTO crashes VALUES (?, ?)", (boot_id(), self.now()))
        self.close()

    def close(self) -> None:
        """Let go of the file; harmless when it is not open."""
        if self._db is not None:
            db, self._db = self._db, None
            self._rows = {}
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def _open(self) -> Facts | None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite gives its log and its index the mode of the file.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = self._db = sqlite3.connect(
            self.path, timeout=1.0, isolation_level=None, check_same_thread=False
        )
        self._inode = self.path.stat().st_ino
        ((mode,),) = db.execute("PRAGMA journal_mode=WAL").fetchall()
        if mode != "wal":
            raise OSError(f"{self.folder} is on a file system without shared memory")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA journal_size_limit={WAL_BYTES}")
        ((version,),) = db.execute("PRAGMA user_version").fetchall()
        if version == 0 and not db.execute("SELECT 1 FROM sqlite_master").fetchall():
            db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={SCHEMA}; COMMIT;")
            return None
        if version != SCHEMA:
            raise Damaged(f"it is of version {version}, and this elasticrun writes {SCHEMA}")
        return self._load(db)

    def _load(self, db: sqlite3.Connection) -> Facts | None:
        ((sound,),) = db.execute("PRAGMA quick_check(1)").fetchall()
        if sound != "ok":
            raise Damaged(f"it is damaged ({sound})")
        window = (boot_id(), self.now() - CRASH_WINDOW)
        count = "SELECT count(*) FROM crashes WHERE boot = ? AND at >= ?"
        ((crashes,),) = db.execute(count, window).fetchall()
        if crashes >= MAX_CRASHES:
            raise Damaged(f"{crashes} masters have failed on it within {CRASH_WINDOW:g} s")
        db.execute("DELETE FROM crashes WHERE boot != ? OR at < ?", window)
        rows = dict(db.execute("SELECT field, value FROM facts").fetchall())
        if not rows:
            return None
        try:
            boot, at = json.loads(rows.pop(_WRITTEN, '["", 0.0]'))
            facts: Facts = typed({name: json.loads(text) for name, text in rows.items()}, Facts)
        except (ValueError, TypeError, RecursionError) as wrong:
            raise Damaged(f"its facts are of another version ({wrong})") from None
        return aged(facts, max(0.0, self.now() - at)) if boot == boot_id() else facts

    def _is_ours(self) -> bool:
        with contextlib.suppress(OSError):
            return self.path.stat().st_ino == self._inode
        return False


def _since_boot() -> float:
    """Seconds since this host was started: one clock for all its masters, whatever is set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
