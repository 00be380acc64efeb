"""The port proxy: shares the user's master port between the job master and the current store.

If the user names a master port, ranks get exactly that MASTER_PORT, as under torchrun, and agents
connect to the same port for the job master (decision 008). The proxy listens on it and reads the
first bytes of each connection: HTTP/2 and TLS go to the master, everything else to the store of the
current round. When the agent sets another store, connections to the old one are closed. Connections
wait while there is no store or no master.

It is a separate process, so that a busy agent delays no store; it imports the standard library
only. The agent binds the port, starts `command(...)` in a new session with both descriptors
inherited, and writes one JSON object per line to the control descriptor (a pipe or socket):

    {"master": "127.0.0.1:43117"}     where the job master listens
    {"store": "10.0.0.7:51234"}       the store of the round that starts now
    {"store": null}                   the round is over; hold new connections

EOF on the control descriptor ends the proxy. Hosts should be addresses; a name is resolved when it
arrives, which blocks the proxy meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import heapq
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

PREFACE = b"PRI * HTTP/2.0"
"""The first bytes of every HTTP/2 connection (RFC 9113, 3.4); no TCPStore request starts like
this."""

CLIENT_HELLO = b"\x16\x03"
"""The first bytes of every TLS connection (RFC 8446, 5.1); TCPStore does not use TLS, and its
clients send a zero byte first."""

HEAD_LIMIT = 30.0
"""Seconds within which a client must send enough bytes to be classified."""

DIAL_LIMIT = 10.0
"""Seconds for connecting to the master or the store."""

BUFFER = 256 * 1024
"""Bytes buffered per direction for a slow reader; when full, the proxy stops reading from its
peer."""

CHUNK = 64 * 1024
"""Bytes moved at a time, so that connections take turns."""

MAX_CONNECTIONS = 32_768
"""Maximum number of simultaneous connections; less if the limit of open files is lower. Others wait
in the kernel's backlog."""

ACCEPT_AGAIN = 1.0
"""Seconds to stop accepting after running out of file descriptors; otherwise epoll would report the
waiting connections in a busy loop."""

MAX_LINE = 4096
"""Maximum bytes of a control line; a longer one is dropped."""

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that the kernel sends us when our parent dies."""

_READ, _WRITE, _HUNG, _HALF = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP, select.EPOLLRDHUP

Address = tuple[int, tuple[object, ...]]
"""Socket family and address, as `connect` takes it."""


def command(listen_fd: int, control_fd: int, python: str = sys.executable) -> list[str]:
    """The command line of a proxy for the listening socket `listen_fd`."""
    return [python, "-I", "-S", os.path.abspath(__file__), str(listen_fd), str(control_fd)]


def parse_address(text: str) -> Address:
    """Parse `host:port`, IPv6 in brackets. Raises ValueError or OSError if it is invalid or does
    not resolve."""
    host, _, port = text.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    return family, address


class ProxiedConnection:
    """One proxied connection: the client's socket (front) and the socket to the target (back)."""

    __slots__ = ("back", "dialling", "ended", "front", "open", "target", "to_back", "to_front")

    def __init__(self, front: socket.socket) -> None:
        self.front = front
        self.back: socket.socket | None = None
        self.target = ""  # "master" or "store", once the first bytes are known
        self.dialling = False
        self.open = True
        self.to_back = bytearray()  # bytes waiting for `back`, including the first ones
        self.to_front = bytearray()  # bytes waiting for `front`
        self.ended: dict[str, bool] = {}  # side ("front", "back") -> whether its EOF was forwarded

    def pending(self, side: str) -> bytearray:
        """Bytes read from `side` and not yet written to the other one."""
        return self.to_back if side == "front" else self.to_front

    def sides(self) -> list[tuple[str, socket.socket]]:
        """The open sockets with their names."""
        sides = [("front", self.front)]
        return sides if self.back is None else [*sides, ("back", self.back)]


class Proxy:
    """The event loop: one epoll, whose timeout is the next deadline; no threads."""

    def __init__(self, listener: socket.socket, control_fd: int, most: int) -> None:
        self._listener = listener
        self._control = control_fd
        self._max_connections = most
        self._line = bytearray()
        self._targets: dict[str, str | None] = {"master": None, "store": None}
        self._where: dict[str, Address | None] = {"master": None, "store": None}
        self._links: dict[int, tuple[ProxiedConnection, str]] = {}  # fd -> connection and side
        self._masks: dict[int, int] = {}  # fd -> its epoll events
        self._limits: list[tuple[float, int, ProxiedConnection, Callable[[], bool]]] = []
        self._limit_count = 0
        self._count = 0
        self._accepting = False
        self._paused_until: float | None = None
        self._running = True
        self._epoll = select.epoll()

    def run(self) -> None:
        """Serve until EOF on the control descriptor."""
        os.set_blocking(self._control, False)
        self._listener.setblocking(False)
        self._watch(self._control, _READ)
        self._accept_more()
        while self._running:
            for fd, events in self._epoll.poll(self._next_limit()):
                if fd == self._control:
                    self._read_control()
                elif fd == self._listener.fileno():
                    self._accept()
                elif fd in self._links:
                    self._handle_events(*self._links[fd], events)
            self._check_limits()

    # ------------------------------------------------------------ control

    def _read_control(self) -> None:
        try:
            data = os.read(self._control, MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._running = False
            return
        *lines, rest = (bytes(self._line) + data).split(b"\n")
        self._line = bytearray(rest if len(rest) <= MAX_LINE else b"")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                for target in self._targets.keys() & message.keys():
                    self._retarget(target, message[target])

    def _retarget(self, target: str, new: object) -> None:
        """Set a new address for the master or the store. Connections to the old one are closed;
        those that wait for one are connected."""
        if new == self._targets[target]:
            return
        where: Address | None = None
        if isinstance(new, str):
            with contextlib.suppress(OSError, ValueError):
                where = parse_address(new)
        self._targets[target] = new if where is not None and isinstance(new, str) else None
        self._where[target] = where
        for link in {id(link): link for link, _ in self._links.values()}.values():
            if link.target != target:
                continue
            if link.back is not None:
                self._close(link)  # to the previous round's store, or to a master that has exited
            elif where is not None:
                self._dial(link)

    # ------------------------------------------------------------ new connections

    def _accept_more(self) -> None:
        accepting = self._count < self._max_connections and self._paused_until is None
        if accepting != self._accepting:
            self._accepting = accepting
            self._watch(self._listener.fileno(), _READ if accepting else 0)

    def _accept(self) -> None:
        try:
            front, _ = self._listener.accept()
        except OSError as error:  # the client is gone, unless this process is out of resources
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._paused_until = time.monotonic() + ACCEPT_AGAIN
                self._accept_more()
            return
        _prepare(front)
        link = ProxiedConnection(front)
        self._count += 1
        self._links[front.fileno()] = (link, "front")
        self._limit(HEAD_LIMIT, link, lambda: not link.target)
        self._refresh(link)
        self._accept_more()

    def _classify(self, link: ProxiedConnection) -> None:
        """Classify a connection as soon as its first bytes suffice, and connect to its target."""
        head = bytes(link.to_back[: len(PREFACE)])
        for start in (PREFACE, CLIENT_HELLO):
            if start.startswith(head) and len(head) < len(start):
                return
        link.target = "master" if head.startswith((PREFACE, CLIENT_HELLO)) else "store"
        if self._where[link.target] is not None:
            self._dial(link)

    def _dial(self, link: ProxiedConnection) -> None:
        where = self._where[link.target]
        assert where is not None
        family, address = where
        try:
            back = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # no free descriptor
            self._close(link)
            return
        _prepare(back)
        link.back, link.dialling = back, True
        self._links[back.fileno()] = (link, "back")
        try:
            back.connect(address)
        except BlockingIOError:
            pass
        except OSError:
            self._close(link)
            return
        self._limit(DIAL_LIMIT, link, lambda: link.dialling)
        self._refresh(link)

    # ------------------------------------------------------------ bytes

    def _handle_events(self, link: ProxiedConnection, side: str, events: int) -> None:
        """Handle epoll events of one socket of a connection."""
        try:
            if link.back is None and events & (_HUNG | _HALF) and link.target:
                self._close(link)  # the client left while waiting
                return
            if side == "back" and link.dialling:
                wrong = link.back.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if link.back else 0
                if wrong:
                    self._close(link)
                    return
                link.dialling = False
            if events & (_READ | _HUNG | select.EPOLLERR) and self._may_read(link, side):
                self._receive(link, side)
            self._forward(link)
        except BlockingIOError:
            pass
        except OSError:
            self._close(link)
            return
        if link.open:
            self._refresh(link)

    def _receive(self, link: ProxiedConnection, side: str) -> None:
        source = link.front if side == "front" else link.back
        assert source is not None
        data = source.recv(CHUNK)
        if data:
            link.pending(side).extend(data)
            if not link.target:
                self._classify(link)
        elif not link.target:
            self._close(link)
        else:
            link.ended.setdefault(side, False)

    def _forward(self, link: ProxiedConnection) -> None:
        """Forward buffered bytes, and the EOF of a side once all its bytes are forwarded."""
        if link.back is None or link.dialling or not link.open:
            return
        for side, target in (("front", link.back), ("back", link.front)):
            pending = link.pending(side)
            if pending:
                with contextlib.suppress(BlockingIOError):
                    sent = target.send(memoryview(bytes(pending[:CHUNK])))
                    del pending[:sent]
            if not pending and link.ended.get(side) is False:
                target.shutdown(socket.SHUT_WR)
                link.ended[side] = True
        if all(link.ended.get(side) for side in ("front", "back")):
            self._close(link)

    def _may_read(self, link: ProxiedConnection, side: str) -> bool:
        """Whether to read from this side now."""
        if side in link.ended or (side == "back" and link.dialling):
            return False
        if side == "front" and link.target and (link.back is None or link.dialling):
            return False  # the first bytes suffice until the target is connected
        return len(link.pending(side)) < BUFFER

    def _refresh(self, link: ProxiedConnection) -> None:
        """Watch each socket for exactly the events that can be handled now."""
        for side, sock in link.sides():
            mask = _READ if self._may_read(link, side) else 0
            other = "back" if side == "front" else "front"
            if link.pending(other) or (side == "back" and link.dialling):
                mask |= _WRITE
            if link.target and link.back is None:
                mask = _HALF  # waiting: only a disconnect matters
            self._watch(sock.fileno(), mask)

    # ------------------------------------------------------------ housekeeping

    def _watch(self, fd: int, mask: int) -> None:
        """Update epoll. A descriptor without events is unregistered, because epoll reports EPOLLHUP
        whatever the mask."""
        before = self._masks.get(fd, 0)
        if mask == before:
            return
        if not before:
            self._epoll.register(fd, mask)
        elif not mask:
            self._epoll.unregister(fd)
        else:
            self._epoll.modify(fd, mask)
        self._masks[fd] = mask

    def _close(self, link: ProxiedConnection) -> None:
        if not link.open:
            return
        link.open = False
        for _, sock in link.sides():
            self._watch(sock.fileno(), 0)
            self._masks.pop(sock.fileno(), None)
            del self._links[sock.fileno()]
            sock.close()
        self._count -= 1
        self._paused_until = None
        self._accept_more()

    def _limit(self, after: float, link: ProxiedConnection, still: Callable[[], bool]) -> None:
        """Close the connection in `after` seconds if `still()` is true then."""
        self._limit_count += 1
        heapq.heappush(self._limits, (time.monotonic() + after, self._limit_count, link, still))

    def _next_limit(self) -> float | None:
        due = [self._limits[0][0]] if self._limits else []
        if self._paused_until is not None:
            due.append(self._paused_until)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _check_limits(self) -> None:
        now = time.monotonic()
        if self._paused_until is not None and self._paused_until <= now:
            self._paused_until = None
            self._accept_more()
        while self._limits and self._limits[0][0] <= now:
            _, _, link, still = heapq.heappop(self._limits)
            if still():
                self._close(link)


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Keepalive detects a vanished client host within some minutes.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20)


def _most_connections() -> int:
    """Raise the limit of open files to the hard limit; returns the number of connections that it
    allows, MAX_CONNECTIONS at most."""
    limit = 1024
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        limit = hard
    return MAX_CONNECTIONS if limit < 0 else min(MAX_CONNECTIONS, max(16, (limit - 16) // 2))


def main(listen_fd: int, control_fd: int) -> int:
    """Run the proxy; it ignores signals that are sent to every process of a job."""
    for word in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, word), signal.SIG_IGN)
    with contextlib.suppress(OSError):  # the agent has already started a session for us
        os.setsid()
    # A stopped proxy does not read the EOF on its control descriptor.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    most = _most_connections()
    Proxy(socket.socket(fileno=listen_fd), control_fd, most).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
