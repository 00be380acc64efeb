"""A rank's connection to its agent, and what a rank does when a node leaves.

The connection is one socket, with one answer for each request. When a node leaves, the agent writes
a step into the segment's `save_at`. Every rank reads it and saves at the first step that is equal
or higher. A rank that has already passed the step reports that.

Some schedulers signal every process, so the rank gets the signal too. It *defers* the signal: the
signal ends it at its next step, once the required step is saved, or after STEP_REQUEST_LIMIT if no
step is requested. It does so only if the script has left the signal at its default. A second signal
takes effect at once, except for a SIGTERM that Slurm sends twice. The agent knows which ranks defer
signals, and does not wait for them when it ends a rank itself.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, TypeVar

from elasticrun.snapshots.shm.segment import NONE
from elasticrun.wire import env
from elasticrun.wire.frames import FrameBuffer, FrameError, encode
from elasticrun.wire.progress import RankCosts, address, encode as encode_spent, read_place
from elasticrun.wire.snapshots import (
    AwaitRoom,
    FromRank,
    PutsOff,
    RankRefused,
    RoomThere,
    StepMissed,
    ToRank,
)
from elasticrun.wire.types import REPEAT_WITHIN

ANSWER_LIMIT: Final = 600.0
"""Seconds for an answer: the agent may have to allocate memory, or to fetch a shard from another
node.
"""

SEND_LIMIT: Final = 5.0
"""Seconds for the agent to accept a message that needs no answer."""

REQUESTED_LIMIT: Final = 5.0
"""Seconds that a snapshot required by a leaving node waits for a slot."""

WHOLE_LIMIT: Final = 5.0
"""Seconds that a rank waits, before a signal ends it, for the others to save the same step."""

STEP_REQUEST_LIMIT: Final = 5.0
"""Seconds for the agent to request a step before a rank ends by a signal."""

SEND_EVERY: Final = 0.1
"""Seconds between two datagrams about steps and the cost of saves."""

READ_BYTES: Final = 64 * 1024
MOST_FDS: Final = 4

Answer = TypeVar("Answer")

_places: dict[int, str] = {}  # by the pid that received it: a forked child has none


def agent_address() -> str:
    """The address that the agent gave this process (wire.env.SNAPSHOTS), "" if none. The first call
    removes it from os.environ, so that children of this process do not act as the rank."""
    if place := os.environ.pop(env.SNAPSHOTS, ""):
        _places[os.getpid()] = place
    return _places.get(os.getpid(), "")


class AgentConnectionError(OSError):
    """The connection to the agent failed or was closed."""


class ConflictError(RuntimeError):
    """Two Checkpointers contradict each other."""


class AgentTimeout(AgentConnectionError):
    """The agent did not answer in time."""


class AgentConnection:
    """A rank's connection to its agent. Raises AgentConnectionError if the agent cannot be reached
    or does not answer in time; the connection is unusable after that."""

    def __init__(self, place: str) -> None:
        """`place` is the agent's address (wire.env.SNAPSHOTS)."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer = FrameBuffer(ToRank)
        self._fds: list[int] = []
        try:
            name, self.local_rank = read_place(place)
            self._socket.settimeout(SEND_LIMIT)
            self._socket.connect(address(name))
        except (OSError, ValueError) as error:
            self._socket.close()
            raise AgentConnectionError(
                f"the agent does not answer at {place!r} ({error})"
            ) from None

    def send(self, message: FromRank) -> None:
        """Send a message that needs no answer."""
        try:
            self._socket.settimeout(SEND_LIMIT)
            self._socket.sendall(encode(message))
        except OSError as error:
            raise AgentConnectionError(f"the agent accepts no more messages ({error})") from None

    def request(self, message: FromRank, answer: type[Answer]) -> tuple[Answer, int | None]:
        """Send a request; return the answer, of type `answer`, and the descriptor that came with
        it, which the caller owns. Raises ConflictError if this rank is refused."""
        self.send(message)
        deadline = time.monotonic() + ANSWER_LIMIT
        found = self.answer_to(message, answer, deadline=deadline, wait=True)
        assert found is not None
        return found

    def answer_to(
        self, message: FromRank, answer: type[Answer], *, deadline: float, wait: bool
    ) -> tuple[Answer, int | None] | None:
        """The answer to a request that was sent before, as `request` returns it. None if it is not
        there yet and must not be waited for. `deadline`: by time.monotonic()."""
        while True:
            if not wait and time.monotonic() < deadline and not self._has_data():
                return None
            for found in self._receive(deadline, message):
                if isinstance(found, RoomThere):  # a late answer to an earlier request
                    continue
                if isinstance(found, RankRefused):
                    raise ConflictError(found.reason)
                fd = self._fds.pop(0) if self._fds else None
                self._close_descriptors()
                if isinstance(found, answer):
                    return found, fd
                if fd is not None:
                    os.close(fd)
                raise AgentConnectionError(
                    f"the agent answered {type(message).__name__} with a {type(found).__name__}"
                )

    def _has_data(self) -> bool:
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        return bool(ready.poll(0))

    def wait_for_slot(self, whole: int, limit: float) -> bool:
        """Wait until a slot is free, or step `whole` is complete; False if that takes longer than
        `limit` seconds. A late answer to an earlier request also returns True, so check again."""
        if limit <= 0:
            return False
        message = AwaitRoom(whole)
        self.send(message)
        deadline = time.monotonic() + limit
        while True:
            try:
                answers = self._receive(deadline, message)
            except AgentTimeout:
                return False
            for found in answers:
                if isinstance(found, RoomThere):
                    return True
                raise AgentConnectionError(
                    f"the agent sent {type(found).__name__} without a request"
                )

    def _receive(self, deadline: float, message: FromRank) -> list[ToRank]:
        what = type(message).__name__
        try:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            data, fds, _, _ = socket.recv_fds(self._socket, READ_BYTES, MOST_FDS)
            self._fds += fds
            answers = list(self._buffer.feed(data))
        except TimeoutError:
            raise AgentTimeout(f"no answer to {what} in {ANSWER_LIMIT:.0f} s") from None
        except (FrameError, OSError) as error:
            raise AgentConnectionError(f"the agent's answer to {what} was lost ({error})") from None
        if not data:
            raise AgentConnectionError(
                f"the agent closed the connection instead of answering {what}"
            )
        return answers

    def wait_for_close(self, limit: float) -> None:
        """Wait until the agent closes the connection, which it does when it ends this rank, for at
        most `limit` seconds."""
        deadline = time.monotonic() + limit
        try:
            while (left := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(READ_BYTES):
                    return
        except OSError:
            return

    def _close_descriptors(self) -> None:
        """Close unexpected descriptors."""
        while self._fds:
            os.close(self._fds.pop())

    def close(self) -> None:
        self._close_descriptors()
        self._socket.close()


class SaveCosts:
    """Sums up the cost of saves and restores in this process and reports it to the agent."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self.begin_round()

    def begin_round(self) -> None:
        """Reset all sums, for a new process or one that joins another round, in which the agent has
        another address and counts anew."""
        self._step = -1
        self._saves = 0
        self._saved = self._restored = 0.0
        self._place = ("", -1)  # the agent's address, and this local rank
        self._send_at = 0.0
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def add_restore(self, seconds: float) -> None:
        """Add the duration of a restore, and report it at once."""
        self._restored += seconds
        self._send_at = 0.0
        self._send_report()

    def add_save(self, seconds: float, *, taken: bool) -> None:
        """Add the duration for which a save, or the attempt, has blocked the script. `taken`: a
        snapshot was taken."""
        self._saves += taken
        self._saved += seconds
        self._send_report()

    @property
    def newest_step(self) -> int:
        """The newest step that training has reached; -1: none."""
        return self._step

    def note_step(self, step: int) -> None:
        """Note that training has reached this step; takes a few microseconds."""
        self._step = max(step, self._step)
        self._send_report()

    def _send_report(self) -> None:
        """Send the sums, unless the last report is recent."""
        now = time.monotonic()
        if now < self._send_at:
            return
        self._send_at = now + SEND_EVERY
        with suppress(OSError, ValueError):  # the next datagram has all sums
            if self._socket is None:
                self._place = read_place(os.environ.get(env.PROGRESS, ""))
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
            name, local_rank = self._place
            sums = RankCosts(local_rank, self._step, self._saves, self._saved, self._restored)
            self._socket.sendto(encode_spent(sums), address(name))


costs: Final = SaveCosts()
"""The costs of this process, shared by all Checkpointers."""


class DeferredSignals:
    """Defers signals that would end this process. Only in its main thread, and not in processes
    forked from it."""

    def __init__(self) -> None:
        self._signals: set[int] = set()
        self._handler = self._on_signal  # each access to a bound method creates an object
        self._is_hooked = False
        self._pending = 0
        self._at = 0.0
        self._is_due = False
        self.holder: object = None
        """The newest user; an earlier one must not restore the signals."""

    def install(self, signals: Iterable[int]) -> tuple[int, ...]:
        """Defer these signals from now on, except those that the script handles; return the
        deferred ones."""
        if not _is_main_thread():
            return ()
        if not self._is_hooked:
            self._is_hooked = True
            os.register_at_fork(after_in_child=self._after_fork)
        requested = set(signals)
        for signum in requested - _handled():
            if signal.getsignal(signum) == signal.SIG_DFL:
                signal.signal(signum, self._handler)
                self._signals.add(signum)
        return tuple(sorted(self._signals & requested))

    def stop_deferring_handled(self) -> bool:
        """Stop deferring signals for which the script has installed a handler since the last call;
        returns whether there were any."""
        taken = {one for one in self._signals if signal.getsignal(one) is not self._handler}
        self._signals -= taken
        return bool(taken)

    @property
    def signals(self) -> tuple[int, ...]:
        """The deferred signals."""
        return tuple(sorted(self._signals))

    @property
    def pending_for(self) -> float | None:
        """Seconds for which a signal has been pending; None if there is none."""
        return time.monotonic() - self._at if self._pending else None

    def deliver(self) -> None:
        """Let the pending signal end the process. From another thread than the main one, send it
        again to the process, where it counts as a second signal."""
        signum = self._pending
        self._is_due = True
        if _is_main_thread():
            self._pending = 0  # a handler that the script has installed since may let it continue
        self.restore()
        # To the process, not to this thread: Linux delivers it to the main thread, and interrupts
        # its system call.
        os.kill(os.getpid(), signum)

    def restore(self) -> None:
        """Stop deferring: set the default actions again, unless the script has installed handlers.
        Does nothing outside the main thread."""
        if not _is_main_thread():
            return
        for signum in self._signals:
            if signal.getsignal(signum) is self._handler:
                signal.signal(signum, signal.SIG_DFL)
        self._signals.clear()

    def _after_fork(self) -> None:
        """In a forked child, drop a pending signal: it was meant for the parent."""
        self.restore()
        self._pending = 0

    def _on_signal(self, signum: int, frame: Any) -> None:
        if not self._pending:
            self._pending, self._at, self._is_due = signum, time.monotonic(), False
            return
        # not a second signal: Slurm sends SIGTERM twice at a time limit
        same = signum == signal.SIGTERM == self._pending
        if self._is_due or not same or time.monotonic() - self._at >= REPEAT_WITHIN:
            self._pending = signum
            self.deliver()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _handled() -> set[int]:
    """Signals for which this process has a handler. signal.getsignal knows only Python's:
    faulthandler and a JVM install theirs in C."""
    with suppress(OSError, ValueError), open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigCgt:"):
                mask = int(line.split()[1], 16)
                return {signum for signum in range(1, 65) if mask >> (signum - 1) & 1}
    return set()


_deferred = DeferredSignals()
"""The deferred signals of this process, shared by all Checkpointers."""


class Departure:
    """What one rank does when its node, or another one, leaves."""

    def __init__(
        self,
        connection: AgentConnection,
        signals: Iterable[int],
        deferred: DeferredSignals = _deferred,
    ) -> None:
        """`signals`: those to defer."""
        self._connection = connection
        self._deferred = deferred
        self._last = NONE  # the newest step
        self.answered = NONE
        """The last requested step that was saved or missed."""
        self._is_saved = False
        self._by_itself = False  # the current save was not requested
        deferred.holder = self
        if mine := deferred.install(signals):
            connection.send(PutsOff(mine))

    def resume_from(self, step: int) -> None:
        """Note that training continues from this step."""
        self._last = step

    def reach_step(self, requested: int, step: int) -> bool:
        """Note that training has reached this step; returns whether it must be saved, regardless of
        the schedule. A pending signal ends the process here if the required step is saved.
        `requested`: the segment's `save_at`."""
        before, self._last = self._last, step
        self._by_itself = False
        if self._deferred.stop_deferring_handled():
            self._connection.send(PutsOff(self._deferred.signals))
        is_ahead = requested not in (NONE, self.answered)
        if is_ahead and requested <= step:
            self.answered, self._is_saved, is_ahead = requested, False, False
            if before < requested:
                return True
            self._connection.send(StepMissed(requested, step))
        pending_for = self._deferred.pending_for
        if pending_for is None or is_ahead:
            return False
        if self._is_saved:
            self._deferred.deliver()
        self._by_itself = pending_for >= STEP_REQUEST_LIMIT
        return self._by_itself

    def report_save(self, step: int, *, saved: bool) -> None:
        """Record whether the step was saved. A failure of a requested one is reported, and the
        agent requests another step."""
        self._is_saved = saved
        if not saved and not self._by_itself:
            self._connection.send(StepMissed(self.answered, step))

    @property
    def is_ending(self) -> bool:
        """Whether a deferred signal must take effect now."""
        return self._deferred.pending_for is not None and (self._is_saved or self._by_itself)

    def exit_by_signal(self) -> None:
        """Let the deferred signal end this process."""
        self._deferred.deliver()

    def close(self) -> None:
        """Restore the signals, because training is over; a pending one takes effect. Does nothing
        if a newer Departure uses them."""
        if self._deferred.holder is not self:
            return
        if self._deferred.signals:
            with suppress(AgentConnectionError):
                self._connection.send(PutsOff(()))
        if self._deferred.pending_for is not None:
            self._deferred.deliver()
        self._deferred.restore()
