"""The savers of other nodes that dial this one: each has a thread, and asks the loop one thing."""

from __future__ import annotations

import errno
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from elasticrun.forkserver import bulk
from elasticrun.forkserver.lanes import Post
from elasticrun.forkserver.part import PartError, PartWritten
from elasticrun.forkserver.reasons import reason_of
from elasticrun.wire.bulk import MAX_TEXT, Get, Put, Refusal
from elasticrun.wire.snapshots import FromSaver, Remark

MAX_PEERS: Final = 64
"""Connections at a time; more wait in the listener's queue."""

MAX_STRANGERS: Final = 16
"""Connections that came to nothing and are told; whoever scans ports is no news."""

ASK_LIMIT: Final = 30.0
"""Seconds that a connection waits for the loop."""

Answer = Callable[[Get | Put, PartWritten | None], bulk.Answer]
"""Is called in the loop, with the part once its bytes have come."""


class Peers:
    """All connections. Belongs to the loop's thread, but for `_asked`."""

    def __init__(
        self,
        listener: socket.socket | None,
        secret: str,
        answer: Answer,
        say: Callable[[FromSaver], None],
        post: Post,
    ) -> None:
        """`listener` None: nobody can dial."""
        self._listener = listener
        self._secret = secret
        self._answer = answer
        self._say = say
        self._post = post
        self._open = 0
        self._strangers = 0
        self.port = 0
        if listener is not None:
            listener.setblocking(False)
            self.port = int(listener.getsockname()[1])

    def listening(self) -> socket.socket | None:
        """What is readable when somebody dials; None while nobody more can be taken."""
        return self._listener if self._open < MAX_PEERS else None

    def accept(self) -> None:
        """Take one that has dialled."""
        assert self._listener is not None
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # whoever waits would wake us for ever
                self._listener.close()
                self._listener = None
                self._say(Remark(f"no other node can dial this saver any more: {error.strerror}"))
            return  # else it has gone again
        self._open += 1

        def talk() -> None:
            try:
                refused = bulk.serve(sock, self._secret, self._asked)
            except BaseException as defect:
                refused = reason_of(defect)
            self._post(lambda: self._over(str(address[0]), refused))

        threading.Thread(target=talk, name="elasticrun-peer", daemon=True).start()

    def _over(self, host: str, refused: str) -> None:
        self._open -= 1
        if refused and self._strangers < MAX_STRANGERS:
            self._strangers += 1
            last = self._strangers == MAX_STRANGERS
            more = " (no more of this kind will be told)" if last else ""
            self._say(Remark(f"a connection from {host} came to nothing: {refused}{more}"))

    def _asked(self, request: Get | Put, data: bytes) -> bulk.Answer:
        """In a connection's thread: what the loop answers."""
        try:
            part = PartWritten.decode(data) if data else None
        except PartError as error:
            return Refusal(str(error)[:MAX_TEXT], again=False)
        answers: deque[bulk.Answer] = deque()
        come = threading.Event()

        def look() -> None:
            answers.append(self._answer(request, part))
            come.set()

        self._post(look)
        if not come.wait(ASK_LIMIT):
            return Refusal("the saver there is too busy", again=True)
        return answers[0]


def listen(host: str) -> tuple[socket.socket | None, str]:
    """A listener for other savers at this address, and a sentence where it could not be just so."""
    if not host:
        return None, ""
    wrong = ""
    for address, family in ((host, 0), ("", socket.AF_INET)):
        try:
            found = socket.getaddrinfo(
                address or None, 0, family, socket.SOCK_STREAM, 0, socket.AI_PASSIVE
            )
            listener = socket.create_server(found[0][4][:2], family=found[0][0], backlog=MAX_PEERS)
        except OSError as error:
            wrong = wrong or str(error.strerror or error)
            continue
        remark = f"the saver listens on all addresses, since {host} is none of its own: {wrong}"
        return listener, remark if wrong else ""
    return None, f"this node's snapshots cannot be had by others: no port on {host}: {wrong}"
