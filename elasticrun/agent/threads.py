"""Work that may block on a disk or a terminal, kept out of the loop.

The threads are daemons and nobody joins them: a file system that hangs for an hour must neither
stop the agent's beats nor keep the agent from ending, which the executor of asyncio would do.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], *, limit: float | None = None, name: str = "work") -> T:
    """The result of `work()`, called in a thread of its own.

    Raises TimeoutError after `limit` seconds (None: waits as long as it takes); the thread is then
    left to itself and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled() or done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as caught:  # it is the caller's to judge, in the loop's thread
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop ended meanwhile: nobody waits any more
            pass

    threading.Thread(target=body, name=f"elasticrun-{name}", daemon=True).start()
    if limit is None:
        return await done
    return await asyncio.wait_for(done, limit)


def threadsafe(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Have the loop call `call(*args)`, from any thread; nothing if the loop is over."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


def tell_failure(task: asyncio.Task[None], tell: Callable[[str], object], what: str) -> None:
    """Have a defect of ours in this task told, so that nobody waits for it for ever."""

    def look(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            tell(f"{what} failed: {error!r}")

    task.add_done_callback(look)
