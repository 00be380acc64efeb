"""One helper process: its parent's view of it, and what it does before its own work.

A helper reads its order from a descriptor. A store host and a probe have a pipe for messages
(frames of FromSpawner, which the parent forwards to the agent). A probe has a second pipe for what
it and its libraries print; the parent keeps the last KEPT_BYTES of it, in case the probe dies
without a result. The saver talks to the agent by itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

from elasticrun.forkserver.helpers import probe, store
from elasticrun.host.system import processes
from elasticrun.host.system.processes import memory_file
from elasticrun.host.system.title import set_title
from elasticrun.wire.frames import FrameBuffer, FrameError, encode
from elasticrun.wire.spawning import (
    SHIELDED,
    Exited,
    FromSpawner,
    ProbeSaid,
    SpawnFailed,
    SpawnProbe,
    SpawnRank,
    SpawnSaver,
    SpawnStore,
    StoreListening,
    ToSpawner,
)

READ_BYTES: Final = 64 * 1024

KEPT_BYTES: Final = 4096
"""Number of bytes kept from the end of a probe's output, which is the informative part."""

MAIN_FILE: Final = Path(__file__).with_name("main.py")

ONE_THREAD: Final = {b"OMP_NUM_THREADS": b"1", b"MKL_NUM_THREADS": b"1"}
"""Limits a saver to one core. Overrides the order, whose environment contains the ranks'
variables."""

Order = SpawnStore | SpawnProbe | SpawnSaver


class Helper:
    """A helper as its parent sees it; `close` or `drain` closes the parent's descriptors."""

    kind: ClassVar[str]
    speaks: ClassVar[bool] = False
    prints: ClassVar[bool] = False

    def __init__(self, order: Order | None = None) -> None:
        """Without an order it waits for one (`obey`). Raises OSError if no descriptors are left."""
        self.key = -1
        self._frames = FrameBuffer(FromSpawner)
        self._printed = b""
        self._pipes: dict[int, Callable[[bytes], list[FromSpawner]]] = {}
        self._order_end: list[int] = []
        """The write end over which a waiting helper receives its order."""
        self._theirs: dict[str, int] = {}
        try:
            if order is None:
                self._theirs["order"], ours = os.pipe2(os.O_CLOEXEC)
                self._order_end = [ours]
            else:
                self.key = order.key
                self._theirs["order"] = kept = memory_file(self.kind)
                os.write(kept, encode(order))
                os.lseek(kept, 0, os.SEEK_SET)
            if self.speaks:
                self._pipe("says", self._parse)
            if self.prints:
                self._pipe("prints", self._keep)
        except OSError:
            self.started()
            self.close()
            raise

    def _pipe(self, name: str, take: Callable[[bytes], list[FromSpawner]]) -> None:
        ours, self._theirs[name] = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        self._pipes[ours] = take

    # ------------------------------------------------------------ its start

    @property
    def output(self) -> int:
        """The descriptor for its stdout, so that output of libraries does not mix with a script's
        results; with `prints` also for its stderr."""
        return self._theirs.get("prints", 2)

    @property
    def inherited(self) -> tuple[int, ...]:
        """Descriptors that an exec'd helper inherits."""
        return tuple(self._theirs[name] for name in ("order", "says") if name in self._theirs)

    def words(self, parent: int) -> list[str]:
        """The command line of an exec'd helper. Never contains a secret."""
        numbers = (self._theirs["order"], self._theirs.get("says", -1), parent)
        return [sys.executable, "-u", str(MAIN_FILE), self.kind, *map(str, numbers)]

    def become(self, parent: int, environ: Mapping[bytes, bytes] | None) -> None:
        """In a fresh fork: become the helper. With `environ`, exec it with these variables.
        None: torch is imported and this process has its variables already. Returns when the
        helper ends."""
        self.close()
        null = os.open(os.devnull, os.O_RDONLY)
        for theirs, number in ((null, 0), (self.output, 1), (self._theirs.get("prints", 2), 2)):
            os.dup2(theirs, number)
        words = self.words(parent)
        if environ is not None:
            for descriptor in self.inherited:
                os.set_inheritable(descriptor, True)
            os.execve(words[0], words, environ)
        order, says = self._theirs["order"], self._theirs.get("says", -1)
        if self.kind == SaverHelper.kind:
            spec = importlib.util.spec_from_file_location("elasticrun_helper_main", MAIN_FILE)
            assert spec is not None
            assert spec.loader is not None
            module: Any = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            module.main(self.kind, order, says, parent)
        enter(self.kind, order, says, parent)

    def started(self) -> None:
        """In the parent: close the child's ends."""
        for descriptor in self._theirs.values():
            os.close(descriptor)
        self._theirs = {}

    def obey(self, order: Order) -> None:
        """Send the order to a waiting helper; if it has died meanwhile, its exit is reported as
        usual."""
        self.key = order.key
        end = self._order_end.pop()
        with suppress(BrokenPipeError):
            os.write(end, encode(order))
        os.close(end)

    # ------------------------------------------------------------ its messages

    def descriptors(self) -> list[int]:
        """Descriptors that are readable when a message is waiting."""
        return list(self._pipes)

    def read(self, descriptor: int) -> list[FromSpawner]:
        """Messages since the last call; closes the pipe at EOF."""
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return []
        take = self._pipes[descriptor]
        if not data:
            del self._pipes[descriptor]
            os.close(descriptor)
        return take(data)

    def drain(self, pid: int, code: int) -> list[FromSpawner]:
        """Return what is left in the pipes, then the exit, because the helper was reaped with this
        code. Closes everything."""
        messages = [each for descriptor in self.descriptors() for each in self.read(descriptor)]
        self.close()
        if report := self._final_report(code):
            messages.append(report)
        if not isinstance(report, SpawnFailed):
            messages.append(Exited(self.key, pid, code, time.time_ns() // 1000))
        return messages

    def close(self) -> None:
        """Close our ends; also in a fork of the parent, which is not the helper's parent."""
        for descriptor in (*self._pipes, *self._order_end):
            os.close(descriptor)
        self._pipes, self._order_end = {}, []

    def _final_report(self, code: int) -> FromSpawner | None:
        """An extra report if the helper has not sent a final one; a SpawnFailed replaces its
        exit."""
        return None

    def _is_forwarded(self, message: FromSpawner) -> bool:
        """Process a message of the helper; return whether it is forwarded to the agent."""
        return True

    def _parse(self, data: bytes) -> list[FromSpawner]:
        messages = []
        try:
            for message in self._frames.feed(data):
                if getattr(message, "key", self.key) == self.key and self._is_forwarded(message):
                    messages.append(message)
        except FrameError as error:
            self._keep(f"\nit sent an invalid message: {error}".encode())
        return messages

    def _keep(self, data: bytes) -> list[FromSpawner]:
        self._printed = (self._printed + data)[-KEPT_BYTES:]
        return []


class StoreHelper(Helper):
    """A store host: reports StoreListening, or SpawnFailed instead of its exit."""

    kind = "store"
    speaks = True

    def __init__(self, order: Order | None = None) -> None:
        super().__init__(order)
        self.listens = False
        self._failed = SpawnFailed(self.key, "it exited before it listened")

    def _is_forwarded(self, message: FromSpawner) -> bool:
        if isinstance(message, SpawnFailed):
            self._failed = message
            return False
        self.listens = self.listens or isinstance(message, StoreListening)
        return True

    def _final_report(self, code: int) -> FromSpawner | None:
        if self.listens:
            return None
        return replace(self._failed, key=self.key, reason=f"no store: {self._failed.reason}")


class ProbeHelper(Helper):
    """A probe: a ProbeSaid for each phase and one with the result. If the probe dies without a
    result, the parent makes one up."""

    kind = "probe"
    speaks = prints = True

    def __init__(self, order: Order | None = None) -> None:
        super().__init__(order)
        self._phase = probe.START
        self._done = False

    def _is_forwarded(self, message: FromSpawner) -> bool:
        if isinstance(message, ProbeSaid):
            self._phase, self._done = message.phase, self._done or message.done
        return isinstance(message, ProbeSaid)

    def _final_report(self, code: int) -> FromSpawner | None:
        if self._done:
            return None
        how = f"it exited with code {code}"
        if code < 0:
            name = {int(s): s.name for s in signal.Signals}.get(-code, f"signal {-code}")
            how = f"it was killed by {name}"
        lines = self._printed.decode("utf-8", "replace").splitlines()
        printed = " ".join(" / ".join(line for line in lines if line.strip()).split())
        room = probe.MAX_REASON - len(how) - 3
        reason = f"{how}: {printed[-room:]}" if printed else how
        own = self._phase in probe.OWN_PHASES
        return ProbeSaid(self.key, self._phase, True, own=own, reason=reason)


class SaverHelper(Helper):
    """The saver, one per node."""

    kind = "saver"


KINDS: Final[Mapping[type, type[Helper]]] = {
    SpawnStore: StoreHelper,
    SpawnProbe: ProbeHelper,
    SpawnSaver: SaverHelper,
}


def environment(first: Mapping[bytes, bytes], order: SpawnRank | Order) -> dict[bytes, bytes]:
    """The child's variables: the spawner's first environment, minus `unset`, plus `env`, in that
    order. A store host gets the first environment unchanged; a saver also gets ONE_THREAD."""
    environ = dict(first)
    if isinstance(order, SpawnStore):
        return environ
    for name in order.unset:
        environ.pop(os.fsencode(name), None)
    for name, value in order.env.items():
        environ[os.fsencode(name)] = os.fsencode(value)
    return {**environ, **ONE_THREAD} if isinstance(order, SpawnSaver) else environ


# ---------------------------------------------------------------- in the child


def enter(kind: str, order_fd: int, says_fd: int, parent: int) -> NoReturn:
    """In the child: become a helper of this kind, forked or exec'd; ignore SHIELDED signals, die
    with the parent."""
    for signum in SHIELDED:
        signal.signal(signum, signal.SIG_IGN)
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    processes.set_name(f"elasticrun-{kind[:4]}".encode())
    set_title(f"elasticrun: {kind}".encode())
    if kind == StoreHelper.kind:  # import torch while it waits for its order
        with suppress(Exception):  # `store.host` imports it again and reports the error
            importlib.import_module("torch.distributed")
    with open(order_fd, "rb") as file:
        orders = list(FrameBuffer(ToSpawner).feed(file.read()))
    if not orders:  # the parent did not need it
        os._exit(0)

    def send(message: FromSpawner) -> None:
        os.write(says_fd, encode(message))

    match orders[0]:
        case SpawnStore() as order:
            store.host(order, send, lambda: os.close(says_fd))
            os._exit(1)
        case SpawnProbe() as order:
            try:
                probe.run(order.key, order.plan, send)
            except BaseException as error:  # our bug, or the pipe is closed
                os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
                os._exit(1)
            os._exit(0)  # exit at once: a library's destructor could hang
        case order:
            from elasticrun.snapshots.saver import saver

            assert isinstance(order, SpawnSaver)
            saver.run(order)
