"""What the master serves: a handler a stream, which lets in, decodes, checks, and enqueues; and
the bounds on those who are not in yet, on those who say too much, and on what readers ask for.

Nothing of a stream reaches the brain or the trace before its peer has proved the job's token
(`wire.auth`) and said Hello. What a peer does wrong ends that stream with a sentence to the peer
and touches nobody else: silence, a wrong proof, bytes that are no message, a message at the wrong
moment, the name of another node, more reports than an agent has reason to send.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final
from urllib.parse import unquote

from elasticrun import __version__
from elasticrun.config import BEAT_INTERVAL, MAX_SESSIONS
from elasticrun.core.events import Attached, Detached, Heard
from elasticrun.core.nodes.membership import beat_interval
from elasticrun.core.rounds.failures import Ending, code_of
from elasticrun.host.system.network import mtu_to
from elasticrun.master.joining import Joining
from elasticrun.master.loop import Loop, Mailbox
from elasticrun.wire import messages as m
from elasticrun.wire.auth import OPERATOR_WANTED, Denied, Doorkeeper, OutOfTurn
from elasticrun.wire.rpc import protobuf
from elasticrun.wire.rpc.channel import grpc
from elasticrun.wire.types import WireError

RATE: Final = 50.0
"""Reports per second that one stream may go on sending; an agent sends one or two."""

BURST: Final = 500.0
"""Reports that may come at once: a node whose ranks all fail, an agent that was held up."""

FLOOD_LIMIT: Final = 10.0
"""Seconds for which a stream may want to send more than RATE: meanwhile it is read at RATE and what
it sends waits at its own end; then it is dropped."""

FLUSH_LIMIT: Final = 5.0
"""Seconds an agent that was hung up on has to read its last order."""

PROVE_LIMIT: Final = 5.0
"""Seconds from the opening of a stream to the end of its introduction."""

MAX_UNPROVED: Final = 4096
"""Streams that may be on their way in at a time; ten thousand agents that come back together are
answered faster than they dial."""

READ_VERBS: Final = ("picture", "stacks")
"""What a reader may ask for; all else is an operator's."""

TELL_EVERY: Final = 60.0
"""Seconds after which a refusal of the same kind is logged again: a flood fills no log."""

DIAL_LIMIT: Final = 2.0
"""Seconds from the SYN to the last byte of the nonce; a second SYN goes out after one."""

MAX_REACHING: Final = 32
"""Readers that are served at a time; each holds one connection of ours for DIAL_LIMIT at most."""

DEAF: Final = 2.5 * BEAT_INTERVAL
"""Seconds without a word of anybody that prove nothing about anybody: two nodes beat more often."""

MAX_CALLS: Final = MAX_SESSIONS + MAX_UNPROVED + 256
"""Streams of all kinds that the server takes at a time; the bounds below it speak in sentences."""

logger = logging.getLogger("elasticrun")


class Wrong(Exception):
    """What the peer did wrong: the sentence it is told, and the status of its stream."""

    def __init__(self, reason: str, code: Any = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        super().__init__(reason)
        self.code = code


class Allowance:
    """A bucket that fills with RATE reports a second up to BURST."""

    def __init__(self) -> None:
        self.left = BURST
        self.at = self.since = time.monotonic()
        """`since`: when the bucket was last seen with something to spare."""

    def take(self) -> float:
        """Use one report's worth: the seconds after which the next may be read, 0.0 for at once."""
        now = time.monotonic()
        self.left = min(BURST, self.left + (now - self.at) * RATE) - 1
        self.at = now
        if self.left >= 1:
            self.since = now
            return 0.0
        return (1 - self.left) / RATE


class Servicer:
    """Handlers of the gRPC methods, and the count of who is attached."""

    def __init__(
        self,
        loop: Loop,
        job_id: str,
        *,
        token: str = "",
        operator: str = "",
        term: int = 0,
        joining: Joining | None = None,
        on_count: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`token`: what a peer must prove, "" for nothing; `operator`: what an operator must, ""
        where there can be none; `term`: this master's, proved too; `joining`: by codes."""
        self._loop = loop
        self._job_id = job_id
        self._token = token
        self._operator = operator
        self._term = term
        self._joining = joining or Joining(job_id, token, None)
        self._on_count = on_count
        self._pending = PendingHandshakes()
        self._refusals = Refusals()
        self._listening = Listening()
        self._sessions = itertools.count(1)
        self._page: tuple[m.JobStatus, bytes] | None = None
        self._reaching = 0
        self.attached = 0
        """Streams that have said Hello and still stand."""
        self.nodes: set[str] = set()
        """Node ids that ever attached."""
        self.broken: set[str] = set()
        """Nodes whose last stream broke: they may be dialling, and have not heard the latest."""

    def may_come_back(self) -> bool:
        """Whether an agent whose stream broke may be dialling still."""
        nodes = self._loop.status().nodes
        return any(node.state == "suspect" and node.node in self.broken for node in nodes)

    @property
    def unproved(self) -> int:
        """Streams that are on their way in."""
        return len(self._pending)

    # ------------------------------------------------------------ the methods

    async def status(self, context: Any) -> None:
        """One reader, from its knock to the page."""
        await self._received(context, m.Role.READER, protobuf.answer_to_wire, self._show)

    async def reach(self, context: Any) -> None:
        """One reader that wants to be dialled."""
        await self._received(context, m.Role.READER, protobuf.answer_to_wire, self._dial)

    async def ask_for(self, context: Any) -> None:
        """One reader that wants to know what the ranks do."""
        await self._received(context, m.Role.READER, protobuf.answer_to_wire, self._read_for)

    async def operate(self, context: Any) -> None:
        """One operator, who may ask for anything."""
        await self._received(context, m.Role.OPERATOR, protobuf.answer_to_wire, self._do)

    async def join(self, context: Any) -> None:
        """One node that has a join code."""
        await self._received(context, m.Role.JOINER, protobuf.answer_to_wire, self._invite)

    async def attend(self, context: Any) -> None:
        """One agent's stream, from its first byte to its end."""
        await self._received(context, m.Role.AGENT, protobuf.order_to_wire, self._serve)

    async def _received(
        self,
        context: Any,
        role: m.Role,
        encode: Callable[[Any], bytes],
        serve: Callable[[Any, Doorkeeper], Awaitable[None]],
    ) -> None:
        """Let the peer in and serve it; tell it, in either case, why it ends if it does."""
        token = self._operator if role is m.Role.OPERATOR else self._token
        keeper = Doorkeeper(token, __version__, self._job_id, self._term, role)
        try:
            if role is m.Role.JOINER:
                self._joining.admit()
            await self._let_in(context, keeper, encode)
            await serve(context, keeper)
        except Denied as denied:
            self._refusals.add(denied.word)
            order = m.Refused(reason=str(denied), exit_code=code_of(Ending.REFUSED))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(context.write(encode(order)), FLUSH_LIMIT)
        except Wrong as wrong:
            await context.abort(wrong.code, str(wrong))

    async def _let_in(
        self, context: Any, keeper: Doorkeeper, encode: Callable[[Any], bytes]
    ) -> None:
        """Carry the introduction. Denied, Wrong."""
        try:
            async with self._pending.step(lambda: keeper.awaits):
                while not keeper.is_in:
                    answer = keeper.hear(await _first(context, keeper.awaits))
                    if answer is not None:
                        await context.write(encode(answer))
        except OutOfTurn as wrong:
            raise Wrong(str(wrong)) from None

    # ------------------------------------------------------------ a reader

    async def _show(self, context: Any, _keeper: Doorkeeper) -> None:
        """Send the job's page, which is encoded once however many read it."""
        status = self._loop.status()
        if self._page is None or self._page[0] is not status:
            try:
                self._page = (status, protobuf.answer_to_wire(status))
            except WireError as wrong:
                raise Wrong(f"no status: {wrong}", grpc.StatusCode.INTERNAL) from None
        await context.write(self._page[1])

    async def _dial(self, context: Any, _keeper: Doorkeeper) -> None:
        """Hear where the reader wants to be dialled, and tell what came of it."""
        # Who says no more takes a place among the pending and none here.
        async with self._pending.step(lambda: "ReachMe"):
            asked = await _first(context, "ReachMe")
        if not isinstance(asked, m.ReachMe):
            raise Wrong(f"{type(asked).__name__} came in the place of ReachMe")
        if self._reaching >= MAX_REACHING:
            reason = f"this master dials {MAX_REACHING} others already"
            raise Wrong(reason, grpc.StatusCode.RESOURCE_EXHAUSTED)
        self._reaching += 1
        try:
            reached = await reach(context.peer(), asked)
        finally:
            self._reaching -= 1
        await context.write(protobuf.answer_to_wire(reached))

    async def _read_for(self, context: Any, _keeper: Doorkeeper) -> None:
        """Stacks and paths are for those of the job: where it has no token, for operators alone."""
        asked = await self._request(context)
        if not self._token or asked.verb not in READ_VERBS:
            raise Denied(OPERATOR_WANTED)
        await self._reply(context, asked)

    async def _do(self, context: Any, _keeper: Doorkeeper) -> None:
        asked = await self._request(context)
        if asked.verb == "invite":
            await context.write(protobuf.answer_to_wire(self._joining.new_code()))
        else:
            await self._reply(context, asked)

    async def _invite(self, context: Any, keeper: Doorkeeper) -> None:
        await self._request(context)
        reply = self._joining.answer(keeper, peer_address(context.peer()))
        await context.write(protobuf.answer_to_wire(reply))

    async def _request(self, context: Any) -> m.Request:
        async with self._pending.step(lambda: "Request"):
            asked = await _first(context, "Request")
        if not isinstance(asked, m.Request):
            raise Wrong(f"{type(asked).__name__} came in the place of Request")
        return asked

    async def _reply(self, context: Any, asked: m.Request) -> None:
        reply = await self._loop.ask(asked)
        try:
            data = protobuf.answer_to_wire(reply)
        except WireError as wrong:
            raise Wrong(f"no answer: {wrong}", grpc.StatusCode.INTERNAL) from None
        await context.write(data)

    # ------------------------------------------------------------ an agent

    async def _serve(self, context: Any, keeper: Doorkeeper) -> None:
        hello = keeper.hello
        assert hello is not None
        if self.attached >= MAX_SESSIONS:
            # Not a Refused: room may come, and whoever dials again is no stranger.
            reason = f"this master serves {MAX_SESSIONS} nodes already"
            raise Wrong(reason, grpc.StatusCode.RESOURCE_EXHAUSTED)
        session = next(self._sessions)
        limits: list[asyncio.TimerHandle] = []

        def limit_writer() -> None:
            limits.append(clock.call_later(FLUSH_LIMIT, writer.cancel))

        box = Mailbox(limit_writer)
        clean = False
        self.broken.discard(hello.node)
        self._count(+1, hello.node)
        self._loop.attach(Attached(session, hello), box)
        writer = asyncio.ensure_future(_write(context, box))
        allowance = Allowance()
        reader = asyncio.ensure_future(self._read(context, session, allowance))
        clock = asyncio.get_running_loop()
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                # gRPC reads the same end whether the agent closed its side or its host vanished.
                # What is written now arrives in the first case and raises in the second.
                box.put("Echo", protobuf.order_to_wire(m.Echo(reader.result())))
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
            silent = quiet = 0.0
            if not clean:
                silent = self._listening.silence(allowance.at, self.attached)
                quiet = self._listening.quiet(allowance.at)
            self._loop.put(Detached(session, clean, silent, quiet))
            if not clean:
                self.broken.add(hello.node)
            self._count(-1)

    def _count(self, change: int, node: str | None = None) -> None:
        self.attached += change
        if node is not None and len(self.nodes) < m.MAX_NODES:
            self.nodes.add(node)
        self._on_count(self.attached)

    async def _read(self, context: Any, session: int, allowance: Allowance) -> int:
        """Enqueue reports until the stream ends; the number of the last Beat, 0 if there was none.
        Wrong for what no agent does."""
        last = 0
        while (data := await context.read()) is not grpc.aio.EOF:
            try:
                report = protobuf.report_from_wire(data)
            except WireError as wrong:
                raise Wrong(str(wrong)) from None
            if isinstance(report, m.Hello | m.Knock | m.Proof):
                raise Wrong(f"a second {type(report).__name__} on one stream")
            if isinstance(report, m.ReachMe | m.Request):
                raise Wrong(f"{type(report).__name__} is what a reader says, not an agent")
            if isinstance(report, m.Beat):
                last = report.number
            self._loop.put(Heard(session, report))
            self._listening.heard()
            if pause := allowance.take():
                if allowance.at - allowance.since > FLOOD_LIMIT:
                    reason = f"more than {RATE:.0f} reports a second"
                    raise Wrong(reason, grpc.StatusCode.RESOURCE_EXHAUSTED)
                # Unread, they fill the stream's window and then the sender's own memory.
                await asyncio.sleep(pause)
        return last


async def _first(context: Any, awaited: str) -> m.Report:
    """The next message of an introduction. Wrong; Denied for another protocol."""
    data = await context.read()
    if data is grpc.aio.EOF:
        raise Wrong(f"the stream ended before its {awaited}")
    try:
        return protobuf.report_from_wire(data)
    except protobuf.ProtocolMismatch as other:
        raise Denied(
            f"this agent is elasticrun {other.version or '(unknown)'} with protocol "
            f"{other.protocol}, the master is elasticrun {__version__} with protocol "
            f"{m.PROTOCOL_VERSION}: install one version on all nodes"
        ) from None
    except WireError as wrong:
        raise Wrong(str(wrong)) from None


METHODS: Final = (
    Servicer.attend, Servicer.status, Servicer.reach, Servicer.ask_for, Servicer.operate,
    Servicer.join,
)  # fmt: skip
"""Handlers in the order in which `make_server` takes them."""


async def _write(context: Any, box: Mailbox) -> None:
    """Send what the loop leaves in the box, until it is closed and empty."""
    while (order := await box.take()) is not None:
        await context.write(order)


# ---------------------------------------------------------------- who is on the way in


class PendingHandshakes:
    """The streams that are on their way in, oldest first: of peers who have not proved yet that
    they belong to the job.

    A stranger can open streams as fast as a network carries them, and each takes memory. So a
    stream has PROVE_LIMIT seconds until it is in, and where more than MAX_UNPROVED wait, the one
    that has waited longest goes: an honest agent is in within milliseconds, and dials again if it
    was not.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Timeout, None] = {}  # in the order of arrival
        self._pushed: set[asyncio.Timeout] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def step(self, awaits: Callable[[], str]) -> AsyncIterator[None]:
        """While a stream introduces itself. Wrong when it has to go; `awaits`: what is to come."""
        limit = asyncio.timeout(PROVE_LIMIT)
        try:
            async with limit:
                self._waiting[limit] = None
                if len(self._waiting) > MAX_UNPROVED:
                    oldest = next(iter(self._waiting))
                    del self._waiting[oldest]
                    self._pushed.add(oldest)
                    oldest.reschedule(asyncio.get_running_loop().time())
                yield
        except TimeoutError:
            if limit not in self._pushed:
                reason = f"no {awaits()} came in time"
                raise Wrong(reason, grpc.StatusCode.DEADLINE_EXCEEDED) from None
            # No refusal: whoever dials again is no stranger.
            reason = "too many others are on their way in"
            raise Wrong(reason, grpc.StatusCode.RESOURCE_EXHAUSTED) from None
        finally:
            self._waiting.pop(limit, None)
            self._pushed.discard(limit)


class Refusals:
    """Tells the operator about strangers in fixed words, each kind at most once in TELL_EVERY."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, float] = {}
        self._count: dict[str, int] = {}

    def add(self, word: str) -> None:
        """Count one refusal of this kind; `word` is one of a few sentences of ours, "" for none."""
        if not word:
            return
        now = self._clock()
        self._count[word] = self._count.get(word, 0) + 1
        if now - self._told.get(word, -TELL_EVERY) >= TELL_EVERY:
            times = self._count.pop(word)
            logger.warning("%s%s", word, f" ({times} times)" if times > 1 else "")
            self._told[word] = now


# ---------------------------------------------------------------- who was heard, and when


class Listening:
    """When anything was heard, and since when without a gap; so for how long a stream was silent,
    as far as this process can say: it was, if it listened.

    Unanswered pings break a stream some seconds after its node fell silent, and gRPC does not say
    why a stream broke. What tells is when something came on it last; and what was heard of others
    in that time tells that the silence was the node's and not ours.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = self._since = clock()

    def heard(self) -> float:
        """Something came, on any stream; when."""
        now = self._clock()
        if now - self._last > DEAF:
            self._since = now
        self._last = now
        return now

    def quiet(self, last: float) -> float:
        """Seconds since a stream was heard last, at `last`, whether or not others were heard."""
        return max(0.0, self._clock() - last)

    def silence(self, last: float, streams: int) -> float:
        """Seconds for which nothing came on a stream that was heard last at `last`, more than the
        pace of so many streams allows; 0.0 where it may have been we who did not hear."""
        now = self._clock()
        if now - self._last > DEAF:
            return 0.0
        slack = beat_interval(streams) - BEAT_INTERVAL
        return max(0.0, now - max(last, self._since) - slack)


# ---------------------------------------------------------------- a reader that wants to be dialled


def peer_address(peer: str) -> str:
    """The address in numbers out of gRPC's word for a peer (`ipv4:10.0.0.7:41234`,
    `ipv6:%5B::1%5D:41234`); "" if it is no address of a network."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if kind not in ("ipv4", "ipv6"):
        return ""
    return host.removeprefix("::ffff:") if "." in host else host


async def reach(peer: str, asked: m.ReachMe) -> m.Reached:
    """Dial the peer as it asks (`elasticrun doctor`): whether this host can dial a reader's own.
    The one place where the master opens a connection.

    It dials the address that the reader's stream comes from and no other, at a port above the
    system's (`protobuf` lets no other through), reads a nonce that the reader chose, and says
    nothing: nobody can aim it at a third host.
    """
    began = time.time_ns()
    address = peer_address(peer)
    reason = await _why_not(address, asked) if address else "its address is not known here"
    return m.Reached(
        ok=not reason,
        reason=reason,
        address=address,
        mtu=mtu_to(address) if address else 0,
        # The middle, as the reader takes the middle between its asking and our answer for it.
        clock_us=(began + time.time_ns()) // 2000,
        host=socket.gethostname(),
    )


async def _why_not(address: str, asked: m.ReachMe) -> str:
    """What keeps the nonce from being read there, "" if it was."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(DIAL_LIMIT):
            reader, writer = await asyncio.open_connection(address, asked.port)
            said = await reader.readexactly(len(asked.nonce))
    except TimeoutError:
        return f"no answer within {DIAL_LIMIT:g} s"
    except asyncio.IncompleteReadError:
        return "the connection ended before its nonce"
    except OSError as wrong:
        return os.strerror(wrong.errno).lower() if wrong.errno else str(wrong)
    finally:
        if writer is not None:
            writer.transport.abort()
    return "" if hmac.compare_digest(said, asked.nonce) else "something else answers there"
