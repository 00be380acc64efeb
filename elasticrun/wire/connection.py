"""One conversation over one stream socket: frames, descriptors beside them, a bounded outbox.

For asyncio, for selectors and for callers who wait; it imports none of them. Whoever owns a
`Connection` hooks its `fileno` into its own loop, calls `receive` when it can be read and `flush`
when it can be written (while `unsent` is not 0), and says what the end of it means.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from elasticrun.wire.frames import FrameBuffer, encode

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
