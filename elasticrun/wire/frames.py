"""Frames of messages, four bytes of length (big endian) and then one JSON object; and conversations
in frames over a stream socket.

Used between the agent (or a caller of elastic_launch) and the fork server (`wire.spawning`),
between ranks, savers and their agent (`wire.snapshots`), and between savers (`saver.transfer`).
Anything that is not exactly one of the expected messages raises `FrameError`, whose text is one
sentence for the operator: there is no second guess about what a peer may have meant.

A `Connection` has descriptors beside its messages and a bounded outbox. It is for asyncio, for
selectors and for callers who wait, and imports none of them: whoever owns it hooks its `fileno`
into their own loop, calls `receive` when it can be read and `flush` when it can be written (while
`unsent` is not 0), and says what the end of it means.
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
"""Room for an environment of 2 MB (Linux' own bound for one exec) with its JSON escapes."""

LENGTH_BYTES = 4


class FrameError(ValueError):
    """The bytes are no message of this conversation; the conversation must end."""


def encode(message: DataclassInstance) -> bytes:
    """One whole frame of a message of one of the unions. Raises FrameError if it would be longer
    than MAX_FRAME_BYTES."""
    body = {"type": _name_of(type(message)), **plain(message)}
    payload = json.dumps(body, separators=(",", ":")).encode("ascii")
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(
            f"a {body['type']} message of {len(payload)} bytes is longer than the "
            f"{MAX_FRAME_BYTES} bytes that a frame may have"
        )
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


def length_of(prefix: bytes | bytearray, most: int = MAX_FRAME_BYTES) -> int:
    """How many bytes of a frame follow its first LENGTH_BYTES. FrameError for more than `most`."""
    length = int.from_bytes(prefix[:LENGTH_BYTES], "big")
    if length > most:
        raise FrameError(f"a frame claims {length} bytes; at most {most} are allowed")
    return length


def decode(payload: bytes, types_by_name: dict[str, type]) -> Any:
    """The message in one payload (without its length). Raises FrameError."""
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
    """The messages of a union by their names on the wire."""
    return {_name_of(kind): kind for kind in typing.get_args(union)}


def _name_of(kind: type) -> str:
    """A class that is called otherwise than its message says so by `on_wire`."""
    name: str = getattr(kind, "on_wire", kind.__name__)
    return name


class FrameBuffer:
    """Bytes in, messages out, for one direction of one conversation.

    Holds at most one frame and what one read brought with it.
    """

    def __init__(self, union: Any) -> None:
        """`union`, such as `ToSpawner` or `FromRank`: the messages that may come."""
        self._types = types_of(union)
        resolve(union)
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Take in bytes; yield each message that is complete now. Raises FrameError."""
        self._bytes += data
        while len(self._bytes) >= LENGTH_BYTES:
            end = LENGTH_BYTES + length_of(self._bytes)
            if len(self._bytes) < end:
                return
            payload = bytes(self._bytes[LENGTH_BYTES:end])
            del self._bytes[:end]
            yield decode(payload, self._types)

    @property
    def pending(self) -> int:
        """How many bytes of an unfinished frame are held; not 0 at EOF means a cut frame."""
        return len(self._bytes)


# ---------------------------------------------------------------- a conversation

READ_BYTES: Final = 256 * 1024

MAX_UNSENT: Final = 16 * 1024 * 1024
"""Bytes that may wait for a peer that does not read."""


_PEER: Final = struct.Struct("3i")  # pid, uid, gid


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process and user id of who is at the other end, which the kernel says; process 0: of another
    pid namespace."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


class HungUp(ConnectionError):
    """The peer has closed its end."""


class NotRead(ConnectionError):
    """The peer does not read what it is told."""


class DescriptorsLost(ConnectionError):
    """There was room for no more of them."""


class Connection:
    """The socket is the connection's from here on. After an error it is to be closed."""

    def __init__(
        self,
        sock: socket.socket,
        union: Any,
        *,
        most_bytes: int = MAX_UNSENT,
        most_messages: int = 0,
        descriptors: int = 0,
    ) -> None:
        """`union`: the messages that may come. `most_bytes`, `most_messages`: what may wait for
        the peer to read, 0: any number. `descriptors`: how many may come with one read; where none
        are expected the kernel closes them."""
        sock.setblocking(False)
        self._socket = sock
        self._frames = FrameBuffer(union)
        self._most_bytes, self._most_messages = most_bytes, most_messages
        self._most_descriptors = descriptors
        self._outbox: deque[tuple[bytes, int]] = deque()
        self._descriptors: deque[int] = deque()
        self.unsent = 0
        """Bytes that wait for the peer to read."""

    @property
    def cut(self) -> bool:
        """Whether half a frame has come: where the peer has gone, in the middle of a message."""
        return self._frames.pending > 0

    def fileno(self) -> int:
        """-1 once it is closed: take it out of a loop before."""
        return self._socket.fileno()

    def send(self, message: Any, descriptor: int = -1) -> None:
        """Queue a message, with a descriptor beside it (a duplicate: the caller keeps its own), and
        write what the socket takes. NotRead where too much waits then."""
        data = encode(message)
        self._outbox.append((data, os.dup(descriptor) if descriptor >= 0 else -1))
        self.unsent += len(data)
        self.flush()
        if self.unsent > self._most_bytes > 0 or len(self._outbox) > self._most_messages > 0:
            raise NotRead("it does not read what it is told")

    def flush(self) -> None:
        """Write what the socket takes. What cannot be sent any more is dropped: what the peer said
        before is read first, and then `receive` tells that it is over."""
        try:
            while self._outbox:
                data, descriptor = self._outbox[0]
                beside = []
                if descriptor >= 0:
                    rights = array.array("i", [descriptor])
                    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                sent = self._socket.sendmsg([data], beside, socket.MSG_NOSIGNAL)
                if descriptor >= 0:  # it went with the first byte
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
            if not isinstance(error, ConnectionError):  # too many descriptors under way, say
                self.hang_up()

    def receive(self) -> Iterator[Any] | None:
        """The messages that have come, to be taken up to the end; None if nothing has. HungUp and
        other OSErrors; FrameError for what is no message, after those before it."""
        try:
            data = self._read()
        except BlockingIOError:
            return None
        if not data:
            raise HungUp("it hung up")
        return self._frames.feed(data)

    def wait(self) -> Iterator[Any]:
        """As `receive`, once something has come."""
        self._socket.setblocking(True)
        try:
            found = self.receive()
        finally:
            self._socket.setblocking(False)
        assert found is not None
        return found

    def descriptor(self) -> int | None:
        """The next one that came beside a message, from here on the caller's; None: none came."""
        return self._descriptors.popleft() if self._descriptors else None

    def _read(self) -> bytes:
        if not self._most_descriptors:
            return self._socket.recv(READ_BYTES)
        most = self._most_descriptors
        data, descriptors, flags, _ = socket.recv_fds(self._socket, READ_BYTES, most)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
            self._descriptors.append(descriptor)
        if flags & socket.MSG_CTRUNC:
            raise DescriptorsLost("descriptors got lost: there is room for no more")
        return data

    def hang_up(self) -> None:
        """End it for every process that has this socket; what has come can be received yet."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Also of descriptors that nobody has sent or taken yet."""
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
