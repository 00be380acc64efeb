"""A master's persistent state: its record (none, on its own disk, or in etcd) and its trace."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from elasticrun.config import EXIT_USAGE, MasterConfig
from elasticrun.core.persisted import Facts
from elasticrun.host import user_folder
from elasticrun.host.system.sandbox import NoThread, start_thread
from elasticrun.master.file_store import FileStore
from elasticrun.master.store import FactStore, StoreRefused
from elasticrun.master.trace.writer import MasterStart, TraceWriter
from elasticrun.wire import env

TRACE_END: Final = 1.0
"""Seconds for writing the last lines of the trace."""

FOLDER_LIMIT: Final = 2.0
"""Seconds to prepare and lock the folder; after that it counts as unusable."""

MAX_JOB_CHARS: Final = 64
"""Maximum characters of the job's id in the name of a trace folder that the user asked to keep."""

logger = logging.getLogger("elasticrun")


class Records:
    """The persistent state of one master.

    If the folder is unusable, a hosted master logs that and keeps no record; a master that a user
    started refuses to serve (StoreRefused)."""

    def __init__(self, config: MasterConfig, *, hosted: bool) -> None:
        self._config = config
        self._hosted = hosted
        self._folder: Path | None = None
        self._fd = -1
        self.store: FactStore | None = None
        self.trace: TraceWriter | None = None

    async def open(self, port: int) -> Facts | None:
        """Open the folder and the store; returns the previous master's facts, None if there are
        none. `port`: the port of this master, already bound. Raises StoreRefused."""
        config = self._config
        if config.record_dir:
            await self._lock_in_thread(Path(config.record_dir))
        if config.launch.store:
            from elasticrun.master.etcd_store import EtcdStore

            self.store = EtcdStore(config, port)
        elif self._folder is not None:
            self.store = FileStore(self._folder)
        if self.store is None:
            return None
        facts = await self.store.load()
        if facts is None or facts.spec.job_id == config.identity.job_id:
            return facts
        await self.close()
        where = config.launch.store or self._folder
        raise StoreRefused(
            f"the record in {where} belongs to job {facts.spec.job_id!r}, not to "
            f"{config.identity.job_id!r}: use another folder, or remove the record",
            EXIT_USAGE,
        )

    def begin_trace(self, start: MasterStart) -> TraceWriter | None:
        """Start recording the state machine's input and output; None without a folder."""
        folder, kept = self._folder, os.environ.get(env.TRACE_DIR, "")
        if folder is None:
            return None
        if kept and self._hosted:
            job = re.sub(r"[^A-Za-z0-9_.-]", "_", self._config.identity.job_id)[:MAX_JOB_CHARS]
            launch = folder.name.removeprefix(user_folder.PREFIX)
            folder = Path(kept).absolute() / f"{job}-{launch}"
        self.trace = TraceWriter(folder, start)
        return self.trace

    def with_hint(self, facts: Facts) -> Facts:
        """The facts; if the job has ended and a user started this master with a record folder, the
        outcome's reason says how to run the job again."""
        if facts.outcome is None or self._hosted or self._folder is None:
            return facts
        reason = (
            f"the job has already ended: {facts.outcome.reason} (remove {self._folder}, the record "
            "of its master, to run it again)"
        )
        return replace(facts, outcome=replace(facts.outcome, reason=reason, code=None))

    async def discard(self, why: str) -> None:
        """Discard the loaded record. A file is set aside at once; a record in etcd stays until the
        next write replaces it."""
        if isinstance(self.store, FileStore):
            self.store.discard(why)
        else:
            logger.warning("the record of this job is ignored: %s", why)

    async def crashed(self) -> None:
        """The state machine failed: record that for the next master, if there is a store."""
        if self.store is not None:
            await self.store.crashed()

    async def close(self) -> None:
        """Close the trace and the store."""
        if self.trace is not None:
            self.trace.close(TRACE_END)
        if self.store is not None:
            await self.store.close()
            self.store = None

    def remove(self) -> None:
        """Remove a hosted master's folder; a folder that a user named stays."""
        if self._folder is not None and self._hosted:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _lock_in_thread(self, folder: Path) -> None:
        """Prepare and lock the folder, in a thread because its file system may hang."""
        locked: Future[int] = Future()
        locked.set_running_or_notify_cancel()  # not cancellable: `close_late` closes a late result

        def work() -> None:
            try:
                locked.set_result(self._lock(folder))
            except Exception as error:
                locked.set_exception(error)

        def close_late(late: Future[int]) -> None:
            if late.exception() is None:
                os.close(late.result())

        try:
            start_thread(work, "folder")
            self._fd = await asyncio.wait_for(asyncio.wrap_future(locked), FOLDER_LIMIT)
            self._folder = folder
        except NoThread as wrong:
            self._continue_without(str(wrong))
        except TimeoutError:
            locked.add_done_callback(close_late)  # runs at once if the result has arrived meanwhile
            self._continue_without(f"{folder} has not answered for {FOLDER_LIMIT:g} s")
        except BlockingIOError:
            self._continue_without(f"{folder} has the record of a running master")
        except OSError as wrong:
            self._continue_without(str(wrong))

    def _lock(self, folder: Path) -> int:
        if self._hosted:
            return user_folder.lock_folder(folder)
        user_folder.prepare_folder(folder)
        return user_folder.lock_folder(folder, alone=True)

    def _continue_without(self, why: str) -> None:
        if not self._hosted:
            raise StoreRefused(why, EXIT_USAGE)
        logger.warning("this job's master keeps no record: %s", why)
