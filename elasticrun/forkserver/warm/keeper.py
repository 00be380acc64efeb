"""The warm process: imports torch once, then answers on its socket until nobody has for a while.

A fork server that is forked from it takes over what it imported (`Stock`) and lives on exactly as
an exec'd one. It has torch and nothing else, since what one job imports must not reach another.
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
from elasticrun.forkserver.lazy_imports import OURS, Baseline, Stash
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
    server_words,
)

REQUEST_LIMIT: Final = 10.0
"""Seconds until somebody who has come and says nothing is hung up on."""

READ_BYTES: Final = 256 * 1024

BACKLOG: Final = 64
"""Launchers that may be answered at once; one more starts cold."""


def keep(words: Sequence[str], modules: Collection[str]) -> tuple[list[str], Stock]:
    """Be a warm process. Returns in forked fork servers alone: the words of their command line, and
    what is imported. `modules`: the names that a plain interpreter has imported."""
    given = options(words)
    place, tells = Path(given["warm"][0]), int(given["tells"][0])
    if tells >= 0:  # who waits for us and is ended, by Ctrl-C say, wants us no more
        processes.die_with_parent(signal.SIGKILL)
    processes.set_name(b"elasticrun-warm")
    for number in SHIELDED:  # whoever kills us is obeyed; a terminal's signals do not come here
        signal.signal(number, signal.SIG_DFL)
    os.chdir("/")
    gc.disable()
    try:
        stock = _stock_up(Baseline(modules))
        listener = _listen(place)
    except (_Unfit, OSError) as error:
        _tell(tells, f"no {error}")
        sys.exit(1)
    gc.collect()
    gc.freeze()
    processes.die_with_parent(0)
    _tell(tells, f"ok {stock.torch}")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # whoever started us must not wait for the end of our output
        os.dup2(null, stream)
    if null > 2:
        os.close(null)
    return Keeper(stock, listener, place, float(given["idle"][0])).run()


def _tell(descriptor: int, word: str) -> None:
    """Say how it went to whoever has started us; a job that leaves us behind does not wait (-1)."""
    if descriptor >= 0:
        with contextlib.suppress(BrokenPipeError):
            os.write(descriptor, word.encode())
        os.close(descriptor)


class _Unfit(Exception):
    """No fork of this process could be trusted; the sentence says why."""


def _stock_up(baseline: Baseline) -> Stock:
    baseline.exits.keep_back()
    stash = Stash(baseline)
    preloader = Preloader(stash)
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
    stash.seal()
    torch = str(getattr(sys.modules["torch"], "__version__", "unknown"))
    return Stock(baseline, stash, preloader, torch)


def _listen(place: Path) -> socket.socket:
    """Listen where launchers look; somebody who was there before us is no longer found."""
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
class _Visitor:
    """Somebody who has connected."""

    conn: socket.socket
    until: float
    granted: Ask | None = None
    """What it has asked for, once that was granted."""
    descriptors: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._said = FrameBuffer(ToWarm)

    def read(self) -> ToWarm | None:
        """Its next word; None if that is not complete. A granted one's word is its descriptors.
        OSError or FrameError if it has gone, or makes no sense; BlockingIOError: not yet."""
        room = DESCRIPTORS if self.granted else 0
        data, received, _, _ = socket.recv_fds(self.conn, READ_BYTES, room)
        self.descriptors += received
        if not data:
            raise ConnectionResetError
        if self.granted:
            return self.granted
        return next(iter(self._said.feed(data)), None)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []
        self.conn.close()


@dataclass
class Keeper:
    """Answers launchers; forks."""

    stock: Stock
    listener: socket.socket
    place: Path
    idle: float  # seconds until it ends if nobody asks
    served: int = 0

    def __post_init__(self) -> None:
        self._inode = self.place.stat().st_ino
        self._until = time.monotonic() + self.idle
        self._guards: dict[int, int] = {}
        """pidfd of each guard, to reap it by: its process id."""
        self._visitors: dict[int, _Visitor] = {}
        """By descriptor: who has come and has not been answered to the end."""
        # What makes us stale beside torch: our own package, and any installation at all.
        files = self.stock.stash.files
        ours = [module for name, module in sys.modules.items() if name.split(".")[0] == OURS]
        paths = [getattr(module, "__file__", None) for module in ours]
        for path in [*filter(None, paths), *installed_folders(), sys.executable]:
            with contextlib.suppress(OSError):
                files.setdefault(path, os.stat(path).st_mtime_ns)

    def run(self) -> tuple[list[str], Stock]:
        """Until nobody has asked for `idle` seconds; returns in forked fork servers alone."""
        while True:
            for descriptor in self._wait():
                order = self._hear(self._visitors[descriptor])
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
        """Until something is to be done; the visitors who have said something."""
        now = time.monotonic()
        until = min([self._until, *(each.until for each in self._visitors.values())])
        with selectors.PollSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            for descriptor in (*self._guards, *self._visitors):
                selector.register(descriptor, selectors.EVENT_READ)
            ready = {key.fd for key, _ in selector.select(max(0, until - now))}
        for descriptor in ready & self._guards.keys():
            os.waitpid(self._guards.pop(descriptor), 0)
            os.close(descriptor)
        now = time.monotonic()
        for descriptor, visitor in list(self._visitors.items()):
            if descriptor not in ready and now >= visitor.until:
                self._hang_up(visitor)
        if self.listener.fileno() in ready:
            self._welcome()
        return [descriptor for descriptor in ready if descriptor in self._visitors]

    # ------------------------------------------------------------ one request

    def _welcome(self) -> None:
        """Take in who has come; who does not say what it wants is hung up on in a while."""
        try:
            conn, _ = self.listener.accept()
        except OSError:
            return
        if len(self._visitors) >= BACKLOG or peer_of(conn)[1] != os.geteuid():
            conn.close()
            return
        conn.setblocking(False)
        self._visitors[conn.fileno()] = _Visitor(conn, time.monotonic() + REQUEST_LIMIT)

    def _hang_up(self, visitor: _Visitor) -> None:
        del self._visitors[visitor.conn.fileno()]
        visitor.close()

    def _hear(self, visitor: _Visitor) -> list[str] | None:
        """Take in what this visitor says and answer it; the words of a fork server in a fork that
        is to be one."""
        words = None
        try:
            request = visitor.read()
            if request is None:
                return None
            if isinstance(request, Ask) and not visitor.granted:
                if self._grant(visitor, request):
                    return None
            else:
                words = self._answer(visitor, request)
        except BlockingIOError:
            return None
        except (OSError, FrameError):  # who cannot be understood starts cold
            pass
        if visitor.conn.fileno() in self._visitors:
            self._hang_up(visitor)
        return words

    def _grant(self, visitor: _Visitor, ask: Ask) -> bool:
        """Look at who asks; whether it is served as soon as it has sent its descriptors."""
        if stale := self.stock.stash.stale():
            self._say(visitor.conn, Declined(f"{stale} has changed since it was imported"))
            self._leave()
        if reason := self._against(visitor.conn, ask):
            self._say(visitor.conn, Declined(reason))
            return False
        visitor.granted = ask
        self._say(visitor.conn, Granted())
        return True

    def _answer(self, visitor: _Visitor, request: ToWarm) -> list[str] | None:
        match request:
            case Ask() if len(visitor.descriptors) != DESCRIPTORS:
                self._say(visitor.conn, Declined("its descriptors got lost"))
            case Ask():
                try:
                    words = self._fork(visitor, request)
                except OSError as error:
                    reason = f"no process could be started ({error.strerror})"
                    self._say(visitor.conn, Declined(reason))
                    return None
                if words is None:
                    self.served += 1
                    self._until = time.monotonic() + self.idle
                return words
            case Describe():
                says = Description(
                    pid=os.getpid(),
                    torch=self.stock.torch,
                    modules=len(sys.modules) - len(self.stock.baseline.modules),
                    served=self.served,
                    left=max(0.0, self._until - time.monotonic()),
                )
                self._say(visitor.conn, says)
            case Leave():
                self._leave()
        return None

    def _against(self, conn: socket.socket, ask: Ask) -> str:
        """Why a fork of ours would not be what this launcher would have exec'd; or empty."""
        try:
            mine, theirs = surroundings.look("self"), surroundings.look(peer_of(conn)[0])
        except OSError as error:
            return f"its process cannot be looked at ({error.strerror})"
        return surroundings.difference(mine, theirs) or surroundings.variables_that_differ(
            self.stock.stash.environment.saw, ask.env, self.stock.stash.environment.reads
        )

    @staticmethod
    def _say(conn: socket.socket, word: FromWarm) -> None:
        with contextlib.suppress(OSError):
            conn.sendall(encode(word))

    # ------------------------------------------------------------ forks

    def _fork(self, visitor: _Visitor, ask: Ask) -> list[str] | None:
        pid = os.fork()
        if pid:
            self._guards[os.pidfd_open(pid)] = pid
            return None
        self.listener.close()
        self._let_go(visitor)
        words: list[str] = []
        channel, *streams, folder = visitor.descriptors
        visitor.descriptors = []
        environ = {os.fsencode(n): os.fsencode(v) for n, v in ask.env.items()}
        shown = [name + b"=" + value for name, value in environ.items()]

        def become_server(guard: int) -> None:
            os.setsid()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            os.fchdir(folder)
            for descriptor in (*streams, folder):
                os.close(descriptor)
            command = server_words(channel, parent=guard, ignored=ask.ignored, blocked=ask.blocked)
            sys.orig_argv[2:] = command
            sys.argv[:] = command
            self._adopt(environ)
            set_command_line([os.fsencode(word) for word in sys.orig_argv], shown)
            words.extend(command[1:])

        try:
            become_guard(visitor.conn, [channel, *streams, folder], shown, become_server)
        except BaseException:  # no process could be started for the fork server, say
            os._exit(1)
        return words

    def _adopt(self, environ: dict[bytes, bytes]) -> None:
        """Have the launcher's variables, and what our imports have set beside our own."""
        environment = self.stock.stash.environment
        made = {name: v for name, v in os.environ.items() if name not in environment.saw}
        set_environ(environ)
        self.stock.baseline.environ = dict(environ)
        environment.saw = dict(os.environ)  # those that were read are alike (`_against`)
        for name, value in made.items():
            os.environ.setdefault(name, value)

    def _let_go(self, spared: _Visitor | None = None) -> None:
        """In a fresh fork: close what belongs to other visitors and to guards."""
        for visitor in self._visitors.values():
            if visitor is not spared:
                visitor.close()
        self._visitors.clear()
        for descriptor in self._guards:
            os.close(descriptor)
        self._guards.clear()
