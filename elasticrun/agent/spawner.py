"""The conversation with the spawners: orders to them, reports from them, and their deaths.

There is one spawner, or two while `--preload=learn` makes a better one ready in the background and
the older still has processes. Processes are named by keys; the agent never uses a key twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from itertools import count
from typing import Final

from elasticrun.agent.processes import Reaper
from elasticrun.agent.spawner_process import SpawnerProcess, configure_message, start_spawner
from elasticrun.config import AgentConfig
from elasticrun.operator_log import logger
from elasticrun.wire import frames
from elasticrun.wire.spawner import (
    CloseStore,
    FromSpawner,
    Learned,
    Notice,
    Pet,
    Quit,
    SpawnerReady,
    SpawnProbe,
    SpawnRank,
    SpawnSaver,
    SpawnStore,
    Stale,
    ToSpawner,
)

READ_BYTES: Final = 256 * 1024

PET_LIMIT: Final = 90.0
"""A spawner that hears nothing from the agent's loop for so long ends its ranks: a stopped agent
must not leave ranks of an old round at work (COORDINATION 1)."""

PETS: Final = 3
"""How often within that time it is told that the loop lives."""

MAX_EARLY_DEATHS: Final = 3
"""Spawners in a row that died before they were ready; then something is wrong that a fourth will
not mend (a broken torch, no memory)."""

SWEEP_LIMIT: Final = 30.0
"""Seconds until processes that survived SIGKILL are taken for stuck in the kernel."""


class Spawner:
    """One conversation; `heard` gets every message, `lost` the reason of its end, once."""

    def __init__(
        self,
        process: SpawnerProcess,
        heard: Callable[[Spawner, FromSpawner], None],
        lost: Callable[[Spawner, str], None],
    ) -> None:
        self.process = process
        self.keys: set[int] = set()
        """Processes it was told to start and has not reported gone."""
        self.ready: SpawnerReady | None = None
        self.quitting = False
        self.ended = asyncio.Event()
        self._heard = heard
        self._lost = lost
        self._frames = frames.FrameBuffer(FromSpawner)
        self._unsent: bytearray = bytearray()
        self._loop = asyncio.get_running_loop()
        self._channel = process.channel
        self._channel.setblocking(False)
        self._loop.add_reader(self._channel, self._read)

    def send(self, message: ToSpawner) -> None:
        """Queue an order; it is lost if the spawner is (which is told)."""
        if self.ended.is_set():
            return
        self._unsent += frames.encode(message)
        self._flush()

    def quit(self) -> None:
        """Tell it to kill and reap all it has, and to end."""
        if not self.quitting:
            self.quitting = True
            self.send(Quit())

    def end(self, reason: str) -> None:
        """The conversation is over: its process has gone or talks nonsense."""
        if self.ended.is_set():
            return
        self.ended.set()
        self._loop.remove_reader(self._channel)
        self._loop.remove_writer(self._channel)
        self._channel.close()
        self._lost(self, reason)

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._channel.send(self._unsent, socket.MSG_NOSIGNAL)
                del self._unsent[:sent]
        except BlockingIOError:
            self._loop.add_writer(self._channel, self._flush)
            return
        except OSError:
            self._unsent.clear()  # what it still said before it died is read first
        self._loop.remove_writer(self._channel)

    def _read(self) -> None:
        try:
            data = self._channel.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.end(error.strerror or str(error))
            return
        if not data:
            self.end("it was killed, or has crashed")
            return
        try:
            for message in self._frames.feed(data):
                self._heard(self, message)
                if self.ended.is_set():
                    return
        except frames.FrameError as error:
            self.end(f"it said what cannot be understood: {error}")


class Spawners:
    """All spawners of this agent, seen as one.

    `heard(message)` gets what concerns processes; `lost(reason)` is called when a spawner with
    processes has died and all that it had is killed and reaped; `fatal(sentence)` when none can be
    kept alive."""

    def __init__(
        self,
        config: AgentConfig,
        first: SpawnerProcess,
        reaper: Reaper,
        *,
        ignored: tuple[int, ...],
        spared: Callable[[], set[int]],
        heard: Callable[[FromSpawner], None],
        lost: Callable[[str], None],
        fatal: Callable[[str], None],
    ) -> None:
        self._config = config
        self._ignored = ignored
        self._reaper = reaper
        self._spared = spared
        self._deliver = heard
        self._lost = lost
        self._fatal = fatal
        self._keys = count(1)
        self._all: list[Spawner] = []
        self._early_deaths = 0
        self._learned: tuple[str, ...] = ()
        self._told: set[str] = set()
        self._closing = False
        self._petting: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.lives_by_call = first.process is None
        """The caller of elastic_launch is the spawner: it can be neither replaced nor reaped."""
        self._current = self._adopt(first)
        self._next: Spawner | None = None
        if self.lives_by_call:
            self._current.send(configure_message(config))

    # ------------------------------------------------------------ orders

    def new_key(self) -> int:
        return next(self._keys)

    def start(self, order: SpawnRank | SpawnStore | SpawnProbe | SpawnSaver) -> None:
        """Give an order that makes a process, to the newest spawner that is ready."""
        self._switch()
        self._current.keys.add(order.key)
        self._current.send(order)

    def send(self, key: int, message: ToSpawner) -> None:
        """Give an order about a process to the spawner that has it."""
        for spawner in self._all:
            if key in spawner.keys:
                spawner.send(message)
                return

    def close_store(self, key: int) -> None:
        self.send(key, CloseStore(key))

    def owner(self, key: int) -> Spawner | None:
        return next((spawner for spawner in self._all if key in spawner.keys), None)

    def is_old(self, key: int) -> bool:
        """Whether this process is of a spawner whose place another one has taken, or may take."""
        self._switch()
        return self.owner(key) is not self._current

    def forget(self, keys: list[int]) -> None:
        """These processes are gone and swept; a replaced spawner ends when it has none left."""
        for spawner in self._all:
            spawner.keys.difference_update(keys)
        self._retire()

    async def close(self, limit: float) -> None:
        """Tell all to quit and wait for it, `limit` seconds at most."""
        self._closing = True
        if self._petting is not None:
            self._petting.cancel()
        for task in self._tasks:
            task.cancel()
        for spawner in self._all:
            spawner.quit()
        waits = [asyncio.create_task(spawner.ended.wait()) for spawner in self._all]
        if waits:
            _, late = await asyncio.wait(waits, timeout=limit)
            for wait in late:
                wait.cancel()
        for spawner in list(self._all):
            spawner.end("closed")

    # ------------------------------------------------------------ reports

    def _adopt(self, process: SpawnerProcess) -> Spawner:
        spawner = Spawner(process, self._heard, self._ended)
        self._all.append(spawner)
        if process.process is not None:
            self._reaper.watch(process.process, lambda code: self._reaped(spawner, code))
        return spawner

    def _heard(self, spawner: Spawner, message: FromSpawner) -> None:
        if isinstance(message, SpawnerReady):
            self._ready(spawner, message)
        elif isinstance(message, Notice):
            self._tell(message.text)
        elif isinstance(message, Learned):
            self._learn(spawner, message.modules)
        elif isinstance(message, Stale):
            self._tell(message.reason)
            self._prepare_next(spawner)
        else:
            self._deliver(message)

    def _tell(self, text: str) -> None:
        if text not in self._told:  # every life would say it again
            self._told.add(text)
            logger.warning("%s", text)

    def _ready(self, spawner: Spawner, ready: SpawnerReady) -> None:
        spawner.ready = ready
        self._early_deaths = 0
        logger.info(
            "ranks will be started by %s (torch %s, imported in %.2f s)",
            ready.mode,
            ready.torch or "not imported",
            ready.import_seconds,
        )
        if ready.mode == "exec" and self._config.launch != "exec" and ready.reason:
            self._tell(f"ranks are started by exec, not by fork: {ready.reason}")

    def _learn(self, spawner: Spawner, modules: tuple[str, ...]) -> None:
        """Make a spawner ready that has what the ranks import, for the next life."""
        known = set(self._learned)
        # in the order of their imports: many a library does not bear another one
        new = tuple(module for module in dict.fromkeys(modules) if module not in known)
        if not new or spawner is not self._current or self._next is not None:
            return
        self._learned = (*self._learned, *new)
        logger.info("a second fork server imports %d modules that the ranks used", len(new))
        self._prepare_next(spawner)

    def _prepare_next(self, spawner: Spawner) -> None:
        """Start a second spawner in the place of `spawner`; it serves from the life after it is
        ready."""
        if self._closing or self.lives_by_call:
            return
        if spawner is not self._current or self._next is not None:
            return
        try:
            self._next = self._adopt(start_spawner(self._config, self._ignored, self._learned))
        except OSError as error:
            self._tell(f"no second fork server: {error}")

    def _switch(self) -> None:
        fresh = self._next
        if fresh is None or fresh.ready is None or fresh.ended.is_set():
            return
        self._next, self._current = None, fresh
        self._retire()

    def _retire(self) -> None:
        for spawner in self._all:
            if spawner not in (self._current, self._next) and not spawner.keys:
                spawner.quit()

    # ------------------------------------------------------------ deaths

    def _reaped(self, spawner: Spawner, code: int) -> None:
        # What it said before it died still lies in the socket and is read first.
        def check() -> None:
            spawner.end(f"it was killed by signal {-code}" if code < 0 else f"exit code {code}")

        asyncio.get_running_loop().call_later(0.05, check)

    def _ended(self, spawner: Spawner, reason: str) -> None:
        self._all.remove(spawner)
        if spawner is self._next:
            self._next = None
            if not self._closing:
                self._tell(f"the second fork server failed ({reason}); the first one stays")
        if self._closing or spawner.quitting:
            return
        if self.lives_by_call:
            self._fatal("the calling process has gone")
            return
        task = asyncio.create_task(self._bury(spawner, reason))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bury(self, spawner: Spawner, reason: str) -> None:
        """Kill and reap all that a dead spawner left (its orphans are our children by now)."""
        process = spawner.process.process
        if process is not None and process.returncode is None:  # it lives, but talks no sense
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        others = {other.process.pid for other in self._all if other.process.pid is not None}
        stuck = await self._reaper.sweep(keep=self._spared() | others, limit=SWEEP_LIMIT)
        if stuck:
            logger.error("processes %s do not die", ", ".join(map(str, stuck)))
        if spawner is not self._current:
            if spawner.keys:
                self._lost(reason)
        elif self._replace(spawner, reason):
            self._lost(reason)

    def _replace(self, spawner: Spawner, reason: str) -> bool:
        """Start a spawner in the place of a dead one; false (and fatal) if that is no use."""
        self._early_deaths += spawner.ready is None
        if self._early_deaths >= MAX_EARLY_DEATHS:
            self._fatal(f"the fork server cannot be kept alive ({reason})")
            return False
        try:
            process = start_spawner(self._config, self._ignored, self._learned)
        except OSError as error:
            self._fatal(f"the fork server cannot be started: {error}")
            return False
        self._current = self._adopt(process)
        return True

    def pet(self, master_lost_timeout: float) -> None:
        """Tell every spawner, from now on again and again, that this loop lives.

        Without it they end their ranks after PET_LIMIT, and no later than the master may take it
        for granted that ranks which nobody hears of have been stopped (`core.rendezvous`, the
        fence): after `master_lost_timeout`, where that is shorter."""
        if self._petting is not None:
            self._petting.cancel()
        limit = max(1.0, min(PET_LIMIT, master_lost_timeout))
        for spawner in self._all:
            spawner.send(Pet(limit))
        loop = asyncio.get_running_loop()
        self._petting = loop.call_later(limit / PETS, self.pet, master_lost_timeout)
