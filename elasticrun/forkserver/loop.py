"""The server's loop: one thread, one queue of orders, deaths by SIGCHLD, deadlines by name."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

from elasticrun.forkserver import sweep
from elasticrun.forkserver.nursery import Nursery
from elasticrun.forkserver.prepare import Prepared
from elasticrun.forkserver.protocol import Conversation, Lost
from elasticrun.wire.spawner import (
    CloseStore,
    Notice,
    Pet,
    Ping,
    Pong,
    Quit,
    SendSignal,
    SpawnProbe,
    SpawnRank,
    SpawnSaver,
    SpawnStore,
    Sweep,
    Swept,
    ToSpawner,
)

EXIT_CONFUSED = 2
"""Exit code where the agent said something that cannot be understood."""
EXIT_DEFECT = 70
"""Exit code after an exception of our own that nobody expected (sysexits' EX_SOFTWARE)."""
EXIT_STUCK = 75
"""Exit code where the kernel would not let a process die (`config.EXIT_BAD_NODE`)."""

END_LIMIT = 30.0
"""Seconds until processes that survive SIGKILL are left to the kernel."""


class Server:
    """Carries out orders until Quit, the end of the conversation or of its parent, or silence after
    a Pet."""

    def __init__(self, talk: Conversation, prepared: Prepared) -> None:
        self._talk = talk
        self._parent = os.getppid()
        self._sweeper = sweep.Sweeper()
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._nursery = Nursery(prepared, talk.send, self._in_child)
        self._pet_until: float | None = None
        self._pet_limit = 0.0
        self._selector = selectors.PollSelector()  # has no descriptor that a fork would share

    def run(self, early: list[ToSpawner]) -> NoReturn:
        """Serve; ends the process. `early` came together with the first message."""
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGCONT, lambda *_: None)  # our parent's death (`spawn_rank`)
        self._selector.register(self._talk.fileno(), selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        try:
            for order in early:
                self._obey(order)
            self._reap()
            while True:
                self._turn()
        except Lost as lost:
            self._end(str(lost), 1 if lost.clean else EXIT_CONFUSED)
        except Exception as defect:  # ours; ranks must not outlive it
            sys.__excepthook__(type(defect), defect, defect.__traceback__)
            self._end("this is a defect of elasticrun; please report it", EXIT_DEFECT)

    # ------------------------------------------------------------ one turn

    def _turn(self) -> None:
        writing = selectors.EVENT_WRITE if self._talk.wants_to_write else 0
        self._selector.modify(self._talk.fileno(), selectors.EVENT_READ | writing)
        with self._watched(self._nursery.waiting_for()):
            ready = [key.fd for key, _ in self._selector.select(self._patience())]
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
            if os.getppid() != self._parent:  # the agent, or a guard, below which nobody sweeps now
                self._end("", 1)
        if self._talk.fileno() in ready:
            self._talk.flush()
            for order in self._talk.read():
                self._obey(order)
        self._nursery.read_helpers(ready)
        self._reap()
        self._nursery.tick(time.monotonic())
        self._check_pet(bool(ready))

    @contextlib.contextmanager
    def _watched(self, descriptors: list[int]) -> Iterator[None]:
        for descriptor in descriptors:
            self._selector.register(descriptor, selectors.EVENT_READ)
        yield
        for descriptor in descriptors:
            self._selector.unregister(descriptor)

    def _patience(self) -> float | None:
        times = [
            self._sweeper.next_deadline(),
            self._nursery.next_deadline(),
            self._pet_until,
        ]
        due = min((t for t in times if t is not None), default=None)
        return None if due is None else max(0.0, due - time.monotonic())

    def _check_pet(self, heard: bool) -> None:
        """Silence counts only after a turn in which the socket was looked at and was empty."""
        if self._pet_until is None or heard or time.monotonic() < self._pet_until:
            return
        self._pet_until = None
        self._nursery.kill_ranks()
        self._talk.send(
            Notice(
                f"nothing was heard of the agent for {self._pet_limit:g} s; its ranks were ended"
            )
        )

    def _reap(self) -> None:
        self._nursery.read_pages()
        deaths = sweep.reap_all()
        for pid, status in deaths:
            self._nursery.buried(pid, os.waitstatus_to_exitcode(status))
        for done in self._sweeper.look(self._nursery.living(), time.monotonic()):
            self._nursery.forget(done.keys)
            self._talk.send(Swept(done.keys, done.stuck))

    # ------------------------------------------------------------ orders

    def _obey(self, order: ToSpawner) -> None:
        match order:
            case SpawnRank():
                self._nursery.spawn_rank(order)
            case SpawnStore():
                self._nursery.spawn_store(order)
            case SpawnProbe():
                self._nursery.spawn_probe(order)
            case SpawnSaver():
                self._nursery.spawn_saver(order)
            case SendSignal():
                self._nursery.send_signal(order.key, order.signal, alone=order.alone)
            case CloseStore():
                self._nursery.send_signal(order.key, signal.SIGKILL)
            case Sweep():
                groups = self._nursery.groups(order.keys)
                self._sweeper.start(order.keys, groups, order.grace, time.monotonic())
                self._reap()
            case Pet():
                self._pet_limit = order.limit
                self._pet_until = time.monotonic() + order.limit if order.limit > 0 else None
            case Ping():
                self._talk.send(Pong(order.number))
            case Quit():
                self._end("", 0)
            case _:
                raise Lost(f"a {type(order).__name__} message came in mid-conversation")

    def _in_child(self) -> None:
        """Let go, in a fresh fork, of everything that is the server's."""
        signal.set_wakeup_fd(-1)
        self._talk.close()
        os.close(self._wake)
        os.close(self._woken)

    def _end(self, reason: str, code: int) -> NoReturn:
        stuck = sweep.kill_everything(END_LIMIT)
        if reason:
            complain(reason)
        if stuck:
            complain(f"processes that the kernel will not let die: {' '.join(map(str, stuck))}")
        os._exit(EXIT_STUCK if stuck and not code else code)


def complain(reason: str) -> None:
    """One sentence on stderr, if there still is one."""
    with contextlib.suppress(OSError):
        print(f"elasticrun fork server: {reason}", file=sys.stderr)
