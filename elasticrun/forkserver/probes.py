"""Probe processes: how one is born, and what its parent hears of it.

A probe has two pipes to its parent: one for its words (frames with ProbeSaid), one for what it and
its libraries print, of which the end is kept for the case that it dies without a last word.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NoReturn

from elasticrun.forkserver import probe
from elasticrun.system import processes as linux
from elasticrun.wire.frames import FrameBuffer, FrameError, encode
from elasticrun.wire.spawning import SHIELDED, FromSpawner, ProbeSaid, SpawnProbe, ToSpawner

READ_BYTES: Final = 64 * 1024

KEPT_BYTES: Final = 4096
"""Of what a probe has printed; its last lines are what tells."""

MAIN_FILE: Final = Path(__file__).with_name("probe_main.py")


class Telling:
    """The parent's side of one probe."""

    def __init__(self, key: int) -> None:
        """Raises OSError where there are no descriptors left."""
        self._key = key
        self._frames = FrameBuffer(FromSpawner)
        self._printed = b""
        self._phase = probe.START
        self._done = False
        self._ours: dict[int, Callable[[bytes], list[ProbeSaid]]] = {}
        self._words, self.words = os.pipe2(os.O_CLOEXEC)
        try:
            self._prints, self.prints = os.pipe2(os.O_CLOEXEC)
        except OSError:
            os.close(self._words)
            os.close(self.words)
            raise
        self._ours = {self._words: self._hear, self._prints: self._keep}
        for descriptor in self._ours:
            os.set_blocking(descriptor, False)

    def born(self) -> None:
        """In the parent, after the birth: the child's ends are the child's alone."""
        os.close(self.words)
        os.close(self.prints)

    def descriptors(self) -> list[int]:
        """Readable when there is something to be read."""
        return list(self._ours)

    def read(self, descriptor: int) -> list[ProbeSaid]:
        """What it has said since the last call; at the end of a pipe, that one is closed."""
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return []
        take = self._ours[descriptor]
        if not data:
            del self._ours[descriptor]
            os.close(descriptor)
        return take(data)

    def last_words(self, code: int) -> list[ProbeSaid]:
        """It was reaped: what still lay in the pipes, and its end in our words where it has said
        no result itself. Closes everything."""
        said = []
        for descriptor in self.descriptors():
            said += self.read(descriptor)
        self.close()
        if not self._done:
            how = f"it ended with code {code}" if code >= 0 else f"it was killed by {_name(-code)}"
            lines = self._printed.decode("utf-8", "replace").splitlines()
            printed = " ".join(" / ".join(line for line in lines if line.strip()).split())
            room = probe.MAX_REASON - len(how) - 3
            reason = f"{how}: {printed[-room:]}" if printed else how
            own = self._phase in probe.OWN_PHASES
            said.append(ProbeSaid(self._key, self._phase, True, own=own, reason=reason))
        return said

    def close(self) -> None:
        """Let go of our ends; in a fork of the parent too, whose child the probe is not."""
        for descriptor in self._ours:
            os.close(descriptor)
        self._ours = {}

    def _hear(self, data: bytes) -> list[ProbeSaid]:
        said = []
        try:
            for message in self._frames.feed(data):
                if isinstance(message, ProbeSaid) and message.key == self._key:
                    self._phase, self._done = message.phase, self._done or message.done
                    said.append(message)
        except FrameError as error:
            self._keep(f"\nwhat it said cannot be understood: {error}".encode())
        return said

    def _keep(self, data: bytes) -> list[ProbeSaid]:
        self._printed = (self._printed + data)[-KEPT_BYTES:]
        return []


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


# ---------------------------------------------------------------- in the child


def fork_probe(order: SpawnProbe, words: int, prints: int) -> NoReturn:
    """In a fresh fork that has its environment and torch: probe, and end."""
    _attach(prints)
    _bind(order)
    _run(order, words)


def exec_instead(
    order: SpawnProbe, words: int, prints: int, environ: Mapping[bytes, bytes]
) -> NoReturn:
    """In a fresh fork: become `python -u probe_main.py`. Raises OSError."""
    _attach(prints)
    file = order_file(order)
    for descriptor in (file, words):
        os.set_inheritable(descriptor, True)
    command = exec_command(file, words, os.getppid())
    os.execve(command[0], command, environ)


def order_file(order: SpawnProbe) -> int:
    """The order in a memfd, for a program that is exec'd and inherits it."""
    kept = os.memfd_create("probe")
    os.write(kept, encode(order))
    os.lseek(kept, 0, os.SEEK_SET)
    return kept


def exec_command(file: int, words: int, parent: int) -> list[str]:
    """The command line of a probe that is exec'd; it inherits both descriptors."""
    return [sys.executable, "-u", str(MAIN_FILE), str(file), str(words), str(parent)]


def exec_probe(order_fd: int, words: int, parent: int) -> NoReturn:
    """What the exec'd program does."""
    for signum in SHIELDED:
        signal.signal(signum, signal.SIG_IGN)
    linux.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    linux.set_name(b"elasticrun-prob")
    with open(order_fd, "rb") as file:
        (order,) = FrameBuffer(ToSpawner).feed(file.read())
    assert isinstance(order, SpawnProbe)
    _bind(order)
    _run(order, words)


def _attach(prints: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(prints, 1)
    os.dup2(prints, 2)


def _bind(order: SpawnProbe) -> None:
    if order.cpus:
        os.sched_setaffinity(0, order.cpus)


def _run(order: SpawnProbe, words: int) -> NoReturn:
    def say(said: ProbeSaid) -> None:
        os.write(words, encode(said))

    try:
        probe.run(order.key, order.plan, say)
    except BaseException as error:  # a defect of ours, or nobody hears us any more
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        os._exit(1)
    os._exit(0)  # no destructor of a library may hang now
