"""The socket where ranks and the saver speak to their agent about snapshots (`wire.snapshots`).

One abstract AF_UNIX stream socket for the agent's whole life: no file, so nothing can be left. The
kernel says whose process is at the other end, and another user's is not listened to. A peer says
first who it is; one that does not, or breaks the protocol, or does not read, is closed with one
line. Nothing here blocks: what a peer does not take at once waits in a bounded queue.
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
from elasticrun.wire.snapshots import FromPeer, RankHere, SaverHere, ToPeer

OUTBOX_MOST: Final = 1024
"""Messages that wait for a peer to read; ranks and savers always do."""

SPARE: Final = 8
"""Connections beyond one for each local rank: the saver, and ranks that dial anew."""

FIRST_WORD: Final = 30.0
"""Seconds within which a peer says who it is."""

REST: Final = 1.0
"""Seconds until connections are taken again after one could not be."""

TEXT_MOST: Final = 500
"""Characters of a peer's sentence that are shown."""


def one_line(text: str) -> str:
    """A sentence of a peer's as it may be shown."""
    return "".join(c if c.isprintable() else " " for c in text[:TEXT_MOST])


def _named(here: RankHere | SaverHere) -> str:
    return "the saver" if isinstance(here, SaverHere) else f"local rank {here.local_rank}"


class Peer:
    """One connection."""

    def __init__(self, channel: socket.socket, pid: int, server: PeerServer) -> None:
        self.pid = pid
        self.here: RankHere | SaverHere | None = None
        """Its introduction."""
        self.closed = False
        self._connection = Connection(channel, FromPeer, most_messages=OUTBOX_MOST)
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection, self._read)
        self._timer = self._loop.call_later(
            FIRST_WORD, self.break_off, f"it has not said who it is within {FIRST_WORD:g} s"
        )

    def send(self, message: ToPeer, fd: int = -1) -> None:
        """Queue a message, with a descriptor beside it (a duplicate: the caller keeps its own)."""
        if self.closed:
            return
        try:
            self._connection.send(message, fd)
        except NotRead as error:
            self.break_off(str(error))
            return
        keep_sending(self._loop, self._connection)

    def break_off(self, why: str) -> None:
        """Close it, with one line."""
        if not self.closed:
            who = "a process" if self.here is None else _named(self.here)
            logger.warning(
                "%s (pid %d) is not heard about snapshots any more: %s", who, self.pid, why
            )
            self.close()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._timer.cancel()
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        self._server.gone(self)

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
            self.break_off(f"it said what cannot be understood ({error})")

    def _take(self, message: FromPeer) -> None:
        introduces = isinstance(message, RankHere | SaverHere)
        if introduces != (self.here is None):
            self.break_off("it has to say once, and first, who it is")
            return
        if isinstance(message, RankHere | SaverHere):
            self.here = message
            self._timer.cancel()
        self._server.listener.heard(self, message)


class Listener(Protocol):
    """Who hears the peers."""

    def heard(self, peer: Peer, message: FromPeer) -> None:
        """A message of a peer, its introduction first."""

    def lost(self, peer: Peer) -> None:
        """Its connection is over; it had introduced itself."""


class PeerServer:
    """The listening socket and all that have dialled. `name` is what they dial, "" where the kernel
    gave no socket (one line says so)."""

    def __init__(self, nproc: int, listener: Listener) -> None:
        self._most = 2 * nproc + SPARE
        self.listener = listener
        self.peers: set[Peer] = set()
        self._told = Once()
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
            logger.warning("training goes on without snapshots: no socket for them (%s)", error)
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

    def gone(self, peer: Peer) -> None:
        """It has closed its connection."""
        self.peers.discard(peer)
        if peer.here is not None:
            self.listener.lost(peer)

    # ------------------------------------------------------------ who dials

    def _listen(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            channel, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptors left, say
            logger.warning("a connection about snapshots could not be taken: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            loop.call_later(REST, self._listen)
            return
        channel.setblocking(False)
        pid = self._trusted(channel)
        if pid is None or not self._room():
            with contextlib.suppress(OSError):
                channel.close()
            return
        self.peers.add(Peer(channel, pid, self))

    def _trusted(self, channel: socket.socket) -> int | None:
        """The pid at the other end, None for another user's."""
        pid, uid = peer_of(channel)
        if uid == os.geteuid():
            return pid
        self._told.tell(
            f"a process of another user (pid {pid}, uid {uid}) has dialled about snapshots: it is "
            "not listened to",
            kind=f"user {uid}",
        )
        return None

    def _room(self) -> bool:
        if len(self.peers) < self._most:
            return True
        self._told.tell(f"more than {self._most} connections about snapshots: refused")
        return False
