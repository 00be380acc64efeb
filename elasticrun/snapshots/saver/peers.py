"""Connections between the savers of two nodes: fetches that the agent orders, and incoming
requests.

Each incoming connection has a thread, which passes the client's one request to the loop. Silent
clients do not block others: at the limit, the connection that has been unauthenticated for the
longest time is closed. A saver of the job authenticates within milliseconds, and connects again if
its connection was closed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from elasticrun.host.system.reasons import reason_of
from elasticrun.host.system.sandbox import NoThread, start_thread
from elasticrun.snapshots.saver import transfer
from elasticrun.snapshots.saver.attempts import retry
from elasticrun.snapshots.saver.part_written import PartError, PartWritten
from elasticrun.snapshots.saver.pool import Post, WorkerPool, WorkItem
from elasticrun.snapshots.saver.transfer import MAX_TEXT, Get, Put, Refusal
from elasticrun.snapshots.shm.segment import round_key
from elasticrun.wire.snapshots import Fetch, Fetched, FetchInto, FetchSize, FromSaver, Remark
from elasticrun.wire.types import Endpoint

FETCH_LIMIT: Final = 20.0
"""Seconds of retries of a fetch. Short, because ranks wait, and the state is in storage too."""

MAX_FETCHES: Final = 8192
"""Maximum number of fetches that await their memory; beyond it, the oldest is dropped."""

MAX_PEERS: Final = 64
"""Maximum number of open connections; if all of them are authenticated, more wait in the listen
queue."""

MAX_CLOSING: Final = 64
"""Maximum number of additional connections: those that were shut down, but whose threads have not
ended yet."""

BACKLOG: Final = 1024
"""Maximum number of connections that the kernel queues. Large, because a client that finds the
queue full retries only after a second.
"""

MAX_LOGGED_FAILURES: Final = 16
"""Maximum number of failed connections that are logged, so that a port scan does not flood the
log."""

ANSWER_LIMIT: Final = 30.0
"""Seconds that a connection's thread waits for the loop's answer."""

Answer = Callable[[Get | Put, PartWritten | None], transfer.Answer]
"""Answers a request. Called in the loop; for a Put, first with None and then with the received
description of the part."""


class Fetches:
    """Fetches snapshots from the savers of other nodes. Used by the loop's thread only."""

    def __init__(
        self, secret: str, send: Callable[[FromSaver], None], pool: WorkerPool, replicas: WorkerPool
    ) -> None:
        """`pool`: for fetches that ranks wait for; `replicas`: for the others."""
        self._secret = secret
        self._send = send
        self._pool = pool
        self._replicas = replicas
        self._orders: dict[int, Fetch] = {}

    def start(self, order: Fetch) -> None:
        """Request the snapshot's sizes from the other saver; answered by FetchSize."""
        self._orders.pop(order.key, None)
        while len(self._orders) >= MAX_FETCHES:
            self._orders.pop(next(iter(self._orders)))
        self._orders[order.key] = order
        place = Endpoint(order.host, order.port)
        get = Get(round_key(order.round).hex(), order.step, order.rank, body=False)

        def work(stop: threading.Event) -> FetchSize:
            head = retry(lambda: transfer.ask_size(place, self._secret, get), stop, FETCH_LIMIT)
            return FetchSize(order.key, True, "", head.layout_length, head.slot_bytes, head.layout)

        def failed(error: BaseException) -> FetchSize:
            return FetchSize(order.key, False, self._about(order, error), 0, 0)

        def done(size: FetchSize) -> None:
            if not size.ok and self._orders.get(order.key) is order:
                del self._orders[order.key]
            self._send(size)

        self._pool_of(order).add(WorkItem(work, failed, done))

    def fetch_into(self, into: FetchInto, descriptor: int) -> None:
        """Fetch the snapshot into this memory; takes ownership of the descriptor. Answered by
        Fetched."""
        key = into.key
        order = self._orders.pop(key, None)
        if order is None:
            os.close(descriptor)
            self._send(Fetched(key, False, "no fetch was ordered for this memory"))
            return
        place = Endpoint(order.host, order.port)

        def copy() -> None:
            which = (order.round, order.step, order.rank)
            transfer.fetch(place, self._secret, *which, descriptor, into.slot, into.layout)

        def work(stop: threading.Event) -> Fetched:
            try:
                retry(copy, stop, FETCH_LIMIT)
            finally:
                os.close(descriptor)
            return Fetched(key, True, "")

        def failed(error: BaseException) -> Fetched:
            return Fetched(key, False, self._about(order, error))

        self._pool_of(order).add(WorkItem(work, failed, self._send))

    def _pool_of(self, order: Fetch) -> WorkerPool:
        return self._replicas if order.replica else self._pool

    def _about(self, order: Fetch, error: BaseException) -> str:
        place = Endpoint(order.host, order.port)
        return (
            f"step {order.step} of rank {order.rank} could not be fetched from the saver at "
            f"{place}: {reason_of(error)}"
        )


class Peers:
    """All incoming connections. Used by the loop's thread only, except `_answer_from_loop`."""

    def __init__(
        self,
        listener: socket.socket | None,
        secret: str,
        answer: Answer,
        send: Callable[[FromSaver], None],
        post: Post,
    ) -> None:
        """`listener` None: no incoming connections."""
        self._listener = listener
        self._secret = secret
        self._answer = answer
        self._send = send
        self._post = post
        self._open: set[socket.socket] = set()
        self._unproved: dict[socket.socket, None] = {}  # in order of arrival
        self._logged_failures = 0
        self.port = 0
        if listener is not None:
            listener.setblocking(False)
            self.port = int(listener.getsockname()[1])

    def listening(self) -> socket.socket | None:
        """The listener to poll; None while no connection is accepted."""
        room = MAX_PEERS if not self._unproved else MAX_PEERS + MAX_CLOSING
        return self._listener if len(self._open) < room else None

    def accept(self) -> None:
        """Accept a connection and start its thread. If descriptors are used up, stop listening for
        good."""
        assert self._listener is not None
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # Otherwise the waiting client would wake the loop again and again.
                self._listener.close()
                self._listener = None
                about = "other nodes can no longer connect to this saver"
                self._send(Remark(f"{about}: {error.strerror}"))
            return  # any other error: the client has already disconnected
        if len(self._open) >= MAX_PEERS and self._unproved:
            self._shut_down(next(iter(self._unproved)))
        self._open.add(sock)
        self._unproved[sock] = None

        def serve_peer() -> None:
            try:
                refused = transfer.serve(sock, self._secret, self._answer_from_loop, proved)
            except BaseException as defect:
                refused = reason_of(defect)
            self._post(lambda: self._connection_ended(sock, str(address[0]), refused))

        def proved() -> None:
            self._post(lambda: self._unproved.pop(sock, None))

        try:
            start_thread(serve_peer, "peer")
        except NoThread as error:
            self._connection_ended(sock, str(address[0]), str(error))

    def _shut_down(self, sock: socket.socket) -> None:
        """Shut down a connection. Its thread sees EOF; `_connection_ended` closes the socket."""
        del self._unproved[sock]
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _connection_ended(self, sock: socket.socket, host: str, refused: str) -> None:
        sock.close()
        self._open.discard(sock)
        self._unproved.pop(sock, None)
        if refused and self._logged_failures < MAX_LOGGED_FAILURES:
            self._logged_failures += 1
            last = self._logged_failures == MAX_LOGGED_FAILURES
            more = " (further ones of this kind are not logged)" if last else ""
            self._send(Remark(f"a connection from {host} failed: {refused}{more}"))

    def _answer_from_loop(self, request: Get | Put, data: bytes) -> transfer.Answer:
        """Decode the part, if any, and get the loop's answer. Runs in a connection's thread."""
        try:
            part = PartWritten.decode(data) if data else None
        except PartError as error:
            return Refusal(str(error)[:MAX_TEXT], again=False)
        answers: SimpleQueue[transfer.Answer] = SimpleQueue()
        self._post(lambda: answers.put(self._answer(request, part)))
        try:
            return answers.get(timeout=ANSWER_LIMIT)
        except Empty:
            return Refusal("the saver there is too busy", again=True)


def listen(host: str) -> tuple[socket.socket | None, str]:
    """A listener for other savers at this address, else at all addresses, and a sentence if there
    was a problem; None if there can be none, or `host` is ""."""
    if not host:
        return None, ""
    wrong = ""
    for address, family in ((host, 0), ("", socket.AF_INET)):
        try:
            found = socket.getaddrinfo(
                address or None, 0, family, socket.SOCK_STREAM, 0, socket.AI_PASSIVE
            )
            listener = socket.create_server(found[0][4][:2], family=found[0][0], backlog=BACKLOG)
        except OSError as error:
            wrong = wrong or str(error.strerror or error)
            continue
        remark = f"the saver listens on all addresses, because {host} is not its own: {wrong}"
        return listener, remark if wrong else ""
    return None, f"other nodes cannot fetch this node's snapshots: no port on {host}: {wrong}"
