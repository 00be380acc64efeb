"""The saver, one per node: hashes, checks, writes, serves and fetches snapshots.

One event loop receives the agent's orders and owns all state. Slow work runs in threads
(`pool.py`), so that a hanging file system does not block the loop. The saver exits when the agent's
socket closes.
"""

from __future__ import annotations

import gc
import os
import selectors
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Final, NoReturn

from elasticrun.host.system.reasons import reason_of
from elasticrun.host.system.sandbox import raise_file_limit
from elasticrun.snapshots.saver import hashing
from elasticrun.snapshots.saver.attempts import Attempts
from elasticrun.snapshots.saver.hashing import OpenSegment
from elasticrun.snapshots.saver.part_written import PartWritten
from elasticrun.snapshots.saver.peers import Fetches, Peers, listen
from elasticrun.snapshots.saver.pool import Inbox, QueueFull, WorkerPool, WorkItem
from elasticrun.snapshots.saver.transfer import Answer, Get, Put, Refusal, ServedSnapshot
from elasticrun.snapshots.shm.segment import VERSION, round_key
from elasticrun.wire import snapshots as m
from elasticrun.wire.frames import Connection, DescriptorsLost, FrameError, HungUp, NotRead
from elasticrun.wire.spawning import SpawnSaver
from elasticrun.wire.types import MAX_PARTS, parts_of

EXIT_CONFUSED: Final = 2
"""The agent sent an invalid message or too many, or does not read."""
EXIT_DEFECT: Final = 70
EXIT_HUNG: Final = 76
"""Work on storage did not end in time."""

DIAL_LIMIT: Final = 30.0
MAX_DESCRIPTORS: Final = 64
"""Maximum number of descriptors in one read."""
BACKGROUND: Final = 10
"""What is added to the nice value of a thread that compares replicas."""
MAX_SEGMENTS: Final = 16_384
MAX_SERVED: Final = 65_536


class AgentConnectionLost(Exception):
    """The connection to the agent has ended, or must end; the text is empty after a clean end."""


class Saver:
    """The event loop. `agent`: the connected socket; `listener`: None if other nodes are not
    served; `remark`: a sentence for the operator, or ""."""

    def __init__(
        self,
        order: SpawnSaver,
        agent: socket.socket,
        listener: socket.socket | None,
        remark: str,
    ) -> None:
        self._order = order
        self._agent = Connection(agent, m.ToSaver, max_descriptors=MAX_DESCRIPTORS)
        self._remark = remark
        self._wake_read_fd, self._wake_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._inbox = Inbox(self._wake_loop)
        self._selector = selectors.DefaultSelector()
        self._segments: dict[int, OpenSegment] = {}
        self._served: dict[tuple[bytes, int, int], m.Serve] = {}
        post = self._inbox.post
        self._peers = Peers(listener, order.secret, self._answer, self.send, post)
        self._memory = WorkerPool("hash", 1, post)
        disk, puts = WorkerPool("disk", 1, post), WorkerPool("put", 4, post)
        self._attempts = Attempts(order.secret, self._segments, self.send, disk, puts)
        pools = (WorkerPool("fetch", 4, post), WorkerPool("replica", 2, post))
        self._fetches = Fetches(order.secret, self.send, *pools)

    def run(self) -> NoReturn:
        """Run until the connection to the agent ends; then exit the process."""
        code = EXIT_DEFECT
        try:
            self._selector.register(self._agent, selectors.EVENT_READ)
            self._selector.register(self._wake_read_fd, selectors.EVENT_READ)
            self.send(m.SaverHere(VERSION, self._order.key, self._peers.port))
            if self._remark:
                self.send(m.Remark(self._remark))
            self._attempts.import_modules()
            while True:
                self._poll_once()
        except AgentConnectionLost as lost:
            code = EXIT_CONFUSED if str(lost) else 0
            if code:
                write_to_stderr(str(lost))
        except Exception as defect:  # our bug
            sys.__excepthook__(type(defect), defect, defect.__traceback__)
        os._exit(code)  # threads may hang in a file system

    def send(self, message: m.FromSaver) -> None:
        """Send to the agent. Raises AgentConnectionLost if the agent does not read."""
        try:
            self._agent.send(message)
        except NotRead:
            raise AgentConnectionLost("the agent does not read its saver's messages") from None

    # ------------------------------------------------------------ one turn

    def _poll_once(self) -> None:
        writing = selectors.EVENT_WRITE if self._agent.unsent else 0
        self._selector.modify(self._agent, selectors.EVENT_READ | writing)
        listening = self._peers.listening()
        if listening is not None:
            self._selector.register(listening, selectors.EVENT_READ)
        due = self._attempts.next_deadline()
        patience = None if due is None else max(0.0, due - time.monotonic())
        ready = [key.fileobj for key, _ in self._selector.select(patience)]
        if listening is not None:
            self._selector.unregister(listening)
        if self._wake_read_fd in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_read_fd, 4096)
        for call in self._inbox.drain():
            call()
        if self._agent in ready:
            self._agent.flush()
            self._read_orders()
        if listening in ready:
            self._peers.accept()
        if self._attempts.has_hung(time.monotonic()):
            self._agent.flush()
            self._agent.hang_up()  # first, because the exit may wait for the hanging thread
            os._exit(EXIT_HUNG)

    def _wake_loop(self) -> None:
        with suppress(BlockingIOError):  # full: the loop wakes up anyway
            os.write(self._wake_write_fd, b"\0")

    def _read_orders(self) -> None:
        try:
            messages = self._agent.receive()
        except DescriptorsLost:
            raise AgentConnectionLost(
                "descriptors from the agent were lost: too many files are open"
            ) from None
        except HungUp:
            raise AgentConnectionLost(
                "the agent's last frame is truncated" if self._agent.is_cut else ""
            ) from None
        except OSError:
            raise AgentConnectionLost("") from None
        try:
            for message in messages or ():
                self._dispatch(message)
        except FrameError as error:
            raise AgentConnectionLost(str(error)) from None

    def _descriptor(self) -> int:
        """The descriptor that came with the current message."""
        descriptor = self._agent.take_descriptor()
        if descriptor is None:
            raise AgentConnectionLost("a message came without its descriptor")
        return descriptor

    # ------------------------------------------------------------ orders

    def _dispatch(self, order: Any) -> None:
        try:
            match order:
                case m.SegmentOpen():
                    self._open(order, self._descriptor())
                case m.SegmentClosed():
                    self._segments.pop(order.key, None)
                    self._memory.drop(order.key)
                    served = self._served.items()
                    self._served = {name: one for name, one in served if one.key != order.key}
                case m.HashSnapshot():
                    self._hash(order)
                case m.CheckSnapshot():
                    self._check(order)
                case m.DigestSnapshot():
                    self._digest(order)
                case m.PersistParts():
                    self._attempts.start(order)
                case m.CommitNow():
                    self._attempts.commit(order)
                case m.GiveUp():
                    self._attempts.give_up(order.attempt, time.monotonic())
                case m.Fetch():
                    self._fetches.start(order)
                case m.FetchInto():
                    self._fetches.fetch_into(order, self._descriptor())
                case m.Serve():
                    self._serve(order)
                case m.PingSaver():
                    self.send(m.SaverPong(order.number))
        except QueueFull as full:
            raise AgentConnectionLost(str(full)) from None

    def _open(self, order: m.SegmentOpen, descriptor: int) -> None:
        self._segments.pop(order.key, None)
        if len(self._segments) >= MAX_SEGMENTS:
            os.close(descriptor)
            raise AgentConnectionLost(
                f"the agent has opened {MAX_SEGMENTS} segments, which is the limit"
            )
        try:
            self._segments[order.key] = OpenSegment(descriptor, order.local_rank)
        except (OSError, ValueError) as error:
            about = f"the segment of local rank {order.local_rank} cannot be read"
            self.send(m.Remark(f"{about}: {reason_of(error)}"))

    def _hash(self, order: m.HashSnapshot) -> None:
        opened = self._segments.get(order.key)
        if opened is None:
            return

        def work(stop: threading.Event) -> str:
            hashing.hash_snapshot(opened, order.slot, order.sequence)
            return ""

        def failed(error: BaseException) -> str:
            # A rank that commits faster than we hash is not reported: the order for its newer
            # snapshot is already queued.
            return "" if isinstance(error, hashing.Overwritten) else reason_of(error)

        def done(reason: str) -> None:
            if reason:
                about = f"a snapshot of {opened.owner} was not hashed"
                self.send(m.Remark(f"{about}: {reason}"))

        self._memory.add(WorkItem(work, failed, done, urgent=False, name=order.key))

    def _check(self, order: m.CheckSnapshot) -> None:
        which = (order.key, order.slot, order.sequence)
        opened = self._segments.get(order.key)
        if opened is None:
            self.send(m.Checked(*which, False, "the saver does not have that segment"))
            return

        def work(stop: threading.Event) -> m.Checked:
            reason = hashing.check_snapshot(opened, order.slot, order.sequence)
            return m.Checked(*which, True, reason)

        def failed(error: BaseException) -> m.Checked:
            return m.Checked(*which, False, reason_of(error))

        self._memory.add(WorkItem(work, failed, self.send))

    def _digest(self, order: m.DigestSnapshot) -> None:
        opened = self._segments.get(order.key)
        if opened is None:
            reason = "the saver does not have that segment"
            self.send(m.Digested(order.key, order.number, reason, 0, (), (), 0.0))
            return

        def work(stop: threading.Event) -> m.Digested:
            with suppress(OSError):
                os.nice(BACKGROUND)  # of this thread only, which ends with this work
            began = time.thread_time()
            again = order.last > 0
            found = hashing.compared_digests(opened, order.slot, order.sequence, again=again)
            count = len(found.names)
            parts = [(0, count)]
            if again:
                parts = parts_of(order.first, min(order.last, count), MAX_PARTS)
            single = again and all(last - first == 1 for first, last in parts)
            names = tuple(found.names[first] for first, _ in parts) if single else ()
            digests = found.of_parts(parts, frozenset(order.left_out))
            spent = time.thread_time() - began
            return m.Digested(order.key, order.number, "", count, digests, names, spent)

        def failed(error: BaseException) -> m.Digested:
            return m.Digested(order.key, order.number, reason_of(error), 0, (), (), 0.0)

        self._memory.add(WorkItem(work, failed, self.send, urgent=False))

    def _serve(self, order: m.Serve) -> None:
        name = (round_key(order.round), order.step, order.rank)
        self._served.pop(name, None)
        while len(self._served) >= MAX_SERVED:
            self._served.pop(next(iter(self._served)))
        self._served[name] = order

    # ------------------------------------------------------------ other nodes

    def _answer(self, request: Get | Put, part: PartWritten | None) -> Answer:
        if isinstance(request, Put):
            return self._attempts.receive_part(request, part)
        with suppress(ValueError):
            order = self._served.get((bytes.fromhex(request.round), request.step, request.rank))
            opened = None if order is None else self._segments.get(order.key)
            if order is not None and opened is not None:
                return ServedSnapshot(opened, order.slot, order.sequence)
        return Refusal(
            f"this node does not serve step {request.step} of rank {request.rank}", again=True
        )


# ---------------------------------------------------------------- the start


def write_to_stderr(sentence: str) -> None:
    """Write one sentence to stderr, if it is still open."""
    with suppress(OSError):
        print(f"elasticrun saver: {sentence}", file=sys.stderr)


def run(order: SpawnSaver) -> NoReturn:
    """Connect to the agent and run the ordered saver; exits the process."""
    gc.enable()  # the fork server has turned it off
    raise_file_limit()
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    agent.settimeout(DIAL_LIMIT)
    try:
        agent.connect("\0" + order.place)
    except OSError as error:
        write_to_stderr(f"cannot connect to the agent: {error.strerror or error}")
        os._exit(1)
    listener, remark = listen(order.host)
    Saver(order, agent, listener, remark).run()
