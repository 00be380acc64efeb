"""Plays the agent: starts a real fork server and talks to it over its real socketpair."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from unittest.mock import patch

from elasticrun.agent import warm as agents_warm
from elasticrun.agent.warm import WarmChild, ask, start as start_warm
from elasticrun.testing import processes
from elasticrun.wire import spawning as sp
from elasticrun.wire.env import WARM_SERVER
from elasticrun.wire.frames import FrameBuffer, encode
from elasticrun.wire.types import EntryKind, Entrypoint

LIMIT = 240.0
"""Seconds for any one event on a busy machine; a test that needs them all is broken, not slow."""

M = TypeVar("M")


class Conversation:
    """With a process that speaks frames; what it has said stays until somebody waits for it."""

    def __init__(self, sock: socket.socket, union: Any) -> None:
        self.socket = sock
        self.incoming = FrameBuffer(union)
        self.heard: list[Any] = []
        self.log: list[Any] = []
        self._key = 0

    def tell(self, message: Any, descriptor: int = -1) -> None:
        """Say it, with a descriptor beside it."""
        data = encode(message)
        sent = socket.send_fds(self.socket, [data], [descriptor]) if descriptor >= 0 else 0
        self.socket.sendall(data[sent:])

    def wait(
        self, kind: type[M], where: Callable[[M], bool] = lambda _: True, limit: float = LIMIT
    ) -> M:
        """The first message of this kind (that `where` accepts); others stay for later waits."""
        deadline = time.monotonic() + limit
        while True:
            for index, message in enumerate(self.heard):
                if isinstance(message, kind) and where(message):
                    del self.heard[index]
                    return message
            self._receive(kind, deadline)

    def all_of(self, kind: type[M]) -> list[M]:
        """Every message of this kind that has been heard since the start."""
        return [message for message in self.log if isinstance(message, kind)]

    def new_key(self) -> int:
        self._key += 1
        return self._key

    def spawned(self, key: int) -> sp.Spawned:
        return self.wait(sp.Spawned, lambda m: m.key == key)

    def exited(self, key: int) -> sp.Exited:
        return self.wait(sp.Exited, lambda m: m.key == key)

    def _receive(self, kind: type, deadline: float) -> None:
        readable, _, _ = select.select([self.socket], [], [], max(0, deadline - time.monotonic()))
        if not readable:
            raise AssertionError(f"no {kind.__name__} came; heard: {self.log}")
        data = self.socket.recv(1 << 20)
        if not data:
            raise EOFError(f"it ended while we waited for {kind.__name__}: {self.log}")
        for message in self.incoming.feed(data):
            self.log.append(message)
            self.heard.append(message)


def where_it_stands(pid: int) -> str:
    """What the kernel says of each thread of a process that does not end, and its stacks where
    py-spy is there."""
    told = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            words = [(task / name).read_text().strip() for name in ("comm", "wchan", "syscall")]
            told.append(" ".join([task.name, *words]))
    if spy := shutil.which("py-spy"):
        words = [spy, "dump", "--nonblocking", "--pid", str(pid)]
        told.append(subprocess.run(words, capture_output=True, text=True, check=False).stdout)
    return "\n".join(told)


class Driver(Conversation):
    """One fork server. Use as a context manager: at the end it and all below it are gone."""

    def __init__(
        self,
        entry: Entrypoint | None = None,
        *,
        env: Mapping[str, str] | None = None,
        launch: str = "auto",
        preload: Sequence[str] = (),
        numa: bool = False,
        ignored: Sequence[int] = (),
        configure: bool = True,
        warm: Path | None = None,
        cold: bool = False,
    ) -> None:
        """`warm`: the socket of a warm process that is to fork it; else it is forked from the run's
        own, where there is one, unless it would not have torch, or its start is the subject
        (`cold`)."""
        environ = dict(os.environ) if env is None else dict(env)
        self.process: Any
        forked = None
        if warm is not None:
            with patch.object(agents_warm, "ANSWER_LIMIT", LIMIT):
                forked = ask(warm, environ, ignored)
            assert forked is not None, "the warm process refused; LOGLEVEL=INFO says why"
        elif launch == "auto" and configure and not cold:
            forked = _of_the_run(environ, ignored)
        self.process, sock = forked or sp.start_server(ignored=ignored, env=environ)
        super().__init__(sock, sp.FromSpawner)
        if configure:
            entry = entry or Entrypoint(EntryKind.SCRIPT, "none.py")
            self.tell(sp.Configure(launch, tuple(preload), entry, "spawn", numa))

    def ready(self) -> sp.SpawnerReady:
        return self.wait(sp.SpawnerReady)

    # ------------------------------------------------------------ ranks

    def start(self, entry: Entrypoint, **more: Any) -> int:
        """Order a rank; its key."""
        key = self.new_key()
        fields: dict[str, Any] = {
            "local_rank": 0,
            "env": {},
            "unset": (),
            "stdout": "",
            "stderr": "",
            "error_file": "",
        }
        self.tell(sp.SpawnRank(key=key, entry=entry, **{**fields, **more}))
        return key

    def failed(self, key: int) -> sp.SpawnFailed:
        return self.wait(sp.SpawnFailed, lambda m: m.key == key)

    def run(self, entry: Entrypoint, **more: Any) -> sp.Exited:
        """Run a rank to its end."""
        return self.exited(self.start(entry, **more))

    # ------------------------------------------------------------ end

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.socket.close()
        if isinstance(self.process, WarmChild) and not self.process.is_guarded:
            return
        try:
            self.process.wait(LIMIT)
        except BaseException as late:
            late.add_note(where_it_stands(self.process.pid))
            self.process.kill()
            self.process.wait(LIMIT)
            raise


def forking(entry: Entrypoint, *, env: Mapping[str, str] | None = None, **more: Any) -> Driver:
    """A fork server that is ready, and whose forks are trusted; by default in a plain
    environment."""
    driver = Driver(entry, env=plain_environment() if env is None else env, **more)
    try:
        ready = driver.ready()
        assert ready.mode == "fork", ready.reason
    except BaseException:
        driver.__exit__(None, None, None)
        raise
    return driver


@contextlib.contextmanager
def started(entry: Entrypoint | None = None, **more: Any) -> Iterator[Driver]:
    """A fork server that is ready, whatever it makes of forks; by default in a plain
    environment."""
    with Driver(entry, **{"env": plain_environment(), **more}) as driver:
        driver.ready()
        yield driver


def _of_the_run(environ: Mapping[str, str], ignored: Sequence[int]) -> Any:
    """A fork server of the run's warm process, or None: it is started as ever."""
    place = processes.warm_process(environ).get(WARM_SERVER)
    return None if place is None else ask(Path(place), environ, ignored)


@contextlib.contextmanager
def warm_process(place: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """A warm process with these variables, for the life of the block; its socket."""
    said, pid = start_warm(place, 600.0, environ)
    assert said.startswith("ok"), said
    try:
        yield place
    finally:
        os.kill(pid, signal.SIGKILL)
        assert not gone([pid])


def script(path: Path, text: str, *args: str) -> Entrypoint:
    """Write a script and give the entry that runs it."""
    path.write_text(text)
    return Entrypoint(EntryKind.SCRIPT, str(path), args)


SAYS = """
def say(*words):
    with open({pipe!r}, "w") as out:
        print(*words, file=out)
"""


def tells(driver: Driver, folder: Path, text: str, *args: str, **more: Any) -> tuple[int, str]:
    """Start a rank that calls `say(...)` once: its key, and what it said."""
    with fifo(folder / "said") as said:
        entry = script(folder / "tells.py", SAYS.format(pipe=str(said)) + text, *args)
        return driver.start(entry, **more), read_line(said)


def plain_environment(**more: str) -> dict[str, str]:
    """The environment of this process without what pytest changes in it from test to test."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return {**environ, "OMP_NUM_THREADS": "1", **more}


def alive(pid: int) -> bool:
    """Whether this process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@contextlib.contextmanager
def fifo(path: Path) -> Iterator[Path]:
    """A named pipe for the life of the block."""
    os.mkfifo(path)
    try:
        yield path
    finally:
        path.unlink()


def read_line(path: Path, limit: float = LIMIT) -> str:
    """Wait for a line that a rank writes to a named pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    text = b""
    deadline = time.monotonic() + limit
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        while not text.endswith(b"\n"):
            if not poll.poll(max(0, deadline - time.monotonic()) * 1000):
                raise AssertionError(f"no line came through {path}; so far: {text!r}")
            text += os.read(descriptor, 65536)
    finally:
        os.close(descriptor)
    return text.decode().rstrip("\n")


def gone(pids: Sequence[int], limit: float = LIMIT) -> list[int]:
    """Wait until these processes have ended; those that have not."""
    deadline = time.monotonic() + limit
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                left = max(0, deadline - time.monotonic())
                select.select([descriptor], [], [], left)
            finally:
                os.close(descriptor)
    return [pid for pid in pids if alive(pid)]


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
