"""The agent's event loop: one queue of events, one state machine, and the execution of its effects.

Also the helpers for what must not run in the loop: threads for blocking work, and tasks with an
owner.

The loop sleeps until an event arrives or the state machine's next deadline. The threads are daemons
that nobody joins: a file system that hangs for an hour must neither stop the agent's heartbeats nor
prevent its exit, as asyncio's executor would.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from elasticrun.config import EXIT_FAILED
from elasticrun.core import events as fx
from elasticrun.host.log import logger
from elasticrun.host.system.sandbox import NoThread, start_thread
from elasticrun.wire import messages as m
from elasticrun.wire.frames import Connection

if TYPE_CHECKING:
    from elasticrun.core.worker.group import WorkerGroup

T = TypeVar("T")

SLOW_DISK: Final = 5.0
"""Seconds in a thread after which `in_thread` logs its `slow` sentence."""

DISK_LIMIT: Final = 120.0
"""Seconds for disk operations that a node cannot do without; a restarted file server answers within
that."""

THREAD_LIMIT: Final = 10.0
"""Seconds for retrying to start a thread. The processes that use up the limit of this container
(pids.max, RLIMIT_NPROC) may be about to exit, such as ranks that are being stopped."""

FIRST_TRY: Final = 0.05
"""Seconds until the first retry; doubled for each further one."""

PATIENCE_STEP: Final = 1.0
"""Seconds between two checks that this loop itself was not stuck while it waits for another
process."""

STALLED: Final = 0.5
"""Seconds that such a check may be late. If it is later, this loop was stuck, and the time since
the previous check does not count."""

_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

MAX_FAULTS: Final = 3
"""Number of failed effects that ends the agent."""

AWAITED: Final = (fx.PrepareStore, fx.RunProbe, fx.SignalRanks, fx.SpawnRanks, fx.SweepRanks)
"""Effects whose result the state machine waits for: a failure of one of them would block it."""


async def in_thread(
    work: Callable[[], T],
    *,
    limit: float | None = None,
    name: str = "work",
    slow: str = "",
    late: Callable[[T], object] | None = None,
) -> T:
    """The result of `work()`, called in its own thread.

    Raises TimeoutError after `limit` seconds (None: no limit), and NoThread if no thread can start.
    After a timeout the thread is abandoned; if it still returns a result, `late` is called with it
    in a thread. `slow` is logged after SLOW_DISK seconds."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled() or done.done():
            if error is None and late is not None:
                with contextlib.suppress(RuntimeError):  # no thread for it either: not cleaned up
                    threading.Thread(target=late, args=(result,), daemon=True).start()
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as caught:  # the caller handles it, in the loop's thread
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop has ended: nobody waits
            if error is None and late is not None:
                late(result)  # type: ignore[arg-type]

    began = loop.time()
    await _start_when_possible(
        body, name, THREAD_LIMIT if limit is None else min(limit, THREAD_LIMIT)
    )
    timer = loop.call_later(SLOW_DISK, logger.warning, "%s", slow) if slow else None
    try:
        left = None if limit is None else began + limit - loop.time()
        return await asyncio.wait_for(done, left)
    finally:
        if timer is not None:
            timer.cancel()


async def _start_when_possible(body: Callable[[], None], name: str, limit: float) -> None:
    """Start the thread. Raises NoThread if that keeps failing for `limit` seconds."""
    loop = asyncio.get_running_loop()
    end, wait = loop.time() + limit, FIRST_TRY
    while True:
        try:
            start_thread(body, name)
            return
        except NoThread:
            left = end - loop.time()
            if left <= 0:
                raise
        await asyncio.sleep(min(wait, left))
        wait *= 2


def threadsafe(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Call `call(*args)` in the loop, from any thread; a no-op if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


def awaited(work: Coroutine[Any, Any, T], what: str) -> asyncio.Task[T]:
    """A task for a caller that awaits it, and so handles its failure."""
    return asyncio.get_running_loop().create_task(work, name=what)


async def first_of(
    *works: Awaitable[Any], limit: float | None = None
) -> list[asyncio.Future[Any] | None]:
    """Wait until the first of these completes, or for `limit` seconds. Returns the completed
    futures; None in place of the others, which are cancelled and awaited."""
    futures: list[asyncio.Future[Any]] = [asyncio.ensure_future(work) for work in works]
    over: set[asyncio.Future[Any]] = set()
    try:
        over, _ = await asyncio.wait(futures, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
    return [future if future in over else None for future in futures]


def keep_sending(loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
    """Write the buffered bytes, now and whenever the socket becomes writable."""
    connection.flush()
    if connection.unsent:
        loop.add_writer(connection, keep_sending, loop, connection)
    else:
        loop.remove_writer(connection)


class Tasks:
    """Owns tasks that nobody awaits. A failure goes to `fatal(sentence)`, which ends the node where
    somebody would wait forever for the task's result, and only logs it elsewhere."""

    def __init__(self, fatal: Callable[[str], object]) -> None:
        self._fatal = fatal
        self._running: set[asyncio.Task[Any]] = set()

    def start(
        self,
        work: Coroutine[Any, Any, T],
        what: str,
        *,
        on_failure: Callable[[str], object] | None = None,
    ) -> asyncio.Task[T]:
        """Start a task. If it fails, `on_failure`, or else `fatal`, gets the sentence."""
        task = asyncio.get_running_loop().create_task(work, name=what)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        report_failure(task, on_failure or self._fatal, what)
        return task

    def __len__(self) -> int:
        """Number of running tasks."""
        return len(self._running)

    async def wait(self, limit: float | None = None) -> None:
        """Wait for the running tasks, `limit` seconds at most (None: no limit)."""
        if self._running:
            await asyncio.wait(self._running, timeout=limit)

    def close(self) -> None:
        """Cancel all running tasks."""
        for task in list(self._running):
            task.cancel()


class Timer:
    """At most one pending call; a new one replaces it."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._handle is not None

    def after(self, seconds: float, call: Callable[..., object], *args: object) -> None:
        """Schedule the call in the running loop; never immediate, even for 0 seconds."""
        self.cancel()
        loop = asyncio.get_running_loop()
        self._handle = loop.call_later(max(0.0, seconds), self._due, call, args)

    def cancel(self) -> None:
        """Cancel the pending call, if any."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _due(self, call: Callable[..., object], args: tuple[object, ...]) -> None:
        self._handle = None
        call(*args)


class Patience:
    """A timeout for the answer of another process on this host.

    It counts only time in which this loop ran: if this process was stuck (Ctrl-Z, a frozen machine,
    no CPU), the other one may have been stuck for the same reason."""

    def __init__(self) -> None:
        self._timer = Timer()
        self._left = 0.0

    @property
    def is_set(self) -> bool:
        return self._timer.is_set

    def wait(self, limit: float, late: Callable[..., object], *args: object) -> None:
        """Call `late(*args)` unless cancelled within `limit` seconds; restarts the timeout."""
        self._left = limit
        self._start_step(late, args)

    def cancel(self) -> None:
        """Stop waiting, because the answer has arrived. No-op without a pending wait."""
        self._timer.cancel()

    def _start_step(self, late: Callable[..., object], args: tuple[object, ...]) -> None:
        step = min(self._left, PATIENCE_STEP)
        due = asyncio.get_running_loop().time() + step
        self._timer.after(step, self._check, due, step, late, args)

    def _check(
        self, due: float, step: float, late: Callable[..., object], args: tuple[object, ...]
    ) -> None:
        if asyncio.get_running_loop().time() <= due + STALLED:
            self._left -= step
        if self._left > 0:
            self._start_step(late, args)
        else:
            late(*args)


class Once:
    """Logs each sentence once, and `most` sentences at most."""

    def __init__(self, most: int = 100) -> None:
        self._most = most
        self._logged: set[str] = set()

    def log(self, sentence: str, level: int = logging.WARNING, *, kind: str = "") -> None:
        """Log the sentence, unless `kind` has been logged before. `kind`: "" stands for the
        sentence itself."""
        kind = kind or sentence
        if kind not in self._logged and len(self._logged) < self._most:
            self._logged.add(kind)
            logger.log(level, "%s", sentence)

    def clear(self) -> None:
        """Allow all sentences again."""
        self._logged.clear()


def own_defect(context: dict[str, Any]) -> Exception | None:
    """The exception in the context of an asyncio exception handler, if our own code raised it."""
    error = context.get("exception")
    if "handle" not in context or not isinstance(error, Exception):
        return None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_OURS):
            return error
        trace = trace.tb_next
    return None


def report_failure(task: asyncio.Task[Any], report: Callable[[str], object], what: str) -> None:
    """Call `report(sentence)` if the task fails, so that nobody waits for it forever."""

    def check(done: asyncio.Task[Any]) -> None:
        if done.cancelled() or (error := done.exception()) is None:
            return
        if isinstance(error, NoThread):  # not a bug of ours
            report(f"{what} failed: {error}")
            return
        logger.error("a bug in elasticrun: %s failed", what, exc_info=error)
        report(f"{what} failed: {error!r}")

    task.add_done_callback(check)


class LoopOwner(Protocol):
    """Carries out the results of events."""

    def perform(self, effect: fx.AgentEffect) -> None:
        """Carry out an effect of the state machine."""

    def route(self, order: m.Order) -> None:
        """Dispatch an order that changes nothing in the state machine."""


class AgentLoop:
    """Feeds events to the state machine, and routed orders to their component, in the order of
    `deliver`, until the state machine returns Exit."""

    def __init__(self, brain: WorkerGroup, owner: LoopOwner) -> None:
        self.brain = brain
        self._owner = owner
        self._inbox: deque[fx.AgentEvent] = deque()
        self._wake = asyncio.Event()
        self._faults = 0
        self._exit: fx.Exit | None = None

    def deliver(self, event: fx.AgentEvent) -> None:
        """Queue an event; call in the loop's thread."""
        self._inbox.append(event)
        self._wake.set()

    def finish(self, outcome: fx.Exit) -> None:
        """End without the state machine, because something it needs is missing."""
        if self._exit is None:
            self._exit = outcome
            self._wake.set()

    async def run(self) -> fx.Exit:
        """Process events until the outcome is known."""
        self.deliver(fx.Tick())
        while True:
            while self._inbox and self._exit is None:
                self._turn(self._inbox.popleft())
            if self._exit is not None:
                return self._exit
            deadline = self.brain.next_deadline()
            wait = None if deadline is None else deadline - time.monotonic()
            if wait is not None and wait <= 0:
                self._inbox.append(fx.Tick())
                await asyncio.sleep(0)  # let other events arrive
                continue
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), wait)
            except TimeoutError:
                self._inbox.append(fx.Tick())

    def _turn(self, event: fx.AgentEvent) -> None:
        if isinstance(event, fx.Ordered) and not self.brain.is_changed_by(event.order):
            if self.brain.obeys:
                self._carry_out(event.order, partial(self._owner.route, event.order))
            return
        try:
            effects = self.brain.step(event, time.monotonic())
        except Exception as error:
            # A bug of ours, never the result of bad input. The state machine may now be wrong, so
            # its effects are dropped.
            logger.exception("a bug in elasticrun: %s", error)
            self._end_after_defect(f"{type(event).__name__} could not be handled", error)
            return
        for effect in effects:
            if isinstance(effect, fx.Exit):
                self._exit = effect
                return
            self._carry_out(effect, partial(self._owner.perform, effect))

    def _carry_out(self, what: fx.AgentEffect | m.Order, work: Callable[[], None]) -> None:
        """Run `work`. Its failure is a bug of ours that the state machine does not see; the next
        effect still runs."""
        try:
            work()
        except Exception as error:
            name = type(what).__name__
            logger.exception("a bug in elasticrun: cannot execute %s", name)
            self._faults += 1
            if isinstance(what, AWAITED) or self._faults >= MAX_FAULTS:
                self._end_after_defect(f"cannot execute {name}", error)

    def _end_after_defect(self, what: str, error: Exception) -> None:
        sentence = f"a bug in elasticrun, please report it: {what} ({error!r})"
        self.finish(fx.Exit(EXIT_FAILED, sentence, (), 0))
