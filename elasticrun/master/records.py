"""Which record this master keeps (none, its own disk's, a shared one) and what it promises to the
loop, and the trace beside it."""

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
from elasticrun.master.trace.writer import Life, TraceWriter
from elasticrun.wire import env

TRACE_END: Final = 1.0
"""Seconds that the last lines of the trace may take to reach the disk."""

FOLDER_LIMIT: Final = 2.0
"""Seconds that a look at the folder may take before the master does without it."""

MAX_WORD: Final = 64
"""Characters of the job's id in the name of a trace that is kept."""

logger = logging.getLogger("elasticrun")


class Records:
    """What one master remembers beyond its own life.

    A hosted master does without a folder that it cannot have, and says so in one line; a person who
    named one is refused with a sentence."""

    def __init__(self, config: MasterConfig, *, hosted: bool) -> None:
        self._config = config
        self._hosted = hosted
        self._folder: Path | None = None
        self._fd = -1
        self.store: FactStore | None = None
        self.trace: TraceWriter | None = None

    async def open(self, port: int) -> Facts | None:
        """The facts of the master before this one. `port`: where this one serves; it is bound
        already. StoreRefused."""
        config = self._config
        if config.record_dir:
            await self._take(Path(config.record_dir))
        if config.master_store:
            from elasticrun.master.etcd_store import EtcdStore

            self.store = EtcdStore(config, port)
        elif self._folder is not None:
            self.store = FileStore(self._folder)
        if self.store is None:
            return None
        facts = await self.store.load()
        if facts is None or facts.spec.job_id == config.job_id:
            return facts
        await self.close()
        where = config.master_store or self._folder
        raise StoreRefused(
            f"the record in {where} is that of job {facts.spec.job_id!r}, and this master is to "
            f"serve {config.job_id!r}: name another folder, or remove it",
            EXIT_USAGE,
        )

    def begin_trace(self, life: Life) -> TraceWriter | None:
        """Write down from now on what the brain takes in; None where there is no folder."""
        folder, kept = self._folder, os.environ.get(env.TRACE_DIR, "")
        if folder is None:
            return None
        if kept and self._hosted:
            job = re.sub(r"[^A-Za-z0-9_.-]", "_", self._config.job_id)[:MAX_WORD]
            launch = folder.name.removeprefix(user_folder.PREFIX)
            folder = Path(kept).absolute() / f"{job}-{launch}"
        self.trace = TraceWriter(folder, life)
        return self.trace

    def told(self, facts: Facts) -> Facts:
        """Facts of a job that is over, whose sentence tells how to run it again."""
        if facts.outcome is None or self._hosted or self._folder is None:
            return facts
        reason = (
            f"the job is over already: {facts.outcome.reason} (remove {self._folder}, the record "
            "of its master, to run it again)"
        )
        return replace(facts, outcome=replace(facts.outcome, reason=reason, code=None))

    async def distrust(self, why: str) -> None:
        """What was loaded cannot be used: begin an empty record."""
        if isinstance(self.store, FileStore):
            self.store.set_aside(why)
        else:
            logger.warning("the record of this job is not used: %s", why)

    async def crashed(self) -> None:
        """The brain failed: the next master must know, if it has this record."""
        if self.store is not None:
            await self.store.crashed()

    async def close(self) -> None:
        """End all of it."""
        if self.trace is not None:
            self.trace.close(TRACE_END)
        if self.store is not None:
            await self.store.close()
            self.store = None

    def remove(self) -> None:
        """Remove the folder of a launch that nobody needs any more."""
        if self._folder is not None and self._hosted:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _take(self, folder: Path) -> None:
        """Hold the folder, in a thread: it may hang."""
        taken: Future[int] = Future()
        taken.set_running_or_notify_cancel()  # whatever comes is taken, or let go: never refused

        def work() -> None:
            try:
                taken.set_result(self._hold(folder))
            except Exception as error:
                taken.set_exception(error)

        def let_go(late: Future[int]) -> None:
            if late.exception() is None:
                os.close(late.result())

        try:
            start_thread(work, "folder")
            self._fd = await asyncio.wait_for(asyncio.wrap_future(taken), FOLDER_LIMIT)
            self._folder = folder
        except NoThread as wrong:
            self._do_without(str(wrong))
        except TimeoutError:
            taken.add_done_callback(let_go)  # also of what came at the last moment
            self._do_without(f"{folder} has not answered for {FOLDER_LIMIT:g} s")
        except BlockingIOError:
            self._do_without(f"{folder} holds the record of a master that runs")
        except OSError as wrong:
            self._do_without(str(wrong))

    def _hold(self, folder: Path) -> int:
        if self._hosted:
            return user_folder.hold(folder)
        user_folder.prepare(folder)
        return user_folder.hold(folder, alone=True)

    def _do_without(self, why: str) -> None:
        if not self._hosted:
            raise StoreRefused(why, EXIT_USAGE)
        logger.warning("this job's master keeps no record: %s", why)
