"""The warm process: imports torch once, then serves requests on its socket until it is idle too
long.

A fork server forked from it takes over its imports (`Stock`) and continues exactly like an exec'd
one. It imports torch and nothing else, because imports of one job must not reach another.
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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from elasticrun.forkserver import trust
from elasticrun.forkserver.child import set_environ
from elasticrun.forkserver.lazy_imports import OURS, Baseline, HiddenModules
from elasticrun.forkserver.prepare import Poisoned, Preloader, Stock, installed_folders, options
from elasticrun.forkserver.warm import surroundings
from elasticrun.forkserver.warm.guard import become_guard
from elasticrun.host.system import processes
from elasticrun.host.system.title import set_command_line
from elasticrun.wire.frames import FrameBuffer, FrameError, encode, peer_of
from elasticrun.wire.spawning import (
    DESCRIPTORS,
    SHIELDED,
    Ask,
    Declined,
    Describe,
    Description,
    FromWarm,
    Granted,
    Leave,
    ToWarm,
    server_argv,
)

REQUEST_LIMIT: Final = 10.0
"""Seconds after which a client that sends nothing is disconnected."""

READ_BYTES: Final = 256 * 1024

BACKLOG: Final = 64
"""Launchers that may be connected at once; further ones start cold."""


def keep(words: Sequence[str], modules: Collection[str]) -> tuple[list[str], Stock]:
    """Run as a warm process. Returns only in forked fork servers: their command line, and what is
    imported. `modules`: the names that a plain interpreter has imported."""
    given = options(words)
    place, report_fd = Path(given["warm"][0]), int(given["tells"][0])
    if report_fd >= 0:  # if the process that waits for us ends (Ctrl-C), so do we
        processes.die_with_parent(signal.SIGKILL)
    processes.set_name(b"elasticrun-warm")
    for number in SHIELDED:  # signals that kill us must work; we have no terminal
        signal.signal(number, signal.SIG_DFL)
    os.chdir("/")
    gc.disable()
    try:
        stock = _import_stock(Baseline(modules))
        listener = _listen(place)
    except (_Unfit, OSError) as error:
        _report(report_fd, f"no {error}")
        sys.exit(1)
    gc.collect()
    gc.freeze()
    processes.die_with_parent(0)
    _report(report_fd, f"ok {stock.torch}")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # our starter must not wait for EOF on our output
        os.dup2(null, stream)
    if null > 2:
        os.close(null)
    return Keeper(stock, listener, place, float(given["idle"][0])).run()


def _report(descriptor: int, word: str) -> None:
    """Report the result to the process that started us; -1: that process does not wait for it."""
    if descriptor >= 0:
        with contextlib.suppress(BrokenPipeError):
            os.write(descriptor, word.encode())
        os.close(descriptor)


class _Unfit(Exception):
    """Forks of this process would not be safe; the sentence says why."""


def _import_stock(baseline: Baseline) -> Stock:
    baseline.exits.keep_back()
    hidden = HiddenModules(baseline)
    preloader = Preloader(hidden)
    if reason := trust.untested_backend(os.environ):
        raise _Unfit(reason)
    try:
        preloader.import_torch()
    except Poisoned as poison:
        raise _Unfit(poison.reason) from None
    except (Exception, SystemExit) as error:
        raise _Unfit(f"torch cannot be imported here ({type(error).__name__}: {error})") from None
    if reason := trust.build_reason() or trust.trial():
        raise _Unfit(f"torch cannot be shared: {reason}")
    hidden.seal()
    torch = str(getattr(sys.modules["torch"], "__version__", "unknown"))
    return Stock(baseline, hidden, preloader, torch)


def _listen(place: Path) -> socket.socket:
    """Listen at the path that launchers use. An earlier warm process there loses its socket, and
    exits."""
    draft = place.with_name(f"{place.name}.{os.getpid()}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(place.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{draft.name}")
        draft.chmod(0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        draft.rename(place)
    finally:
        os.close(folder)
    return listener


@dataclass
class _Client:
    """A connected client."""

    conn: socket.socket
    until: float
    granted: Ask | None = None
    """Its request, once granted."""
    descriptors: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._buffer = FrameBuffer(ToWarm)

    def read(self) -> ToWarm | None:
        """Its next message; None if incomplete. After a grant: the request, when its descriptors
        have arrived. Raises OSError or FrameError if the client has exited or sends garbage,
        BlockingIOError if nothing has arrived yet."""
        room = DESCRIPTORS if self.granted else 0
        data, received, _, _ = socket.recv_fds(self.conn, READ_BYTES, room)
        self.descriptors += received
        if not data:
            raise ConnectionResetError
        if self.granted:
            return self.granted
        return next(iter(self._buffer.feed(data)), None)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []
        self.conn.close()


@dataclass
class Keeper:
    """Answers launchers and forks fork servers."""

    stock: Stock
    listener: socket.socket
    place: Path
    idle: float  # seconds without requests after which it exits
    served: int = 0

    def __post_init__(self) -> None:
        self._inode = self.place.stat().st_ino
        self._until = time.monotonic() + self.idle
        self._guards: dict[int, int] = {}
        """The pid of each guard, by the pidfd that becomes readable when it can be reaped."""
        self._clients: dict[int, _Client] = {}
        """Connected clients, by descriptor, that have no complete answer yet."""
        # Besides torch, a change of our own package or of any installed package makes us stale.
        files = self.stock.hidden.files
        ours = [module for name, module in sys.modules.items() if name.split(".")[0] == OURS]
        paths = [getattr(module, "__file__", None) for module in ours]
        for path in [*filter(None, paths), *installed_folders(), sys.executable]:
            with contextlib.suppress(OSError):
                files.setdefault(path, os.stat(path).st_mtime_ns)

    def run(self) -> tuple[list[str], Stock]:
        """Run until there has been no request for `idle` seconds, another warm process has replaced
        the socket, or the imports are outdated. Returns only in forked fork servers."""
        while True:
            for descriptor in self._wait():
                order = self._serve(self._clients[descriptor])
                if order is not None:
                    return order, self.stock
            if time.monotonic() >= self._until or not self._is_found():
                self._leave()

    def _is_found(self) -> bool:
        with contextlib.suppress(OSError):
            return self.place.stat().st_ino == self._inode
        return False

    def _leave(self) -> NoReturn:
        if self._is_found():
            with contextlib.suppress(OSError):
                self.place.unlink()
        os._exit(0)

    def _wait(self) -> list[int]:
        """Wait for events; return the clients that have sent something."""
        now = time.monotonic()
        until = min([self._until, *(each.until for each in self._clients.values())])
        with selectors.PollSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            for descriptor in (*self._guards, *self._clients):
                selector.register(descriptor, selectors.EVENT_READ)
            ready = {key.fd for key, _ in selector.select(max(0, until - now))}
        for descriptor in ready & self._guards.keys():
            os.waitpid(self._guards.pop(descriptor), 0)
            os.close(descriptor)
        now = time.monotonic()
        for descriptor, client in list(self._clients.items()):
            if descriptor not in ready and now >= client.until:
                self._hang_up(client)
        if self.listener.fileno() in ready:
            self._welcome()
        return [descriptor for descriptor in ready if descriptor in self._clients]

    # ------------------------------------------------------------ one request

    def _welcome(self) -> None:
        """Accept a client; it is disconnected if it sends no request within REQUEST_LIMIT."""
        try:
            conn, _ = self.listener.accept()
        except OSError:
            return
        if len(self._clients) >= BACKLOG or peer_of(conn)[1] != os.geteuid():
            conn.close()
            return
        conn.setblocking(False)
        self._clients[conn.fileno()] = _Client(conn, time.monotonic() + REQUEST_LIMIT)

    def _hang_up(self, client: _Client) -> None:
        del self._clients[client.conn.fileno()]
        client.close()

    def _serve(self, client: _Client) -> list[str] | None:
        """Read from this client and answer it. In a forked fork server, return its command line."""
        words = None
        try:
            request = client.read()
            if request is None:
                return None
            if isinstance(request, Ask) and not client.granted:
                if self._grant(client, request):
                    return None
            else:
                words = self._answer(client, request)
        except BlockingIOError:
            return None
        except (OSError, FrameError):  # the client starts cold
            pass
        if client.conn.fileno() in self._clients:
            self._hang_up(client)
        return words

    def _grant(self, client: _Client, ask: Ask) -> bool:
        """Check the client; returns whether it is served once its descriptors arrive. If our
        imports are outdated, this process exits."""
        if stale := self.stock.hidden.stale_file():
            self._send(client.conn, Declined(f"{stale} has changed since it was imported"))
            self._leave()
        if reason := self._why_declined(client.conn, ask):
            self._send(client.conn, Declined(reason))
            return False
        client.granted = ask
        self._send(client.conn, Granted())
        return True

    def _answer(self, client: _Client, request: ToWarm) -> list[str] | None:
        match request:
            case Ask() if len(client.descriptors) != DESCRIPTORS:
                self._send(client.conn, Declined("its descriptors did not arrive"))
            case Ask():
                try:
                    words = self._fork(client, request)
                except OSError as error:
                    reason = f"no process could be started ({error.strerror})"
                    self._send(client.conn, Declined(reason))
                    return None
                if words is None:
                    self.served += 1
                    self._until = time.monotonic() + self.idle
                return words
            case Describe():
                description = Description(
                    pid=os.getpid(),
                    torch=self.stock.torch,
                    modules=len(sys.modules) - len(self.stock.baseline.modules),
                    served=self.served,
                    left=max(0.0, self._until - time.monotonic()),
                )
                self._send(client.conn, description)
            case Leave():
                self._leave()
        return None

    def _why_declined(self, conn: socket.socket, ask: Ask) -> str:
        """Why a fork of ours would differ from what this launcher would have exec'd; or empty."""
        try:
            mine, theirs = (
                surroundings.read_process("self"),
                surroundings.read_process(peer_of(conn)[0]),
            )
        except OSError as error:
            return f"its process cannot be inspected ({error.strerror})"
        return surroundings.difference(mine, theirs) or surroundings.variables_that_differ(
            self.stock.hidden.environment.saw, ask.env, self.stock.hidden.environment.reads
        )

    @staticmethod
    def _send(conn: socket.socket, word: FromWarm) -> None:
        with contextlib.suppress(OSError):
            conn.sendall(encode(word))

    # ------------------------------------------------------------ forks

    def _fork(self, client: _Client, ask: Ask) -> list[str] | None:
        pid = os.fork()
        if pid:
            self._guards[os.pidfd_open(pid)] = pid
            return None
        self.listener.close()
        self._close_others(client)
        words: list[str] = []
        channel, *streams, folder = client.descriptors
        client.descriptors = []
        environ = {os.fsencode(n): os.fsencode(v) for n, v in ask.env.items()}
        shown = [name + b"=" + value for name, value in environ.items()]

        def become_server(guard: int) -> None:
            os.setsid()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            os.fchdir(folder)
            for descriptor in (*streams, folder):
                os.close(descriptor)
            command = server_argv(channel, parent=guard, ignored=ask.ignored, blocked=ask.blocked)
            sys.orig_argv[2:] = command
            sys.argv[:] = command
            self._adopt(environ)
            set_command_line([os.fsencode(word) for word in sys.orig_argv], shown)
            words.extend(command[1:])

        try:
            become_guard(client.conn, [channel, *streams, folder], shown, become_server)
        except BaseException:  # for example, the fork server could not be forked
            os._exit(1)
        return words

    def _adopt(self, environ: dict[bytes, bytes]) -> None:
        """Take the launcher's variables, plus those that our imports have set."""
        environment = self.stock.hidden.environment
        made = {name: v for name, v in os.environ.items() if name not in environment.saw}
        set_environ(environ)
        self.stock.baseline.environ = dict(environ)
        # The variables that were read are equal (`_why_declined`).
        environment.saw = dict(os.environ)
        for name, value in made.items():
            os.environ.setdefault(name, value)

    def _close_others(self, kept: _Client | None = None) -> None:
        """In a fresh fork: close what belongs to other clients and to guards."""
        for client in self._clients.values():
            if client is not kept:
                client.close()
        self._clients.clear()
        for descriptor in self._guards:
            os.close(descriptor)
        self._guards.clear()
