"""A rank's conversation with its agent: frames over one socket, one answer to one question."""

from __future__ import annotations

import array
import os
import socket
import time
from typing import Any, Final, TypeVar

from elasticrun.wire import env
from elasticrun.wire.frames import FrameBuffer, FrameError, encode
from elasticrun.wire.progress import address, read_place
from elasticrun.wire.snapshots import AwaitRoom, FromRank, RoomThere, ToRank

ANSWER_LIMIT: Final = 600.0
"""Seconds for an answer: memory may have to be made, or a shard fetched from another node."""

SAY_LIMIT: Final = 5.0
"""Seconds for the agent to take what needs no answer."""

READ_BYTES: Final = 64 * 1024

Answer = TypeVar("Answer")


_places: dict[int, str] = {}  # by the pid that was given it: a forked child was given none


def own_place() -> str:
    """What the agent gave this process to dial (wire.env.SNAPSHOTS), "" if it gave nothing. From
    the first question on it does not stand in os.environ any more, so that children of this process
    do not take themselves for the rank."""
    if place := os.environ.pop(env.SNAPSHOTS, ""):
        _places[os.getpid()] = place
    return _places.get(os.getpid(), "")


class LineError(OSError):
    """The agent does not speak with this rank (any more); a sentence."""


class NoAnswer(LineError):
    """Not in time; a sentence."""


class Line:
    """The socket. LineError wherever the agent cannot be reached or does not answer in time; after
    one the line is of no more use."""

    def __init__(self, place: str) -> None:
        """`place` is what the agent gave (wire.env.SNAPSHOTS)."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer = FrameBuffer(ToRank)
        self._fds: list[int] = []
        try:
            name, self.local_rank = read_place(place)
            self._socket.settimeout(SAY_LIMIT)
            self._socket.connect(address(name))
        except (OSError, ValueError) as error:
            self._socket.close()
            raise LineError(f"the agent does not answer at {place!r} ({error})") from None

    def say(self, message: FromRank) -> None:
        """What needs no answer."""
        try:
            self._socket.settimeout(SAY_LIMIT)
            self._socket.sendall(encode(message))
        except OSError as error:
            raise LineError(f"the agent takes no more messages ({error})") from None

    def ask(self, message: FromRank, answer: type[Answer]) -> tuple[Answer, int | None]:
        """What is answered by `answer`, and the descriptor that came with it, which is the
        caller's."""
        self.say(message)
        deadline = time.monotonic() + ANSWER_LIMIT
        while True:
            for found in self._receive(deadline, message):
                if isinstance(found, RoomThere):  # too late for who has waited for it
                    continue
                fd = self._fds.pop(0) if self._fds else None
                self._drop()
                if not isinstance(found, answer):
                    if fd is not None:
                        os.close(fd)
                    raise LineError(
                        f"the agent answered {type(message).__name__} with a {type(found).__name__}"
                    )
                return found, fd

    def await_room(self, whole: int, limit: float) -> bool:
        """Wait until a slot is free, or step `whole` is whole; False if that takes longer than
        `limit` seconds. An answer that came too late for an earlier question is taken for one: look
        again."""
        if limit <= 0:
            return False
        message = AwaitRoom(whole)
        self.say(message)
        deadline = time.monotonic() + limit
        try:
            while True:
                for found in self._receive(deadline, message):
                    if isinstance(found, RoomThere):
                        return True
                    raise LineError(f"the agent said {type(found).__name__} unasked")
        except NoAnswer:
            return False

    def _receive(self, deadline: float, message: FromRank) -> Any:
        what = type(message).__name__
        try:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            room = socket.CMSG_SPACE(4 * 4)
            data, ancillary, _, _ = self._socket.recvmsg(READ_BYTES, room)
            for level, kind, raw in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
                    self._fds += fds
            if not data:
                raise LineError(f"the agent hung up instead of answering {what}")
            return list(self._buffer.feed(data))
        except TimeoutError:
            raise NoAnswer(f"no answer to {what} in {ANSWER_LIMIT:.0f} s") from None
        except (FrameError, OSError) as error:
            if isinstance(error, LineError):
                raise
            raise LineError(f"the agent's answer to {what} was lost ({error})") from None

    def await_end(self, limit: float) -> None:
        """Wait until the agent hangs up, which it does when it ends this rank, or `limit`
        seconds."""
        deadline = time.monotonic() + limit
        try:
            while (left := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(READ_BYTES):
                    return
        except OSError:
            return

    def _drop(self) -> None:
        """Descriptors that nobody asked for."""
        while self._fds:
            os.close(self._fds.pop())

    def close(self) -> None:
        self._drop()
        self._socket.close()
