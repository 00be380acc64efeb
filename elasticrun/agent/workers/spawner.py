"""The conversation with the spawners: orders to them, reports from them, and their deaths.

There is one spawner, or two while the older one has processes and a newer one is made ready, since
a file has changed that the older one imported. A process is a `Child` to whoever had it
started; its key stands here and in messages alone, and is never used twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, Protocol

from elasticrun.agent.boot import SpawnerProcess, configure_message, start_spawner
from elasticrun.agent.context import NodeContext
from elasticrun.agent.runtime import Once, Patience, Tasks, Timer, keep_sending
from elasticrun.agent.warm import WarmChild
from elasticrun.host.log import logger
from elasticrun.host.system.processes import how_silent
from elasticrun.wire import spawning
from elasticrun.wire.frames import Connection, FrameError, HungUp

KEEPALIVE_LIMIT: Final = 90.0
"""A spawner that hears nothing from the agent's loop for so long ends its ranks: a stopped agent
must not leave ranks of an old round at work, since a next one may write the same checkpoints."""

KEEPALIVES: Final = 3
"""How often within that time it is told that the loop lives."""

ANSWER_LIMIT: Final = 20.0
"""Seconds for a spawner to answer after an order, or after the death of a process of its own. It is
replaced then, with its ranks: raise it where memory is so short that a fork server stands still."""

MAX_EARLY_DEATHS: Final = 3
"""Spawners in a row that died before they were ready; then something is wrong that a fourth will
not mend (a broken torch, no memory)."""

START_LIMIT: Final = 30.0
"""Seconds for which the start of a spawner in the place of a dead one is tried."""

START_AGAIN: Final = 1.0
"""Seconds between two tries."""

SWEEP_LIMIT: Final = 30.0
"""Seconds until processes that survived SIGKILL are taken for stuck in the kernel."""


class Owner(Protocol):
    """Who had a process started. Told in the loop's thread, in the order in which things happen."""

    def heard(self, child: Child, message: spawning.FromSpawner) -> None:
        """What a spawner says of the child: Spawned, then its own words, Exited or SpawnFailed."""

    def lost(self, child: Child) -> None:
        """Its spawner has died; the child was killed and reaped, and no more is heard of it."""


@dataclass(eq=False)
class Child:
    """A process that a spawner was told to start."""

    key: int
    owner: Owner
    spawner: Spawner | None
    """None once it is lost or forgotten."""

    @property
    def is_lost(self) -> bool:
        """Whether nobody hears of it any more."""
        return self.spawner is None or self.spawner.ended.is_set()

    def send(self, message: spawning.ToSpawner) -> None:
        """Give an order about it; nothing where it is lost."""
        if self.spawner is not None and not self.is_lost:
            self.spawner.send(message)
            self.spawner.expect()

    def signal(self, signum: int, *, alone: bool = False) -> None:
        """Send a signal to its process group; `alone`: to no other process of its group."""
        self.send(spawning.SendSignal(self.key, signum, alone))


class Spawner:
    """One conversation; its owner hears every message, and the reason of its end, once."""

    def __init__(self, process: SpawnerProcess, owner: Spawners) -> None:
        self.process = process
        self.children: dict[int, Child] = {}
        """By key: what it was told to start and nobody has forgotten yet."""
        self.ready: spawning.SpawnerReady | None = None
        self.quitting = False
        self._death = ""
        self.ended = asyncio.Event()
        self._pings = 0
        self._silence = Patience()
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        # Orders may wait as long as torch is imported; who never answers is replaced (`expect`).
        self._connection = Connection(process.channel, spawning.FromSpawner, most_bytes=0)
        self._loop.add_reader(self._connection, self._read)

    def send(self, message: spawning.ToSpawner) -> None:
        """Queue an order; it is lost if the spawner is (which is told)."""
        if self.ended.is_set():
            return
        self._connection.send(message)
        keep_sending(self._loop, self._connection)

    def expect(self) -> None:
        """It has something to do, and answers within ANSWER_LIMIT or is given up; one that is not
        ready yet imports torch, which may take as long as it takes."""
        if self.ready is None or self.process.process is None or self.quitting:
            return
        self._pings += 1
        self.send(spawning.Ping(self._pings))
        if not self._silence.is_set:
            self._wait_for_answer()

    def _wait_for_answer(self) -> None:
        self._silence.wait(ANSWER_LIMIT, self._silent)

    def _silent(self) -> None:
        how = how_silent(self.process.pid or 0)
        self.end(f"{how}: no answer for {ANSWER_LIMIT:g} s, so it is killed and replaced")

    def quit(self) -> None:
        """Tell it to kill and reap all it has, and to end. One that imports yet has nothing, and
        would hear it when it is ready: it is killed."""
        if not self.quitting:
            self.quitting = True
            self.send(spawning.Quit())
            if self.ready is None:
                self.process.kill()

    def end(self, reason: str) -> None:
        """The conversation is over: its process has gone or talks nonsense."""
        if self.ended.is_set():
            return
        self.ended.set()
        self._silence.cancel()
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        self._owner.ended(self, reason)

    def hear_out(self, reason: str) -> None:
        """Its process has been reaped: all that it has said lies in the socket by now."""
        self._death = reason
        while not self.ended.is_set() and self._read():
            pass
        self.end(reason)

    def how(self, seen: str) -> str:
        """How its end has come, as far as is known; `seen`: what its socket or the kernel says."""
        process = self.process.process
        lost_guard = isinstance(process, WarmChild) and process.unguarded
        return "its guard was killed" if lost_guard else seen

    def _read(self) -> bool:
        """Take in what has come; whether there was anything."""
        try:
            messages = self._connection.receive()
        except HungUp:
            self.end(self._death or self.how("it was killed, or has crashed"))
            return False
        except OSError as error:
            self.end(self._death or self.how(error.strerror or str(error)))
            return False
        if messages is None:
            return False
        if self._silence.is_set:
            self._wait_for_answer()
        try:
            for message in messages:
                if isinstance(message, spawning.Pong):
                    if message.number == self._pings:
                        self._silence.cancel()
                    continue
                self._owner.heard(self, message)
                if self.ended.is_set():
                    break
        except FrameError as error:
            self.end(f"it said what cannot be understood: {error}")
        return True


class Spawners:
    """All spawners of this agent, seen as one. The node ends when none can be kept alive.

    `lost(reason)` is called when a spawner with processes has died and all that it had is killed
    and reaped; `ignored` are the signals that this process was born ignoring."""

    def __init__(
        self,
        node: NodeContext,
        first: SpawnerProcess,
        ignored: tuple[int, ...],
        lost: Callable[[str], None],
    ) -> None:
        self._config = node.config
        self._ignored = ignored
        self._reaper = node.reaper
        self._lost = lost
        self._fatal = node.fatal
        self._keys = count(1)
        self._all: list[Spawner] = []
        self._pidfds: dict[int, int] = {}
        self._early_deaths = 0
        self._told = Once()  # every life would say it again
        self._closing = False
        self._keepalive = Timer()
        self._tasks = Tasks(node.fatal)
        self.lives_by_call = first.process is None
        """The caller of elastic_launch is the spawner: it can be neither replaced nor reaped."""
        self._current = self._adopt(first)
        self._next: Spawner | None = None
        if self.lives_by_call:
            self._current.send(configure_message(node.config))

    # ------------------------------------------------------------ orders

    def start(
        self,
        order: spawning.SpawnRank | spawning.SpawnStore | spawning.SpawnProbe | spawning.SpawnSaver,
        owner: Owner,
    ) -> Child:
        """Give an order that makes a process, to the newest spawner that is ready. The key in the
        order is set here."""
        self._switch()
        child = Child(next(self._keys), owner, self._current)
        self._current.children[child.key] = child
        self._current.send(replace(order, key=child.key))
        self._current.expect()
        return child

    def is_old(self, child: Child) -> bool:
        """Whether this process is of a spawner whose place another one has taken, or may take."""
        self._switch()
        return child.spawner is not self._current

    def forget(self, *children: Child) -> None:
        """These processes are gone and swept; a replaced spawner ends when it has none left."""
        for child in children:
            if child.spawner is not None:
                del child.spawner.children[child.key]
                child.spawner = None
        self._retire()

    async def close(self, limit: float) -> None:
        """Tell all to quit and wait for it, `limit` seconds at most."""
        self._closing = True
        self._keepalive.cancel()
        self._tasks.close()
        for spawner in self._all:
            spawner.quit()
        ends = [spawner.ended for spawner in self._all]
        for spawner in self._all:
            if spawner.process.over is not None:  # its guard goes, too
                ends.append(spawner.process.over)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                for end in ends:
                    await end.wait()
        for spawner in list(self._all):
            spawner.end("closed")

    # ------------------------------------------------------------ reports

    def _adopt(self, process: SpawnerProcess) -> Spawner:
        spawner = Spawner(process, self)
        self._all.append(spawner)
        process.watch(self._reaper, lambda code: self._reaped(spawner, code))
        return spawner

    def heard(self, spawner: Spawner, message: spawning.FromSpawner) -> None:
        """Called by a spawner, as `ended` is."""
        if isinstance(message, spawning.SpawnerReady):
            self._ready(spawner, message)
        elif isinstance(message, spawning.Notice):
            self._told.tell(message.text)
        elif isinstance(message, spawning.Stale):
            self._told.tell(message.reason)
            self._prepare_next(spawner)
        else:
            if isinstance(message, spawning.Spawned):
                self._watch(spawner, message)
            elif isinstance(message, spawning.Exited | spawning.SpawnFailed):
                self._unwatch(message.key)
            assert not isinstance(message, spawning.Pong)  # its own spawner has taken it
            if isinstance(message, spawning.Swept | spawning.Lingering):
                keys = message.keys
            else:
                keys = (message.key,)
            children = (spawner.children[key] for key in keys if key in spawner.children)
            if (child := next(children, None)) is not None:
                child.owner.heard(child, message)

    def _watch(self, spawner: Spawner, born: spawning.Spawned) -> None:
        """Hear of its death from the kernel, too: a spawner that stands still tells of none."""
        if self.lives_by_call:
            return
        try:
            pidfd = os.pidfd_open(born.pid)
        except ProcessLookupError:
            spawner.expect()
            return
        except OSError as error:
            what = "a fork server that stands still is not noticed by the death of a rank"
            self._told.tell(f"{what}: no pidfd ({error.strerror})")
            return
        self._pidfds[born.key] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._died, spawner, born.key)

    def _died(self, spawner: Spawner, key: int) -> None:
        self._unwatch(key)
        spawner.expect()

    def _unwatch(self, key: int) -> None:
        pidfd = self._pidfds.pop(key, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _ready(self, spawner: Spawner, ready: spawning.SpawnerReady) -> None:
        spawner.ready = ready
        if spawner.children:
            spawner.expect()
        self._early_deaths = 0
        logger.info(
            "ranks will be started by %s%s (torch %s, ready in %.2f s)",
            ready.mode,
            " from the warm process" if spawner.process.is_warm else "",
            ready.torch or "not imported",
            ready.import_seconds,
        )
        if ready.mode == "exec" and self._config.launch != "exec" and ready.reason:
            self._told.tell(f"ranks are started by exec, not by fork: {ready.reason}")

    def _prepare_next(self, spawner: Spawner) -> None:
        """Start a second spawner in the place of `spawner`; it serves from the life after it is
        ready."""
        if self._closing or self.lives_by_call:
            return
        if spawner is not self._current or self._next is not None:
            return
        try:
            self._next = self._adopt(start_spawner(self._config, self._ignored))
        except OSError as error:
            self._told.tell(f"no second fork server: {error}")

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

    # ------------------------------------------------------------ deaths

    def _reaped(self, spawner: Spawner, code: int) -> None:
        words = f"it was killed by signal {-code}" if code < 0 else f"exit code {code}"
        spawner.hear_out(spawner.how(words))

    def ended(self, spawner: Spawner, reason: str) -> None:
        self._all.remove(spawner)
        for key in spawner.children if self._all else list(self._pidfds):
            self._unwatch(key)
        if spawner is self._next:
            self._next = None
            if not self._closing:
                self._told.tell(f"the second fork server failed ({reason}); the first one stays")
        if self._closing or spawner.quitting:
            return
        if self.lives_by_call:
            self._fatal("the calling process has gone")
            return
        self._tasks.start(self._bury(spawner, reason), "replacing the fork server")

    async def _bury(self, spawner: Spawner, reason: str) -> None:
        """Kill and reap all that a dead spawner left (its orphans are our children by now)."""
        spawner.process.kill()  # where it lives, but talks no sense
        if spawner.process.over is not None:  # its guard sweeps
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(spawner.process.over.wait(), SWEEP_LIMIT)
        others = {other.process.pid for other in self._all if other.process.pid is not None}
        stuck = await self._reaper.sweep(keep=others, limit=SWEEP_LIMIT)
        if stuck:
            logger.error("processes %s do not die", ", ".join(map(str, stuck)))
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
        """Start a spawner in the place of a dead one; false (and fatal) if that is no use. What is
        in the way of a process now (pids.max, memory) may be gone in a moment."""
        self._early_deaths += spawner.ready is None
        if self._early_deaths >= MAX_EARLY_DEATHS:
            self._fatal(f"the fork server cannot be kept alive ({reason})")
            return False
        loop = asyncio.get_running_loop()
        end = loop.time() + START_LIMIT
        while True:
            try:
                process = start_spawner(self._config, self._ignored)
            except OSError as error:
                if loop.time() >= end:
                    self._fatal(f"the fork server cannot be started: {error}")
                    return False
                self._told.tell(f"no fork server can be started yet: {error}")
                await asyncio.sleep(START_AGAIN)
            else:
                self._current = self._adopt(process)
                return True

    def keep_alive(self, master_lost_timeout: float) -> None:
        """Tell every spawner, from now on again and again, that this loop lives.

        Without it they end their ranks after KEEPALIVE_LIMIT, and no later than the master may take
        it for granted that ranks which nobody hears of have been stopped (`core/rounds`, the
        fence): after `master_lost_timeout`, where that is shorter."""
        limit = max(1.0, min(KEEPALIVE_LIMIT, master_lost_timeout))
        for spawner in self._all:
            spawner.send(spawning.Keepalive(limit))
        self._keepalive.after(limit / KEEPALIVES, self.keep_alive, master_lost_timeout)
