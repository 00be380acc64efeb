"""The connections to the spawners: orders to them, reports from them, and their deaths.

There is one spawner, or two while the older one still has processes and a newer one starts, because
a file has changed that the older one imported. The component that started a process has a `Child`;
the child's key is used only here and in messages, and never reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, Protocol

from elasticrun.agent.boot import SpawnerProcess, configure_message, start_spawner
from elasticrun.agent.context import NodeContext
from elasticrun.agent.runtime import (
    Once,
    Patience,
    Tasks,
    Timer,
    in_thread,
    keep_sending,
)
from elasticrun.agent.warm import WarmChild
from elasticrun.agent.workers.exits import oom_watcher
from elasticrun.host.log import logger
from elasticrun.host.system.processes import why_unresponsive
from elasticrun.host.system.sandbox import NoThread
from elasticrun.wire import spawning
from elasticrun.wire.frames import Connection, FrameError, HungUp

KEEPALIVE_LIMIT: Final = 90.0
"""A spawner without a keepalive from the agent's loop for this many seconds ends its ranks: a
stopped agent must not leave ranks of an old round running, because the next round may write the
same checkpoints."""

KEEPALIVES: Final = 3
"""Number of keepalives within KEEPALIVE_LIMIT."""

ANSWER_LIMIT: Final = 20.0
"""Seconds for a spawner to answer after an order, or after the death of one of its processes; then
it is replaced, with its ranks. Raise it if memory is so short that a fork server stalls."""

MAX_EARLY_DEATHS: Final = 3
"""Number of spawners in a row that may die before they are ready. Another one would not help (a
broken torch, no memory)."""

START_LIMIT: Final = 30.0
"""Seconds for retrying to start a spawner in place of a dead one."""

START_AGAIN: Final = 1.0
"""Seconds between two tries."""

SWEEP_LIMIT: Final = 30.0
"""Seconds after which processes that survive SIGKILL count as stuck in the kernel."""


class Owner(Protocol):
    """The owner of a started process. Its methods are called in the loop's thread, in order of
    events."""

    def on_child_message(self, child: Child, message: spawning.FromSpawner) -> None:
        """A message about the child: Spawned, then its own messages, then Exited or SpawnFailed."""

    def lost(self, child: Child) -> None:
        """Its spawner has died; the child was killed and reaped, and no message follows."""


@dataclass(eq=False)
class Child:
    """A process that a spawner was ordered to start."""

    key: int
    owner: Owner
    spawner: Spawner | None
    """None once it is lost or forgotten."""

    @property
    def is_lost(self) -> bool:
        """Whether no more messages about it can arrive."""
        return self.spawner is None or self.spawner.ended.is_set()

    def send(self, message: spawning.ToSpawner) -> None:
        """Send an order about it; a no-op if it is lost."""
        if self.spawner is not None and not self.is_lost:
            self.spawner.send(message)
            self.spawner.expect_answer()

    def signal(self, signum: int, *, alone: bool = False) -> None:
        """Send a signal to its process group; `alone`: only to the process itself."""
        self.send(spawning.SendSignal(self.key, signum, alone))


class Spawner:
    """One connection to a spawner. Its owner gets every message and, once, the reason why the
    connection has ended."""

    def __init__(self, process: SpawnerProcess, owner: Spawners) -> None:
        self.process = process
        self.children: dict[int, Child] = {}
        """By key: the children that are not forgotten yet."""
        self.ready: spawning.SpawnerReady | None = None
        self.is_quitting = False
        self.exit_code: int | None = None
        """As in subprocess; None: not reaped yet."""
        self._death = ""
        self.ended = asyncio.Event()
        self._pings = 0
        self._answer_timer = Patience()
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        # Orders may wait while torch is imported; a spawner that never answers is replaced
        # (`expect_answer`).
        self._connection = Connection(process.channel, spawning.FromSpawner, max_bytes=0)
        self._loop.add_reader(self._connection, self._read)

    def send(self, message: spawning.ToSpawner) -> None:
        """Queue an order; it is lost if the spawner dies (which is reported)."""
        if self.ended.is_set():
            return
        self._connection.send(message)
        keep_sending(self._loop, self._connection)

    def expect_answer(self) -> None:
        """Ping the spawner because it has work: it must answer within ANSWER_LIMIT or is given up.
        No-op if it is not ready: it is still importing torch, which may take any time."""
        if self.ready is None or self.process.process is None or self.is_quitting:
            return
        self._pings += 1
        self.send(spawning.Ping(self._pings))
        if not self._answer_timer.is_set:
            self._wait_for_answer()

    def _wait_for_answer(self) -> None:
        self._answer_timer.wait(ANSWER_LIMIT, self._on_no_answer)

    def _on_no_answer(self) -> None:
        how = why_unresponsive(self.process.pid or 0)
        self.close(f"{how}: no answer for {ANSWER_LIMIT:g} s, so it is killed and replaced")

    def quit(self) -> None:
        """Order the spawner to kill and reap its descendants and to exit. One that is still
        importing torch has none, and would read the order only when it is ready: it is killed."""
        if not self.is_quitting:
            self.is_quitting = True
            self.send(spawning.Quit())
            if self.ready is None:
                self.process.kill()

    def close(self, reason: str) -> None:
        """Close the connection: its process has exited, does not answer, or violates the
        protocol."""
        if self.ended.is_set():
            return
        self.ended.set()
        self._answer_timer.cancel()
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        self._owner.on_close(self, reason)

    def drain(self, reason: str) -> None:
        """Read all that is left in the socket, because the process was reaped; then close."""
        self._death = reason
        while not self.ended.is_set() and self._read():
            pass
        self.close(reason)

    def how_it_ended(self, seen: str) -> str:
        """How the spawner ended, as far as known; `seen`: what its socket or the kernel reports."""
        process = self.process.process
        lost_guard = isinstance(process, WarmChild) and process.has_lost_guard
        return "its guard was killed" if lost_guard else seen

    def _read(self) -> bool:
        """Read once; returns whether there was anything."""
        try:
            messages = self._connection.receive()
        except HungUp:
            self.close(self._death or self.how_it_ended("it was killed, or has crashed"))
            return False
        except OSError as error:
            self.close(self._death or self.how_it_ended(error.strerror or str(error)))
            return False
        if messages is None:
            return False
        if self._answer_timer.is_set:
            self._wait_for_answer()
        try:
            for message in messages:
                if isinstance(message, spawning.Pong):
                    if message.number == self._pings:
                        self._answer_timer.cancel()
                    continue
                self._owner.on_message(self, message)
                if self.ended.is_set():
                    break
        except FrameError as error:
            self.close(f"it sent an invalid message: {error}")
        return True


class Spawners:
    """All spawners of this agent, used as one. The node ends if none can be kept running.

    `lost(reason)` is called when a spawner with processes has died and all its descendants are
    killed and reaped; `ignored`: the signals that this process inherited as ignored."""

    def __init__(
        self,
        node: NodeContext,
        first: SpawnerProcess,
        ignored: tuple[int, ...],
        lost: Callable[[str], None],
    ) -> None:
        self._launch = node.launch
        self._ignored = ignored
        self._reaper = node.reaper
        self._lost = lost
        self._fatal = node.fatal
        self._keys = count(1)
        self._all: list[Spawner] = []
        self._pidfds: dict[int, int] = {}
        self._early_deaths = 0
        self._once = Once()  # every restart would repeat it
        self._closing = False
        self._keepalive = Timer()
        self._tasks = Tasks(node.fatal)
        self.is_caller = first.process is None
        """The caller of elastic_launch is the spawner: it can be neither replaced nor reaped."""
        self._current = self._adopt(first)
        self._next: Spawner | None = None
        if self.is_caller:
            self._current.send(configure_message(node.launch))

    # ------------------------------------------------------------ orders

    def start(self, order: spawning.Spawn, owner: Owner) -> Child:
        """Order a process from the current spawner, or from its replacement if that is ready. The
        key in the order is set here."""
        self._switch()
        child = Child(next(self._keys), owner, self._current)
        self._current.children[child.key] = child
        self._current.send(replace(order, key=child.key))
        self._current.expect_answer()
        return child

    def is_old(self, child: Child) -> bool:
        """Whether this process belongs to a spawner that was replaced. A replacement that is ready
        takes over here."""
        self._switch()
        return child.spawner is not self._current

    def forget(self, *children: Child) -> None:
        """Forget processes that have exited and were swept. A replaced spawner quits when it has
        none left."""
        for child in children:
            if child.spawner is not None:
                del child.spawner.children[child.key]
                child.spawner = None
        self._retire()

    async def close(self, limit: float) -> None:
        """Order all spawners to quit, and wait for their exits, `limit` seconds at most."""
        self._closing = True
        self._keepalive.cancel()
        self._tasks.close()
        for spawner in self._all:
            spawner.quit()
        ends = [spawner.ended for spawner in self._all]
        for spawner in self._all:
            if spawner.process.swept is not None:  # wait for its guard, too
                ends.append(spawner.process.swept)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                for end in ends:
                    await end.wait()
        for spawner in list(self._all):
            spawner.close("closed")

    # ------------------------------------------------------------ reports

    def _adopt(self, process: SpawnerProcess) -> Spawner:
        spawner = Spawner(process, self)
        self._all.append(spawner)
        process.watch(self._reaper, lambda code: self._reaped(spawner, code))
        return spawner

    def on_message(self, spawner: Spawner, message: spawning.FromSpawner) -> None:
        """Handle a message; called by the spawner, like `on_close`."""
        if isinstance(message, spawning.SpawnerReady):
            self._ready(spawner, message)
        elif isinstance(message, spawning.Notice):
            self._once.log(message.text)
        elif isinstance(message, spawning.Stale):
            self._once.log(message.reason)
            self._prepare_next(spawner)
        else:
            if isinstance(message, spawning.Spawned):
                self._watch(spawner, message)
            elif isinstance(message, spawning.Exited | spawning.SpawnFailed):
                self._unwatch(message.key)
            assert not isinstance(message, spawning.Pong)  # handled by the spawner itself
            if isinstance(message, spawning.Swept | spawning.Lingering):
                keys = message.keys
            else:
                keys = (message.key,)
            children = (spawner.children[key] for key in keys if key in spawner.children)
            if (child := next(children, None)) is not None:
                child.owner.on_child_message(child, message)

    def _watch(self, spawner: Spawner, born: spawning.Spawned) -> None:
        """Watch for the process's exit through the kernel as well: a stuck spawner does not report
        it."""
        if self.is_caller:
            return
        try:
            pidfd = os.pidfd_open(born.pid)
        except ProcessLookupError:
            spawner.expect_answer()
            return
        except OSError as error:
            what = "a stuck fork server cannot be detected when a rank dies"
            self._once.log(f"{what}: no pidfd ({error.strerror})")
            return
        self._pidfds[born.key] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._died, spawner, born.key)

    def _died(self, spawner: Spawner, key: int) -> None:
        self._unwatch(key)
        spawner.expect_answer()

    def _unwatch(self, key: int) -> None:
        pidfd = self._pidfds.pop(key, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _ready(self, spawner: Spawner, ready: spawning.SpawnerReady) -> None:
        spawner.ready = ready
        if spawner.children:
            spawner.expect_answer()
        self._early_deaths = 0
        logger.info(
            "ranks will be started by %s%s (torch %s, ready in %.2f s)",
            ready.mode,
            " from the warm process" if spawner.process.is_warm else "",
            ready.torch or "not imported",
            ready.import_seconds,
        )
        if ready.mode == "exec" and self._launch.mode != "exec" and ready.reason:
            self._once.log(f"ranks are started by exec, not by fork: {ready.reason}")

    def _prepare_next(self, spawner: Spawner) -> None:
        """Start a second spawner to replace `spawner`; it is used from the next start of ranks
        after it is ready."""
        if self._closing or self.is_caller:
            return
        if spawner is not self._current or self._next is not None:
            return
        try:
            self._next = self._adopt(start_spawner(self._launch, self._ignored))
        except OSError as error:
            self._once.log(f"no second fork server: {error}")

    def _switch(self) -> None:
        fresh = self._next
        if fresh is None or fresh.ready is None or fresh.ended.is_set():
            return
        self._next, self._current = None, fresh
        self._retire()

    def _retire(self) -> None:
        for spawner in self._all:
            if spawner not in (self._current, self._next) and not spawner.children:
                spawner.quit()

    # ------------------------------------------------------------ exits

    def _reaped(self, spawner: Spawner, code: int) -> None:
        spawner.exit_code = code
        words = f"it was killed by signal {-code}" if code < 0 else f"exit code {code}"
        spawner.drain(spawner.how_it_ended(words))

    def on_close(self, spawner: Spawner, reason: str) -> None:
        self._all.remove(spawner)
        for key in spawner.children if self._all else list(self._pidfds):
            self._unwatch(key)
        if spawner is self._next:
            self._next = None
            if not self._closing:
                self._once.log(
                    f"the replacement fork server failed ({reason}); the current one stays"
                )
        if self._closing or spawner.is_quitting:
            return
        if self.is_caller:
            self._fatal("the calling process has exited")
            return
        self._tasks.start(self._clean_up(spawner, reason), "replacing the fork server")

    async def _clean_up(self, spawner: Spawner, reason: str) -> None:
        """Kill and reap everything that a dead spawner left (its orphans are now our children)."""
        spawner.process.kill()  # if it is alive but violates the protocol
        if spawner.process.swept is not None:  # its guard sweeps
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(spawner.process.swept.wait(), SWEEP_LIMIT)
        if spawner.exit_code in (None, -signal.SIGKILL) and await _is_out_of_memory():
            reason += ", because the kernel was out of memory"
        others = {other.process.pid for other in self._all if other.process.pid is not None}
        stuck = await self._reaper.sweep(keep=others, limit=SWEEP_LIMIT)
        if stuck:
            logger.error("processes %s do not exit after SIGKILL", ", ".join(map(str, stuck)))
        if spawner is self._current:
            if not await self._replace(spawner, reason):
                return
        elif not spawner.children:
            return
        lost, spawner.children = spawner.children, {}
        for child in lost.values():
            child.spawner = None
            child.owner.lost(child)
        self._lost(reason)

    async def _replace(self, spawner: Spawner, reason: str) -> bool:
        """Start a spawner in place of a dead one; returns False, after ending the node, if that is
        useless. A failure to start a process (pids.max, memory) may be temporary."""
        self._early_deaths += spawner.ready is None
        if self._early_deaths >= MAX_EARLY_DEATHS:
            self._fatal(f"the fork server cannot be kept alive ({reason})")
            return False
        loop = asyncio.get_running_loop()
        end = loop.time() + START_LIMIT
        while True:
            try:
                process = start_spawner(self._launch, self._ignored)
            except OSError as error:
                if loop.time() >= end:
                    self._fatal(f"the fork server cannot be started: {error}")
                    return False
                self._once.log(f"no fork server can be started yet: {error}")
                await asyncio.sleep(START_AGAIN)
            else:
                self._current = self._adopt(process)
                return True

    def keep_alive(self, master_lost_timeout: float) -> None:
        """Send keepalives to every spawner, from now on periodically.

        Without them a spawner ends its ranks after KEEPALIVE_LIMIT, or after `master_lost_timeout`
        if that is shorter. By then the master may assume that ranks of a lost node were stopped
        (the fence in `core/rounds`)."""
        limit = max(1.0, min(KEEPALIVE_LIMIT, master_lost_timeout))
        for spawner in self._all:
            spawner.send(spawning.Keepalive(limit))
        self._keepalive.after(limit / KEEPALIVES, self.keep_alive, master_lost_timeout)


async def _is_out_of_memory() -> bool:
    """Whether the kernel has just killed a process because memory was short."""
    now_us = int(time.time() * 1e6)
    try:
        return await in_thread(lambda: oom_watcher().has_risen_near(now_us), name="oom-count")
    except NoThread:
        return False
