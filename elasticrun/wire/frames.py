"""Frames of messages, and connections that exchange frames over a stream socket.

A frame is four bytes of length (big endian), then one JSON object. Frames are used between the
agent (or a caller of elastic_launch) and the fork server (`wire.spawning`), between ranks, savers
and their agent (`wire.snapshots`), and between savers (`snapshots.saver.transfer`). Anything that
is not exactly one of the expected messages raises `FrameError`, whose text is one sentence for the
operator: no code guesses what a peer may have meant.

A `Connection` also transfers descriptors and has a bounded outbox. It works with asyncio, selectors
and blocking callers, and imports none of them: its owner registers its `fileno` in an event loop,
calls `receive` when it is readable and `flush` when it is writable (while `unsent` is not 0), and
handles its end.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
import types
import typing
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from elasticrun.wire.types import plain, resolve, typed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_FRAME_BYTES = 4 * 1024 * 1024
"""Enough for an environment of 2 MB (Linux's limit for one exec) with JSON's escapes."""

LENGTH_BYTES = 4


class FrameError(ValueError):
    """The bytes are not a message of this connection; the owner must end the connection."""


def encode(message: DataclassInstance) -> bytes:
    """One complete frame with this message. Raises FrameError if it is longer than
    MAX_FRAME_BYTES."""
    body = {"type": _name_of(type(message)), **plain(message)}
    payload = json.dumps(body, separators=(",", ":")).encode("ascii")
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(
            f"a {body['type']} message of {len(payload)} bytes is longer than the "
            f"{MAX_FRAME_BYTES} bytes that a frame may have"
        )
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


def length_of(prefix: bytes | bytearray, limit: int = MAX_FRAME_BYTES) -> int:
    """Number of bytes that follow the first LENGTH_BYTES of a frame. Raises FrameError if it is
    more than `limit`."""
    length = int.from_bytes(prefix[:LENGTH_BYTES], "big")
    if length > limit:
        raise FrameError(f"a frame claims {length} bytes; at most {limit} are allowed")
    return length


def decode(payload: bytes, types_by_name: dict[str, type]) -> Any:
    """The message in one payload (a frame without its length). Raises FrameError."""
    try:
        body = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame holds no JSON ({type(error).__name__})") from None
    if not isinstance(body, dict):
        raise FrameError("a frame holds no JSON object")
    name = body.pop("type", None)
    if not isinstance(name, str) or name not in types_by_name:
        raise FrameError(f"a frame holds a message of unknown type {str(name)[:60]!r}")
    try:
        return typed(body, types_by_name[name], name, strict=True)
    except ValueError as wrong:
        raise FrameError(str(wrong)) from None


def types_of(union: types.UnionType) -> dict[str, type]:
    """The message types of a union by their names on the wire."""
    return {_name_of(kind): kind for kind in typing.get_args(union)}


def _name_of(kind: type) -> str:
    """The name on the wire: `on_wire` if the class has it, else the name of the class."""
    name: str = getattr(kind, "on_wire", kind.__name__)
    return name


class FrameBuffer:
    """Converts bytes to messages, for one direction of one connection.

    Holds at most one frame and the rest of one read.
    """

    def __init__(self, union: Any) -> None:
        """`union`, such as `ToSpawner` or `FromRank`: the expected messages."""
        self._types = types_of(union)
        resolve(union)
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add bytes; yield each message that is complete. Raises FrameError."""
        self._bytes += data
        while len(self._bytes) >= LENGTH_BYTES:
            end = LENGTH_BYTES + length_of(self._bytes)
            if len(self._bytes) < end:
                return
            payload = bytes(self._bytes[LENGTH_BYTES:end])
            del self._bytes[:end]
            yield decode(payload, self._types)

    @property
    def pending_bytes(self) -> int:
        """Number of bytes of an incomplete frame; if not 0 at EOF, a frame was cut off."""
        return len(self._bytes)


# ---------------------------------------------------------------- a connection

READ_BYTES: Final = 256 * 1024

MAX_UNSENT: Final = 16 * 1024 * 1024
"""Maximum number of bytes that may wait for a peer that does not read."""


_PEER: Final = struct.Struct("3i")  # pid, uid, gid


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Pid and user id of the peer, from the kernel; pid 0: it is in another pid namespace."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


class HungUp(ConnectionError):
    """The peer has closed its end."""


class NotRead(ConnectionError):
    """The peer does not read what is sent."""


class DescriptorsLost(ConnectionError):
    """This process has too many open descriptors to receive more."""


class Connection:
    """Exchanges messages over a stream socket, which it owns. Close it after an error."""

    def __init__(
        self,
        sock: socket.socket,
        union: Any,
        *,
        max_bytes: int = MAX_UNSENT,
        max_messages: int = 0,
        max_descriptors: int = 0,
    ) -> None:
        """`union`: the expected messages. `max_bytes`, `max_messages`: limits of what may wait
        for the peer to read, 0: unlimited. `max_descriptors`: per read; if none are expected, the
        kernel closes those that arrive."""
        sock.setblocking(False)
        self._socket = sock
        self._frames = FrameBuffer(union)
        self._max_bytes, self._max_messages = max_bytes, max_messages
        self._max_descriptors = max_descriptors
        self._outbox: deque[tuple[bytes, int]] = deque()
        self._descriptors: deque[int] = deque()
        self.unsent = 0
        """Bytes that wait for the peer to read."""

    @property
    def is_cut(self) -> bool:
        """Whether an incomplete frame has been received: if the peer has exited, it did so in the
        middle of a message."""
        return self._frames.pending_bytes > 0

    def fileno(self) -> int:
        """The socket's descriptor; -1 once closed, so remove it from an event loop before that."""
        return self._socket.fileno()

    def send(self, message: Any, descriptor: int = -1) -> None:
        """Queue a message, with a descriptor if given (duplicated: the caller keeps its own), and
        write as much as the socket accepts. Raises NotRead if too much is unsent after that."""
        data = encode(message)
        self._outbox.append((data, os.dup(descriptor) if descriptor >= 0 else -1))
        self.unsent += len(data)
        self.flush()
        if self.unsent > self._max_bytes > 0 or len(self._outbox) > self._max_messages > 0:
            raise NotRead("it does not read the messages sent to it")

    def flush(self) -> None:
        """Write as much as the socket accepts. After an error, drop everything unsent without
        raising: `receive` first returns what the peer has sent before, and then reports the end."""
        try:
            while self._outbox:
                data, descriptor = self._outbox[0]
                ancillary = []
                if descriptor >= 0:
                    rights = array.array("i", [descriptor])
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                sent = self._socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
                if descriptor >= 0:  # it was sent with the first byte
                    os.close(descriptor)
                self.unsent -= sent
                if sent < len(data):
                    self._outbox[0] = (data[sent:], -1)
                else:
                    self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            self._drop_outbox()
            if not isinstance(error, ConnectionError):  # e.g. too many descriptors in flight
                self.hang_up()

    def receive(self) -> Iterator[Any] | None:
        """The messages that have arrived, to be iterated to the end; None if there are none. Raises
        HungUp and other OSErrors. The iterator raises FrameError at an invalid message."""
        try:
            data = self._read()
        except BlockingIOError:
            return None
        if not data:
            raise HungUp("it closed the connection")
        return self._frames.feed(data)

    def wait(self) -> Iterator[Any]:
        """Like `receive`, but blocks until data arrive."""
        self._socket.setblocking(True)
        try:
            found = self.receive()
        finally:
            self._socket.setblocking(False)
        assert found is not None
        return found

    def take_descriptor(self) -> int | None:
        """The next received descriptor, owned by the caller; None if there is none."""
        return self._descriptors.popleft() if self._descriptors else None

    def _read(self) -> bytes:
        if not self._max_descriptors:
            return self._socket.recv(READ_BYTES)
        limit = self._max_descriptors
        data, descriptors, flags, _ = socket.recv_fds(self._socket, READ_BYTES, limit)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
            self._descriptors.append(descriptor)
        if flags & socket.MSG_CTRUNC:
            raise DescriptorsLost("descriptors were lost: this process has too many open files")
        return data

    def hang_up(self) -> None:
        """Shut down the connection for every process that shares this socket. Data that has already
        arrived can still be received."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, and descriptors that were not sent or taken yet."""
        self._socket.close()
        self._drop_outbox()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _drop_outbox(self) -> None:
        for _, descriptor in self._outbox:
            if descriptor >= 0:
                os.close(descriptor)
        self._outbox.clear()
        self.unsent = 0
