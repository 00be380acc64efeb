"""The conversation with the spawners: orders to them, reports from them, and their deaths.

There is one spawner, or two while a better one, which has imported what the ranks did, is made
ready in the background and the older still has processes. A process is a `Child` to whoever had it
started; its key stands here and in messages alone, and is never used twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, Protocol

from elasticrun.agent import warm
from elasticrun.agent.boot import Reaper, SpawnerProcess, configure_message, start_spawner
from elasticrun.agent.runtime import Tasks, keep_sending
from elasticrun.agent.warm import WarmChild
from elasticrun.config import AgentConfig, Learning
from elasticrun.operator_log import logger
from elasticrun.system.processes import state
from elasticrun.wire.frames import Connection, FrameError, HungUp
from elasticrun.wire.spawning import (
    Exited,
    FromSpawner,
    Keepalive,
    Learned,
    Notice,
    Ping,
    Pong,
    Quit,
    SendSignal,
    Spawned,
    SpawnerReady,
    SpawnFailed,
    SpawnProbe,
    SpawnRank,
    SpawnSaver,
    SpawnStore,
    Stale,
    Swept,
    ToSpawner,
)

KEEPALIVE_LIMIT: Final = 90.0
"""A spawner that hears nothing from the agent's loop for so long ends its ranks: a stopped agent
must not leave ranks of an old round at work, since a next one may write the same checkpoints."""

KEEPALIVES: Final = 3
"""How often within that time it is told that the loop lives."""

ANSWER_LIMIT: Final = 20.0
"""Seconds for a spawner to answer after an order, or after the death of a process of its own. It is
replaced then, with its ranks: raise it where memory is so short that a fork server stands still."""

STALLED: Final = 1.0
"""A limit that is noticed so many seconds late says that we stood still ourselves (Ctrl-Z, a frozen
machine), and with us, perhaps, the spawner."""

ASIDE_AFTER: Final = 10.0
"""Seconds since the ranks' last news of imports until a second spawner is made ready by itself: a
job that is over by then has no use for one."""

MAX_EARLY_DEATHS: Final = 3
"""Spawners in a row that died before they were ready; then something is wrong that a fourth will
not mend (a broken torch, no memory)."""

SWEEP_LIMIT: Final = 30.0
"""Seconds until processes that survived SIGKILL are taken for stuck in the kernel."""


class Owner(Protocol):
    """Who had a process started. Told in the loop's thread, in the order in which things happen."""

    def heard(self, child: Child, message: FromSpawner) -> None:
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

    def send(self, message: ToSpawner) -> None:
        """Give an order about it; nothing where it is lost."""
        if self.spawner is not None and not self.is_lost:
            self.spawner.send(message)
            self.spawner.expect()

    def signal(self, signum: int, *, alone: bool = False) -> None:
        """Send a signal to its process group; `alone`: to no other process of its group."""
        self.send(SendSignal(self.key, signum, alone))


class Spawner:
    """One conversation; `heard` gets every message, `lost` the reason of its end, once."""

    def __init__(
        self,
        process: SpawnerProcess,
        heard: Callable[[Spawner, FromSpawner], None],
        lost: Callable[[Spawner, str], None],
    ) -> None:
        self.process = process
        self.children: dict[int, Child] = {}
        """By key: what it was told to start and nobody has forgotten yet."""
        self.ready: SpawnerReady | None = None
        self.quitting = False
        self._death = ""
        self.ended = asyncio.Event()
        self._pings = 0
        self._due = 0.0
        self._silence: asyncio.TimerHandle | None = None
        self._heard = heard
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        # Orders may wait as long as torch is imported; who never answers is replaced (`expect`).
        self._connection = Connection(process.channel, FromSpawner, most_bytes=0)
        self._loop.add_reader(self._connection, self._read)

    def send(self, message: ToSpawner) -> None:
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
        self.send(Ping(self._pings))
        if self._silence is None:
            self._wait_for_answer()

    def _wait_for_answer(self) -> None:
        self._hush()
        self._due = self._loop.time() + ANSWER_LIMIT
        self._silence = self._loop.call_at(self._due, self._silent)

    def _hush(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _silent(self) -> None:
        if self._loop.time() > self._due + STALLED:
            self._wait_for_answer()
            return
        stopped = state(self.process.pid or 0) in ("T", "t")
        how = "it stands still (SIGSTOP, a debugger)" if stopped else "it hangs"
        self.end(f"{how}: no answer for {ANSWER_LIMIT:g} s, so it is killed and replaced")

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
        self._hush()
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        self._lost(self, reason)

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
        if self._silence is not None:
            self._wait_for_answer()
        try:
            for message in messages:
                if isinstance(message, Pong):
                    if message.number == self._pings:
                        self._hush()
                    continue
                self._heard(self, message)
                if self.ended.is_set():
                    break
        except FrameError as error:
            self.end(f"it said what cannot be understood: {error}")
        return True


class Spawners:
    """All spawners of this agent, seen as one.

    `lost(reason)` is called when a spawner with processes has died and all that it had is killed
    and reaped; `fatal(sentence)` when none can be kept alive."""

    def __init__(
        self,
        config: AgentConfig,
        first: SpawnerProcess,
        reaper: Reaper,
        *,
        ignored: tuple[int, ...],
        spared: Callable[[], set[int]],
        lost: Callable[[str], None],
        fatal: Callable[[str], None],
    ) -> None:
        self._config = config
        self._ignored = ignored
        self._reaper = reaper
        self._spared = spared
        self._lost = lost
        self._fatal = fatal
        self._keys = count(1)
        self._all: list[Spawner] = []
        self._pidfds: dict[int, int] = {}
        self._early_deaths = 0
        self._learned: tuple[str, ...] = ()
        self._told: set[str] = set()
        self._aside: asyncio.TimerHandle | None = None
        self._closing = False
        self._keepalive: asyncio.TimerHandle | None = None
        self._tasks = Tasks(fatal)
        self.lives_by_call = first.process is None
        """The caller of elastic_launch is the spawner: it can be neither replaced nor reaped."""
        self._current = self._adopt(first)
        self._next: Spawner | None = None
        if self.lives_by_call:
            self._current.send(configure_message(config))

    @property
    def learned(self) -> tuple[str, ...]:
        """The modules that ranks have imported beside what the first spawner had."""
        return self._learned

    # ------------------------------------------------------------ orders

    def start(self, order: SpawnRank | SpawnStore | SpawnProbe | SpawnSaver, owner: Owner) -> Child:
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
        self._forget_aside()
        if not self._config.warm:  # else see `agent.main`: it is started when all is swept
            warm.teach(self._learned)
        if self._keepalive is not None:
            self._keepalive.cancel()
        self._tasks.close()
        for spawner in self._all:
            spawner.quit()
        ends = [spawner.ended for spawner in self._all]
        for spawner in self._all:
            child = spawner.process.process
            if isinstance(child, WarmChild) and child.over is not None:  # its guard goes, too
                ends.append(child.over)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                for end in ends:
                    await end.wait()
        for spawner in list(self._all):
            spawner.end("closed")

    # ------------------------------------------------------------ reports

    def _adopt(self, process: SpawnerProcess) -> Spawner:
        spawner = Spawner(process, self._heard, self._ended)
        self._all.append(spawner)
        if isinstance(process.process, WarmChild):
            process.process.watch(lambda code: self._reaped(spawner, code))
        elif process.process is not None:
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
            if isinstance(message, Spawned):
                self._watch(spawner, message)
            elif isinstance(message, Exited | SpawnFailed):
                self._unwatch(message.key)
            assert not isinstance(message, Pong)  # its own spawner has taken it
            keys = message.keys if isinstance(message, Swept) else (message.key,)
            children = (spawner.children[key] for key in keys if key in spawner.children)
            if (child := next(children, None)) is not None:
                child.owner.heard(child, message)

    def _watch(self, spawner: Spawner, born: Spawned) -> None:
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
            self._tell(f"{what}: no pidfd ({error.strerror})")
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

    def _tell(self, text: str) -> None:
        if text not in self._told:  # every life would say it again
            self._told.add(text)
            logger.warning("%s", text)

    def _ready(self, spawner: Spawner, ready: SpawnerReady) -> None:
        spawner.ready = ready
        if spawner.children:
            spawner.expect()
        self._early_deaths = 0
        warmed = isinstance(spawner.process.process, WarmChild)
        logger.info(
            "ranks will be started by %s%s (torch %s, ready in %.2f s)",
            ready.mode,
            " from the warm process" if warmed else "",
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
        self._forget_aside()
        if self._config.preload_learn is Learning.AT_ONCE:
            self._prepare_next(spawner)
        else:
            loop = asyncio.get_running_loop()
            self._aside = loop.call_later(ASIDE_AFTER, self._prepare_next, spawner)

    def _prepare_next(self, spawner: Spawner) -> None:
        """Start a second spawner in the place of `spawner`; it serves from the life after it is
        ready."""
        if self._closing or self.lives_by_call:
            return
        if spawner is not self._current or self._next is not None:
            return
        aside = self._config.preload_learn is Learning.ASIDE
        logger.info(
            "a second fork server imports %d modules that the ranks used", len(self._learned)
        )
        try:
            self._next = self._adopt(
                start_spawner(self._config, self._ignored, self._learned, aside=aside)
            )
        except OSError as error:
            self._tell(f"no second fork server: {error}")

    def _forget_aside(self) -> None:
        if self._aside is not None:
            self._aside.cancel()
            self._aside = None

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

    def _ended(self, spawner: Spawner, reason: str) -> None:
        self._all.remove(spawner)
        for key in spawner.children if self._all else list(self._pidfds):
            self._unwatch(key)
        if spawner is self._next:
            self._next = None
            if not self._closing:
                self._tell(f"the second fork server failed ({reason}); the first one stays")
        if self._closing or spawner.quitting:
            return
        if self.lives_by_call:
            self._fatal("the calling process has gone")
            return
        self._tasks.start(self._bury(spawner, reason), "replacing the fork server")

    async def _bury(self, spawner: Spawner, reason: str) -> None:
        """Kill and reap all that a dead spawner left (its orphans are our children by now)."""
        process = spawner.process.process
        if process is not None and process.returncode is None:  # it lives, but talks no sense
            if isinstance(process, WarmChild):
                process.kill()  # by its pidfd: its guard may have reaped it
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        if isinstance(process, WarmChild) and process.over is not None:  # its guard sweeps
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.over.wait(), SWEEP_LIMIT)
        others = {other.process.pid for other in self._all if other.process.pid is not None}
        stuck = await self._reaper.sweep(keep=self._spared() | others, limit=SWEEP_LIMIT)
        if stuck:
            logger.error("processes %s do not die", ", ".join(map(str, stuck)))
        if spawner is self._current:
            if not self._replace(spawner, reason):
                return
        elif not spawner.children:
            return
        lost, spawner.children = spawner.children, {}
        for child in lost.values():
            child.spawner = None
            child.owner.lost(child)
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

    def keep_alive(self, master_lost_timeout: float) -> None:
        """Tell every spawner, from now on again and again, that this loop lives.

        Without it they end their ranks after KEEPALIVE_LIMIT, and no later than the master may take
        it for granted that ranks which nobody hears of have been stopped (`core/rounds`, the
        fence): after `master_lost_timeout`, where that is shorter."""
        if self._keepalive is not None:
            self._keepalive.cancel()
        limit = max(1.0, min(KEEPALIVE_LIMIT, master_lost_timeout))
        for spawner in self._all:
            spawner.send(Keepalive(limit))
        loop = asyncio.get_running_loop()
        self._keepalive = loop.call_later(limit / KEEPALIVES, self.keep_alive, master_lost_timeout)
