"""The master's ear: one handler per stream, which decodes, checks who speaks, and enqueues.

Nothing of a stream reaches the brain before a Hello of our protocol and our job. What a peer does
wrong ends that stream with a sentence to the peer and touches nobody else: silence instead of a
Hello, bytes that are no message, a second Hello, more reports than an agent has reason to send.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from elasticrun import __version__
from elasticrun.config import EXIT_REFUSED, MAX_SESSIONS
from elasticrun.core.effects import Attached, Detached, Heard
from elasticrun.master.loop import Loop
from elasticrun.master.mailbox import Mailbox
from elasticrun.wire import codec
from elasticrun.wire.channel import grpc
from elasticrun.wire.messages import PROTOCOL_VERSION, Beat, Echo, Hello, Refused

HELLO_LIMIT: Final = 10.0
"""Seconds within which a stream must say Hello; an agent does so in its first milliseconds."""

RATE: Final = 50.0
"""Reports per second that one stream may go on sending; an agent sends one or two."""

BURST: Final = 500.0
"""Reports that may come at once: a node whose ranks all fail, an agent that was held up."""

FLUSH_LIMIT: Final = 5.0
"""Seconds an agent that was hung up on has to read its last order."""

NO_HELLO: Final = f"no Hello came within {HELLO_LIMIT:.0f} s"


class Wrong(Exception):
    """What the peer did wrong: the sentence it is told, and the status of its stream."""

    def __init__(self, reason: str, code: Any = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        super().__init__(reason)
        self.code = code


class NotOurs(Exception):
    """An agent of another version or job: told once, in an order that ends it."""


@dataclass(slots=True)
class Allowance:
    """A bucket that fills with RATE reports a second up to BURST."""

    clock: Callable[[], float] = time.monotonic
    left: float = BURST
    at: float = field(init=False)

    def __post_init__(self) -> None:
        self.at = self.clock()

    def take(self) -> bool:
        """Use one report's worth; False when there is none left."""
        now = self.clock()
        self.left = min(BURST, self.left + (now - self.at) * RATE)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


class Ear:
    """Handlers of the two gRPC methods, and the count of who is attached."""

    def __init__(
        self,
        loop: Loop,
        job_id: str,
        *,
        most: int = MAX_SESSIONS,
        hello_limit: float = HELLO_LIMIT,
        on_count: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._loop = loop
        self._job_id = job_id
        self._most = most
        self._hello_limit = hello_limit
        self._on_count = on_count
        self._sessions = itertools.count(1)
        self._streams = 0
        self.attached = 0
        """Streams that have said Hello and still stand."""
        self.nodes: set[str] = set()
        """Node ids that ever attached, two at most: enough to tell one from several."""
        self.broken: set[str] = set()
        """Nodes whose last stream broke: they may be dialling, and have not heard the latest."""

    # ------------------------------------------------------------ GetStatus

    async def status(self, context: Any) -> bytes:
        """The job's page, encoded."""
        try:
            return codec.status_to_wire(self._loop.status())
        except codec.WireError as wrong:
            await context.abort(grpc.StatusCode.INTERNAL, f"no status: {wrong}")
            raise

    # ------------------------------------------------------------ Attend

    async def attend(self, context: Any) -> None:
        """One stream from its first byte to its end."""
        if self._streams >= self._most:
            # Not a Refused: room may come, and whoever dials again is no stranger.
            reason = f"this master serves {self._most} nodes already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        self._streams += 1
        try:
            await self._serve(context)
        except NotOurs as refused:
            order = Refused(reason=str(refused), exit_code=EXIT_REFUSED)
            await asyncio.wait_for(context.write(codec.order_to_wire(order)), FLUSH_LIMIT)
        except Wrong as wrong:
            await context.abort(wrong.code, str(wrong))
        finally:
            self._streams -= 1

    async def _serve(self, context: Any) -> None:
        hello = await self._hello(context)
        session = next(self._sessions)
        box = Mailbox()
        clean = False
        self.broken.discard(hello.node)
        self._count(+1, hello.node)
        self._loop.attach(Attached(session, hello), box)
        writer = asyncio.ensure_future(_write(context, box))
        reader = asyncio.ensure_future(self._read(context, session))
        clock = asyncio.get_running_loop()
        limits: list[asyncio.TimerHandle] = []
        box.on_close = lambda: limits.append(clock.call_later(FLUSH_LIMIT, writer.cancel))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                # gRPC reads the same end whether the agent closed its side or its host vanished.
                # What is written now arrives in the first case and raises in the second.
                box.put("Echo", codec.order_to_wire(Echo(reader.result())))
                box.close()
                await asyncio.wait((writer,))
            # The writer ends well when it was told to and every order is on its way.
            clean = writer.done() and not writer.cancelled() and writer.exception() is None
        finally:
            reader.cancel()
            # Not cancelled: a write that is under way would forbid the abort that may follow.
            box.close()
            await asyncio.gather(reader, writer, return_exceptions=True)
            for limit in limits:
                limit.cancel()
            self._loop.put(Detached(session, clean))
            if not clean:
                self.broken.add(hello.node)
            self._count(-1)

    def _count(self, change: int, node: str | None = None) -> None:
        self.attached += change
        if node is not None and len(self.nodes) < 2:
            self.nodes.add(node)
        self._on_count(self.attached)

    async def _hello(self, context: Any) -> Hello:
        """The first message; Wrong or NotOurs if it is not the Hello of an agent of this job."""
        try:
            data = await asyncio.wait_for(context.read(), self._hello_limit)
        except TimeoutError:
            raise Wrong(NO_HELLO, grpc.StatusCode.DEADLINE_EXCEEDED) from None
        if data is grpc.aio.EOF:
            raise Wrong("the stream ended before its Hello")
        try:
            report = codec.report_from_wire(data)
        except codec.ProtocolMismatch as other:
            raise NotOurs(
                f"this agent is elasticrun {other.version or '(unknown)'} with protocol "
                f"{other.protocol}, the master is elasticrun {__version__} with protocol "
                f"{PROTOCOL_VERSION}: install one version on all nodes"
            ) from None
        except codec.WireError as wrong:
            raise Wrong(str(wrong)) from None
        if not isinstance(report, Hello):
            raise Wrong(f"{type(report).__name__} came before Hello")
        if report.spec.job_id != self._job_id:
            raise NotOurs(
                f"this node belongs to job {report.spec.job_id!r}, the master here serves job "
                f"{self._job_id!r}: check the endpoint and --rdzv-id"
            )
        return report

    async def _read(self, context: Any, session: int) -> int:
        """Enqueue reports until the stream ends; the number of the last Beat, 0 if there was none.
        Wrong for what no agent does."""
        allowance = Allowance()
        last = 0
        while (data := await context.read()) is not grpc.aio.EOF:
            if not allowance.take():
                raise Wrong(
                    f"more than {RATE:.0f} reports a second", grpc.StatusCode.RESOURCE_EXHAUSTED
                )
            try:
                report = codec.report_from_wire(data)
            except codec.WireError as wrong:
                raise Wrong(str(wrong)) from None
            if isinstance(report, Hello):
                raise Wrong("a second Hello on one stream")
            if isinstance(report, Beat):
                last = report.number
            self._loop.put(Heard(session, report))
        return last


async def _write(context: Any, box: Mailbox) -> None:
    """Send what the loop leaves in the box, until it is closed and empty."""
    while (order := await box.take()) is not None:
        await context.write(order)
