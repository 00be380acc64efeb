"""The fork server: its command line, its preparation, and its event loop until the agent exits.

It has one thread, which waits for orders, for SIGCHLD and for the next deadline, and for nothing
else.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NoReturn

from elasticrun.forkserver.child import Inherited
from elasticrun.forkserver.children import Children
from elasticrun.forkserver.helpers.stopped import STOPPED_LIMIT, StoppedStores
from elasticrun.forkserver.lazy_imports import Baseline
from elasticrun.forkserver.prepare import Poisoned, Prepared, Stock, options, prepare
from elasticrun.host.system import processes, sweep
from elasticrun.host.system.processes import memory_file
from elasticrun.host.system.title import FORK_SERVER, clear_argc_argv, set_title
from elasticrun.wire.frames import Connection, FrameBuffer, FrameError, NotRead, encode, peer_of
from elasticrun.wire.spawning import (
    SHIELDED,
    CloseStore,
    Configure,
    DropStandby,
    FromSpawner,
    Keepalive,
    Lingering,
    Notice,
    Ping,
    Pong,
    Quit,
    SendSignal,
    SpawnerReady,
    SpawnProbe,
    SpawnRank,
    SpawnSaver,
    SpawnStandby,
    SpawnStore,
    SweepOrder,
    Swept,
    ToSpawner,
)

EXIT_CONFUSED: Final = 2
"""Exit code after an invalid message from the agent."""
EXIT_DEFECT: Final = 70
"""Exit code after an unexpected exception in our own code (EX_SOFTWARE in sysexits.h)."""
EXIT_STUCK: Final = 75
"""Exit code if the kernel did not let a process die (`config.EXIT_BAD_NODE`)."""

END_LIMIT: Final = 30.0
"""Seconds after which processes that survive SIGKILL are left to the kernel."""


class AgentLost(Exception):
    """The agent sent an invalid message (the text is a sentence) or has exited (no text)."""


class Conversation:
    """The connection to the agent, over our end of the socketpair; raises AgentLost when it
    ends."""

    def __init__(self, sock: socket.socket) -> None:
        self.connection = Connection(sock, ToSpawner)

    def read(self, *, wait: bool = False) -> Iterator[ToSpawner]:
        """The messages available now; with `wait`, block until data arrive."""
        try:
            yield from (self.connection.wait if wait else self.connection.receive)() or ()
        except FrameError as error:
            raise AgentLost(str(error)) from None
        except ConnectionError:
            cut = "the agent's last frame is truncated" if self.connection.is_cut else ""
            raise AgentLost(cut) from None

    def send(self, report: FromSpawner) -> None:
        """Queue a report and write as much as the socket accepts."""
        try:
            self.connection.send(report)
        except NotRead:
            raise AgentLost("the agent does not read its reports") from None


class Server:
    """Carries out orders until Quit, until the connection closes or the parent dies, or until a
    Keepalive expires."""

    def __init__(self, talk: Conversation, prepared: Prepared) -> None:
        self._talk = talk
        self._parent = os.getppid()
        self._sweeper = sweep.Sweeper()
        self._stopped = StoppedStores()
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._children = Children(prepared, talk, self._in_child)
        self._keepalive_until: float | None = None
        self._keepalive_limit = 0.0
        self._selector = selectors.PollSelector()  # poll has no descriptor that a fork would share

    def run(self, early: list[ToSpawner]) -> NoReturn:
        """Run the event loop; ends the process. `early` are messages that arrived with the first
        one."""
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGCONT, lambda *_: None)  # our parent has died (`spawn_rank`)
        self._selector.register(self._talk.connection, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        try:
            for order in early:
                self._obey(order)
            self._reap()
            while True:
                self._turn()
        except AgentLost as lost:
            self._exit(str(lost), EXIT_CONFUSED if str(lost) else 1)
        except Exception as defect:  # our bug; ranks must not outlive the server
            sys.__excepthook__(type(defect), defect, defect.__traceback__)
            self._exit("this is a bug in elasticrun; please report it", EXIT_DEFECT)

    def _turn(self) -> None:
        connection = self._talk.connection
        writing = selectors.EVENT_WRITE if connection.unsent else 0
        self._selector.modify(connection, selectors.EVENT_READ | writing)
        pipes = self._children.pipes()
        for pipe in pipes:
            self._selector.register(pipe, selectors.EVENT_READ)
        parts = (self._sweeper, self._stopped)
        times = [*(part.next_deadline() for part in parts), self._keepalive_until]
        due = min((t for t in times if t is not None), default=None)
        patience = None if due is None else max(0.0, due - time.monotonic())
        ready = [key.fd for key, _ in self._selector.select(patience)]
        for pipe in pipes:
            self._selector.unregister(pipe)
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
            if os.getppid() != self._parent:  # the agent or guard has died: nobody else sweeps
                self._exit("", 1)
        if connection.fileno() in ready:
            connection.flush()
            for order in self._talk.read():
                self._obey(order)
            self._children.standbys.end_batch()
        self._children.read_helpers(ready)
        self._reap()
        if not ready:  # silence counts only if the socket was polled and empty
            self._check_keepalive()

    def _check_keepalive(self) -> None:
        if self._keepalive_until is None or time.monotonic() < self._keepalive_until:
            return
        self._keepalive_until = None
        self._children.kill_ranks()
        silence = f"no keepalive from the agent for {self._keepalive_limit:g} s"
        self._talk.send(Notice(f"{silence}; its ranks were ended"))

    def _reap(self) -> None:
        self._children.read_pages()
        for pid, status in sweep.reap_all():
            self._children.reaped(pid, os.waitstatus_to_exitcode(status))
        if self._stopped.check(self._children.stores(), time.monotonic()):
            stood = f"a store host that was stopped (SIGSTOP) for {STOPPED_LIMIT:g} s"
            self._talk.send(Notice(f"{stood} is continued: ranks may wait for it"))
        for event in self._sweeper.advance(self._children.living(), time.monotonic()):
            if isinstance(event, sweep.SweepLeftovers):
                commands = tuple(map(processes.command, event.pids))
                self._talk.send(Lingering(event.keys, event.pids, commands, event.ending))
            else:
                self._children.forget(event.keys)
                self._talk.send(Swept(event.keys, event.stuck))

    def _obey(self, order: ToSpawner) -> None:
        match order:
            case SpawnRank():
                self._children.spawn_rank(order)
            case SpawnStandby():
                self._children.spawn_standby(order)
            case DropStandby():
                self._children.standbys.drop_key(order.key)
            case SpawnStore() | SpawnProbe() | SpawnSaver():
                self._children.spawn_helper(order)
            case SendSignal():
                self._children.send_signal(order.key, order.signal, alone=order.alone)
            case CloseStore():
                self._children.send_signal(order.key, signal.SIGKILL)
            case SweepOrder():
                groups = self._children.groups(order.keys)
                now = time.monotonic()
                self._sweeper.start(order.keys, groups, order.grace, now, linger=order.linger)
                self._reap()
            case Keepalive():
                self._keepalive_limit = order.limit
                self._keepalive_until = time.monotonic() + order.limit if order.limit > 0 else None
            case Ping():
                self._talk.send(Pong(order.number))
            case Quit():
                self._exit("", 0)
            case _:
                raise AgentLost(f"unexpected {type(order).__name__} message")

    def _in_child(self) -> None:
        """In a fresh fork: close everything that belongs to the server."""
        signal.set_wakeup_fd(-1)
        self._talk.connection.close()
        os.close(self._wake)
        os.close(self._woken)

    def _exit(self, reason: str, code: int) -> NoReturn:
        if os.getppid() == self._parent:  # wake a stopped guard, so that it ends with us
            with contextlib.suppress(OSError):
                os.kill(self._parent, signal.SIGCONT)
        stuck = sweep.kill_everything(END_LIMIT)
        if reason:
            complain(reason)
        if stuck:
            complain(f"processes that the kernel will not let die: {' '.join(map(str, stuck))}")
        os._exit(EXIT_STUCK if stuck and not code else code)


def complain(reason: str) -> None:
    """Write one sentence to stderr, if it is still open."""
    with contextlib.suppress(OSError):
        print(f"elasticrun fork server: {reason}", file=sys.stderr)


def run(words: Sequence[str], modules: Collection[str]) -> NoReturn:
    """Run until the agent has exited; raises BecomeRank in forked children."""
    for signum in SHIELDED:
        signal.signal(signum, signal.SIG_IGN)
    clear_argc_argv()
    stock = None
    if words and words[0].startswith("--warm="):
        from elasticrun.forkserver.warm.keeper import keep

        words, stock = keep(words, modules)  # returns after an agent has requested a fork server
    given = options(words)
    try:
        ignored, blocked = (
            frozenset(int(number) for number in given[name][0].split(",") if number)
            for name in ("ignored-signals", "blocked-signals")
        )
        parent = int(given["parent"][0])
        kept = int(given.get("configure-fd", ["-1"])[0])
        sock = socket.socket(fileno=int(given["fd"][0]))
    except (KeyError, ValueError, OSError):
        complain("this program is started by elasticrun and speaks to it alone")
        sys.exit(EXIT_CONFUSED)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    processes.set_name(b"elasticrun-fork")
    set_title(FORK_SERVER)
    processes.become_subreaper()
    sock.set_inheritable(False)
    gc.disable()  # imports create hardly any garbage; ranks turn the collector on
    baseline = stock.baseline if stock else Baseline(modules)
    baseline.exits.keep_back()
    inherited = Inherited(os.getpid(), peer_of(sock)[0], ignored, blocked, baseline)
    talk = Conversation(sock)
    try:
        configure, early = _first_message(talk, kept)
        prepared = _prepare(configure, inherited, given.get("refused", []), sock, stock)
        talk.send(
            SpawnerReady(
                pid=os.getpid(),
                mode=prepared.mode,
                reason=prepared.reason,
                torch=prepared.torch,
                import_seconds=prepared.import_seconds,
            )
        )
        for remark in prepared.remarks:
            talk.send(Notice(remark))
    except AgentLost as lost:
        if not str(lost):
            sys.exit(1)
        complain(str(lost))
        sys.exit(EXIT_CONFUSED)
    if prepared.mode == "fork":
        prepared.hidden.hide()
    gc.freeze()  # keeps the collector from touching, and so copying, shared pages
    Server(talk, prepared).run(early)


def _first_message(talk: Conversation, kept_fd: int) -> tuple[Configure, list[ToSpawner]]:
    """The Configure message, and messages that arrived with it. Read from `kept_fd` after an exec
    of our own."""
    messages: list[ToSpawner] = []
    if kept_fd >= 0:
        with open(kept_fd, "rb") as kept:
            messages += FrameBuffer(ToSpawner).feed(kept.read())
    while not messages:
        messages += talk.read(wait=True)
    first, *early = messages
    if not isinstance(first, Configure):
        raise AgentLost(f"the first message is a {type(first).__name__} and not a Configure")
    return first, early


def _prepare(
    configure: Configure,
    inherited: Inherited,
    refused: Sequence[str],
    sock: socket.socket,
    stock: Stock | None,
) -> Prepared:
    """Prepare; if a module has spoiled this process, exec the server again without it. `refused`:
    modules refused so far, each as `MODULE:REASON`."""
    names = [word.partition(":")[0] for word in refused]
    try:
        prepared = prepare(configure, inherited, names, stock)
    except Poisoned as poison:
        kept = memory_file("configure", 0)
        os.write(kept, encode(configure))
        os.lseek(kept, 0, os.SEEK_SET)
        sock.set_inheritable(True)
        words = [w for w in sys.orig_argv if not w.startswith("--configure-fd=")]
        words += [f"--configure-fd={kept}", f"--refused={poison.module}:{poison.reason}"]
        os.execve(sys.executable, words, inherited.baseline.environ)
    for word in refused:
        name, _, reason = word.partition(":")
        prepared.remarks.append(f"{name} is not preloaded: {reason}")
    return prepared
