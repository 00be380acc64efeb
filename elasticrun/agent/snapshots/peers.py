"""The socket on which ranks and the saver talk to their agent (`wire.snapshots`).

It is one abstract AF_UNIX stream socket for the agent's lifetime. It has no file that could be left
behind. The kernel reports the peer's process, and another user's is rejected. A peer must introduce
itself first. One that does not, that violates the protocol, or that does not read its messages is
disconnected, with one log line. Nothing here blocks: unsent messages wait in a bounded queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Final, Protocol

from elasticrun.agent.runtime import Once, keep_sending
from elasticrun.host.log import logger
from elasticrun.wire.frames import Connection, FrameError, NotRead, peer_of
from elasticrun.wire.progress import address, mint_name
from elasticrun.wire.snapshots import (
    FromPeer,
    RankHere,
    RecoverableHere,
    SaverHere,
    ToPeer,
    WorkHere,
)

Introduction = RankHere | RecoverableHere | SaverHere | WorkHere

OUTBOX_MOST: Final = 1024
"""Maximum number of messages queued for a peer; ranks and savers read immediately."""

SPARE: Final = 8
"""Connections beyond four per local rank: the saver, and ranks that reconnect."""

INTRODUCTION_LIMIT: Final = 30.0
"""Seconds within which a peer must introduce itself."""

ACCEPT_RETRY: Final = 1.0
"""Seconds without accepting after accept() has failed."""

TEXT_MOST: Final = 500
"""Maximum characters of a peer's sentence in a log line."""


def one_line(text: str) -> str:
    """A peer's sentence, made safe for a log line."""
    return "".join(c if c.isprintable() else " " for c in text[:TEXT_MOST])


def _named(here: Introduction) -> str:
    return "the saver" if isinstance(here, SaverHere) else f"local rank {here.local_rank}"


class Peer:
    """One connection to a rank or the saver."""

    def __init__(self, channel: socket.socket, pid: int, server: PeerServer) -> None:
        self.pid = pid
        self.here: Introduction | None = None
        """Its introduction; None until it has arrived."""
        self.closed = False
        self._connection = Connection(channel, FromPeer, max_messages=OUTBOX_MOST)
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection, self._read)
        self._timer = self._loop.call_later(
            INTRODUCTION_LIMIT,
            self.break_off,
            f"it did not introduce itself within {INTRODUCTION_LIMIT:g} s",
        )

    def send(self, message: ToPeer, fd: int = -1) -> None:
        """Queue a message, optionally with a descriptor (which is duplicated: the caller keeps its
        own)."""
        if self.closed:
            return
        try:
            self._connection.send(message, fd)
        except NotRead as error:
            self.break_off(str(error))
            return
        keep_sending(self._loop, self._connection)

    def break_off(self, why: str) -> None:
        """Close the connection and log the reason."""
        if not self.closed:
            who = "a process" if self.here is None else _named(self.here)
            logger.warning("closed the snapshot connection of %s (pid %d): %s", who, self.pid, why)
            self.close()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._timer.cancel()
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        self._server.remove(self)

    def _read(self) -> None:
        try:
            messages = self._connection.receive()
        except OSError:
            self.close()
            return
        try:
            for message in messages or ():
                self._take(message)
                if self.closed:
                    return
        except FrameError as error:
            self.break_off(f"it sent an invalid message ({error})")

    def _take(self, message: FromPeer) -> None:
        introduces = isinstance(message, Introduction)
        if introduces != (self.here is None):
            self.break_off("it must introduce itself once, in its first message")
            return
        if isinstance(message, Introduction):
            self.here = message
            self._timer.cancel()
        self._server.listener.on_message(self, message)


class Listener(Protocol):
    """Receives the messages of peers."""

    def on_message(self, peer: Peer, message: FromPeer) -> None:
        """Called with each message of a peer; the first one is its introduction."""

    def lost(self, peer: Peer) -> None:
        """Called when the connection of an introduced peer has closed."""


class PeerServer:
    """The listening socket and its connections. `name`: the address that peers connect to; "" if no
    socket could be created (which is logged)."""

    def __init__(self, nproc: int, listener: Listener) -> None:
        self._most = 4 * nproc + SPARE
        self.listener = listener
        self.peers: set[Peer] = set()
        self._once = Once()
        self._socket: socket.socket | None = None
        self.name = ""

    def open(self) -> None:
        name = mint_name()
        found = None
        try:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            found.bind(address(name))
            found.listen(self._most)
        except OSError as error:
            if found is not None:
                found.close()
            logger.warning(
                "training continues without snapshots: cannot create their socket (%s)", error
            )
            return
        self._socket, self.name = found, name
        self._listen()

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        for peer in list(self.peers):
            peer.close()

    def remove(self, peer: Peer) -> None:
        """Remove a peer whose connection is closed."""
        self.peers.discard(peer)
        if peer.here is not None:
            self.listener.lost(peer)

    # ------------------------------------------------------------ connections

    def _listen(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            channel, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:  # for example, no free descriptor
            logger.warning("cannot accept a snapshot connection: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            loop.call_later(ACCEPT_RETRY, self._listen)
            return
        channel.setblocking(False)
        pid = self._trusted(channel)
        if pid is None or not self._has_room():
            with contextlib.suppress(OSError):
                channel.close()
            return
        self.peers.add(Peer(channel, pid, self))

    def _trusted(self, channel: socket.socket) -> int | None:
        """The pid of the peer; None, with a log line, for another user's process."""
        pid, uid = peer_of(channel)
        if uid == os.geteuid():
            return pid
        self._once.log(
            f"a process of another user (pid {pid}, uid {uid}) connected to the snapshot socket: "
            "refused",
            kind=f"user {uid}",
        )
        return None

    def _has_room(self) -> bool:
        if len(self.peers) < self._most:
            return True
        self._once.log(f"more than {self._most} connections about snapshots: refused")
        return False
