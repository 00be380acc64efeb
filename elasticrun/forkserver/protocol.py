"""The server's end of the socketpair: orders in, reports out, nothing that can block."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from elasticrun.wire.frames import FrameBuffer, FrameError, encode
from elasticrun.wire.spawner import FromSpawner, ToSpawner

READ_BYTES = 256 * 1024

MAX_UNSENT = 16 * 1024 * 1024
"""Bytes of reports that may wait for an agent that does not read; beyond it the agent is lost."""


class Lost(Exception):
    """The agent is gone, or what it says cannot be understood; the sentence says which."""

    def __init__(self, reason: str, *, clean: bool = False) -> None:
        super().__init__(reason)
        self.clean = clean


class Conversation:
    """Frames over one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._incoming = FrameBuffer(ToSpawner)
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unsent)

    def read_first(self) -> tuple[ToSpawner, list[ToSpawner]]:
        """Wait for the first message; with it come those that one read happened to bring."""
        self._socket.setblocking(True)
        messages: list[ToSpawner] = []
        while not messages:
            messages += self._receive()
        self._socket.setblocking(False)
        return messages[0], messages[1:]

    def read(self) -> Iterator[ToSpawner]:
        """The messages that are there now. Raises Lost at the end of the conversation."""
        try:
            yield from self._receive()
        except BlockingIOError:
            return

    def _receive(self) -> Iterator[ToSpawner]:
        try:
            data = self._socket.recv(READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            cut = self._incoming.pending > 0
            raise Lost("the agent's last frame is cut" if cut else "", clean=not cut)
        try:
            yield from self._incoming.feed(data)
        except FrameError as error:
            raise Lost(str(error)) from None

    def send(self, report: FromSpawner) -> None:
        """Queue a report and write what the socket takes."""
        self._unsent += encode(report)
        self.flush()
        if len(self._unsent) > MAX_UNSENT:
            raise Lost("the agent does not read its reports")

    def flush(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except ConnectionError:
                self._unsent.clear()  # the next read tells
                return
            del self._unsent[:sent]
