"""The master's gRPC service: a handler per stream that authenticates, decodes and enqueues.

It also limits unauthenticated streams, the rate of reports, and the requests of readers. Nothing
from a stream reaches the state machine or the trace before its peer has proved the job's token
(`wire.auth`) and sent Hello. An error of a peer (a timeout in the handshake, a wrong proof, invalid
bytes, an unexpected message, too many reports) ends only that peer's stream, and the peer gets a
sentence with the reason.
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
from elasticrun.wire.auth import OPERATOR_WANTED, AuthServer, Denied, OutOfTurn
from elasticrun.wire.rpc import protobuf
from elasticrun.wire.rpc.channel import grpc
from elasticrun.wire.types import WireError

RATE: Final = 50.0
"""Sustained reports per second of one stream; an agent sends one or two."""

BURST: Final = 500.0
"""Maximum burst of reports, for example when all ranks of a node fail or an agent was delayed."""

FLOOD_LIMIT: Final = 10.0
"""Seconds for which a stream may exceed RATE; then it is dropped. Meanwhile it is read at RATE, and
the other reports wait on the sender's side."""

FLUSH_LIMIT: Final = 5.0
"""Seconds for a peer to read the last message before its stream is closed."""

PROVE_LIMIT: Final = 5.0
"""Seconds for a peer's handshake, and again for the request that follows it."""

MAX_UNPROVED: Final = 4096
"""Maximum number of concurrent handshakes. It suffices for ten thousand agents that reconnect at
once, because handshakes complete faster than connections arrive."""

READ_VERBS: Final = ("picture", "stacks")
"""Verbs that a reader may request; all others are for operators."""

LOG_EVERY: Final = 60.0
"""Minimum seconds between two log lines about refusals of the same kind, so that a flood does not
fill the log."""

DIAL_LIMIT: Final = 2.0
"""Seconds from the SYN to the last byte of the nonce; the kernel resends the SYN after 1 s."""

MAX_REACHING: Final = 32
"""Maximum number of concurrent `reach` requests; each holds one connection of ours for DIAL_LIMIT
at most."""

MAX_GAP: Final = 2.5 * BEAT_INTERVAL
"""Seconds without a message on any stream after which this process may not have been listening: as
few as two nodes send heartbeats more often than that."""

MAX_CALLS: Final = MAX_SESSIONS + MAX_UNPROVED + 256
"""Maximum number of streams of all kinds, enforced by gRPC. Above the sum of the limits here, which
refuse a peer with a sentence."""

logger = logging.getLogger("elasticrun")


class PeerError(Exception):
    """An error of a peer: its text is sent to the peer, and `code` is the status of its stream."""

    def __init__(self, reason: str, code: Any = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        super().__init__(reason)
        self.code = code


class Allowance:
    """A token bucket that refills with RATE reports per second up to BURST."""

    def __init__(self) -> None:
        self.left = BURST
        self.at = self.since = time.monotonic()
        """`at`: when the newest report was taken; `since`: when the bucket was last not empty."""

    def take(self) -> float:
        """Consume one report; returns the seconds before the next may be read, 0.0 for none."""
        now = time.monotonic()
        self.left = min(BURST, self.left + (now - self.at) * RATE) - 1
        self.at = now
        if self.left >= 1:
            self.since = now
            return 0.0
        return (1 - self.left) / RATE


class Servicer:
    """The handlers of the gRPC methods, and the number of attached streams."""

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
        """`token`: the secret that peers must prove, "" for none; `operator`: the secret that an
        operator must prove; `term`: this master's term, part of its proof; `on_count`: called with
        the number of attached agents when it changes."""
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
        self._encoded_status: tuple[m.JobStatus, bytes] | None = None
        self._reaching = 0
        self.attached = 0
        """Number of agents' streams that are open and have sent Hello."""
        self.nodes: set[str] = set()
        """Ids of all nodes that were ever attached."""
        self.broken: set[str] = set()
        """Ids of nodes whose last stream broke: they may be reconnecting, and may have missed
        orders."""

    def may_reconnect(self) -> bool:
        """Whether an agent whose stream broke may still be reconnecting."""
        nodes = self._loop.status().nodes
        return any(node.state == "suspect" and node.node in self.broken for node in nodes)

    @property
    def unproved(self) -> int:
        """Number of streams in their handshake."""
        return len(self._pending)

    # ------------------------------------------------------------ the methods

    async def status(self, context: Any) -> None:
        """Send the status to a reader."""
        await self._authenticated(
            context, m.Role.READER, protobuf.answer_to_wire, self._send_status
        )

    async def reach(self, context: Any) -> None:
        """Dial a reader back, and send it the result."""
        await self._authenticated(context, m.Role.READER, protobuf.answer_to_wire, self._reach)

    async def ask_for(self, context: Any) -> None:
        """Serve a reader that requests a picture or stacks."""
        await self._authenticated(
            context, m.Role.READER, protobuf.answer_to_wire, self._serve_reader
        )

    async def operate(self, context: Any) -> None:
        """Serve an operator, who may request anything."""
        await self._authenticated(
            context, m.Role.OPERATOR, protobuf.answer_to_wire, self._serve_operator
        )

    async def join(self, context: Any) -> None:
        """Serve a node that has a join code."""
        await self._authenticated(
            context, m.Role.JOINER, protobuf.answer_to_wire, self._serve_joiner
        )

    async def attend(self, context: Any) -> None:
        """Serve one agent's stream."""
        await self._authenticated(context, m.Role.AGENT, protobuf.order_to_wire, self._serve_agent)

    async def _authenticated(
        self,
        context: Any,
        role: m.Role,
        encode: Callable[[Any], bytes],
        serve: Callable[[Any, AuthServer], Awaitable[None]],
    ) -> None:
        """Authenticate the peer, then call `serve`; on an error, send the peer the reason."""
        token = self._operator if role is m.Role.OPERATOR else self._token
        auth = AuthServer(token, __version__, self._job_id, self._term, role)
        try:
            await self._handshake(context, auth, encode, is_joiner=role is m.Role.JOINER)
            await serve(context, auth)
        except Denied as denied:
            self._refusals.add(denied.log_text)
            order = m.Refused(reason=str(denied), exit_code=code_of(Ending.REFUSED))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(context.write(encode(order)), FLUSH_LIMIT)
        except PeerError as wrong:
            await context.abort(wrong.code, str(wrong))

    async def _handshake(
        self, context: Any, auth: AuthServer, encode: Callable[[Any], bytes], *, is_joiner: bool
    ) -> None:
        """Run the handshake. Raises Denied, PeerError."""
        try:
            async with self._pending.step(lambda: auth.awaits):
                message = await _first(context, auth.awaits)
                if is_joiner:  # not before: a peer that still writes may not read a refusal
                    self._joining.admit()
                while True:
                    if (answer := auth.receive(message)) is not None:
                        await context.write(encode(answer))
                    if auth.is_authenticated:
                        return
                    message = await _first(context, auth.awaits)
        except OutOfTurn as wrong:
            raise PeerError(str(wrong)) from None

    # ------------------------------------------------------------ a reader

    async def _send_status(self, context: Any, _auth: AuthServer) -> None:
        """Send the job's status, which is encoded once for all readers."""
        status = self._loop.status()
        if self._encoded_status is None or self._encoded_status[0] is not status:
            try:
                self._encoded_status = (status, protobuf.answer_to_wire(status))
            except WireError as wrong:
                raise PeerError(f"no status: {wrong}", grpc.StatusCode.INTERNAL) from None
        await context.write(self._encoded_status[1])

    async def _reach(self, context: Any, _auth: AuthServer) -> None:
        """Read the port at which to dial the reader, dial it, and send the result."""
        # Until its request arrives, a reader counts as a handshake, not towards MAX_REACHING.
        async with self._pending.step(lambda: "ReachMe"):
            request = await _first(context, "ReachMe")
        if not isinstance(request, m.ReachMe):
            raise PeerError(f"expected ReachMe, got {type(request).__name__}")
        if self._reaching >= MAX_REACHING:
            reason = f"this master already connects to {MAX_REACHING} hosts"
            raise PeerError(reason, grpc.StatusCode.RESOURCE_EXHAUSTED)
        self._reaching += 1
        try:
            reached = await reach(context.peer(), request)
        finally:
            self._reaching -= 1
        await context.write(protobuf.answer_to_wire(reached))

    async def _serve_reader(self, context: Any, _auth: AuthServer) -> None:
        """Send a reader a picture or stacks. Raises Denied for any other verb, and in a job without
        a token, where only operators may request them."""
        request = await self._request(context)
        if not self._token or request.verb not in READ_VERBS:
            raise Denied(OPERATOR_WANTED)
        await self._reply(context, request)

    async def _serve_operator(self, context: Any, _auth: AuthServer) -> None:
        request = await self._request(context)
        if request.verb == "invite":
            await context.write(protobuf.answer_to_wire(self._joining.new_code()))
        else:
            await self._reply(context, request)

    async def _serve_joiner(self, context: Any, auth: AuthServer) -> None:
        await self._request(context)
        reply = self._joining.answer(auth, peer_address(context.peer()))
        await context.write(protobuf.answer_to_wire(reply))

    async def _request(self, context: Any) -> m.Request:
        async with self._pending.step(lambda: "Request"):
            request = await _first(context, "Request")
        if not isinstance(request, m.Request):
            raise PeerError(f"expected Request, got {type(request).__name__}")
        return request

    async def _reply(self, context: Any, request: m.Request) -> None:
        reply = await self._loop.request(request)
        try:
            data = protobuf.answer_to_wire(reply)
        except WireError as wrong:
            raise PeerError(f"no answer: {wrong}", grpc.StatusCode.INTERNAL) from None
        await context.write(data)

    # ------------------------------------------------------------ an agent

    async def _serve_agent(self, context: Any, auth: AuthServer) -> None:
        hello = auth.hello
        assert hello is not None
        if self.attached >= MAX_SESSIONS:
            # Not a Refused, so that the agent reconnects: a place may become free.
            reason = f"this master already serves {MAX_SESSIONS} nodes"
            raise PeerError(reason, grpc.StatusCode.RESOURCE_EXHAUSTED)
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
                # gRPC reports the same EOF whether the agent closed its side or its host vanished.
                # A write now succeeds in the first case and raises in the second.
                box.put("Echo", protobuf.order_to_wire(m.Echo(reader.result())))
                box.close()
                await asyncio.wait((writer,))
            # The writer returns normally if the box was closed and every order was sent.
            clean = writer.done() and not writer.cancelled() and writer.exception() is None
        finally:
            reader.cancel()
            # The writer is not cancelled: its pending write would prevent an abort of the stream.
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
        """Enqueue reports until the stream ends; returns the number of the last Beat, 0 if there
        was none. Raises PeerError for an invalid message or too many reports."""
        last = 0
        while (data := await context.read()) is not grpc.aio.EOF:
            try:
                report = protobuf.report_from_wire(data)
            except WireError as wrong:
                raise PeerError(str(wrong)) from None
            if isinstance(report, m.Hello | m.Knock | m.Proof):
                raise PeerError(f"a second {type(report).__name__} on one stream")
            if isinstance(report, m.ReachMe | m.Request):
                raise PeerError(f"{type(report).__name__} is a reader's message, not an agent's")
            if isinstance(report, m.Beat):
                last = report.number
            self._loop.put(Heard(session, report))
            self._listening.on_message()
            if pause := allowance.take():
                if allowance.at - allowance.since > FLOOD_LIMIT:
                    reason = f"more than {RATE:.0f} reports a second"
                    raise PeerError(reason, grpc.StatusCode.RESOURCE_EXHAUSTED)
                # Unread data fills the stream's window, and then waits in the sender's memory.
                await asyncio.sleep(pause)
        return last


async def _first(context: Any, awaited: str) -> m.Report:
    """Read the next message of a handshake. Raises PeerError; Denied if the peer has another
    protocol version. `awaited`: the expected message, for the error."""
    data = await context.read()
    if data is grpc.aio.EOF:
        raise PeerError(f"the stream ended before its {awaited}")
    try:
        return protobuf.report_from_wire(data)
    except protobuf.ProtocolMismatch as other:
        raise Denied(
            f"the caller is elasticrun {other.version or '(unknown)'} with protocol "
            f"{other.protocol}, the master is elasticrun {__version__} with protocol "
            f"{m.PROTOCOL_VERSION}: install one version on all nodes"
        ) from None
    except WireError as wrong:
        raise PeerError(str(wrong)) from None


METHODS: Final = (
    Servicer.attend, Servicer.status, Servicer.reach, Servicer.ask_for, Servicer.operate,
    Servicer.join,
)  # fmt: skip
"""The handlers, in the order of `make_server`'s parameters."""


async def _write(context: Any, box: Mailbox) -> None:
    """Send the mailbox's orders until it is closed and empty."""
    while (order := await box.take()) is not None:
        await context.write(order)


# ---------------------------------------------------------------- handshakes


class PendingHandshakes:
    """The streams in their handshake, oldest first.

    A stranger can open streams as fast as the network permits, and each uses memory. So a handshake
    is limited to PROVE_LIMIT seconds, and beyond MAX_UNPROVED streams the oldest is dropped. An
    agent of the job needs milliseconds for its handshake, and reconnects if it was dropped.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Timeout, None] = {}  # in order of arrival
        self._dropped: set[asyncio.Timeout] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def step(self, awaits: Callable[[], str]) -> AsyncIterator[None]:
        """Limit the body to PROVE_LIMIT seconds, as one pending handshake. Raises PeerError if it
        takes longer or the stream is dropped. `awaits`: returns the message expected now, for the
        error."""
        limit = asyncio.timeout(PROVE_LIMIT)
        try:
            async with limit:
                self._waiting[limit] = None
                if len(self._waiting) > MAX_UNPROVED:
                    oldest = next(iter(self._waiting))
                    del self._waiting[oldest]
                    self._dropped.add(oldest)
                    oldest.reschedule(asyncio.get_running_loop().time())
                yield
        except TimeoutError:
            if limit not in self._dropped:
                reason = f"timed out waiting for {awaits()}"
                raise PeerError(reason, grpc.StatusCode.DEADLINE_EXCEEDED) from None
            # Not a Denied, so that an agent of the job reconnects.
            reason = "too many connections are pending"
            raise PeerError(reason, grpc.StatusCode.RESOURCE_EXHAUSTED) from None
        finally:
            self._waiting.pop(limit, None)
            self._dropped.discard(limit)


class Refusals:
    """Logs refused peers with fixed sentences, each at most once in LOG_EVERY seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._count: dict[str, int] = {}

    def add(self, word: str) -> None:
        """Count a refusal, and log it if due; `word`: one of a few constant sentences, "": log
        nothing."""
        if not word:
            return
        now = self._clock()
        self._count[word] = self._count.get(word, 0) + 1
        if now - self._logged_at.get(word, -LOG_EVERY) >= LOG_EVERY:
            times = self._count.pop(word)
            logger.warning("%s%s", word, f" ({times} times)" if times > 1 else "")
            self._logged_at[word] = now


# ---------------------------------------------------------------- silence


class Listening:
    """Records when messages arrived on any stream, to compute how long one stream was silent while
    this process was listening.

    Unanswered pings break a stream some seconds after its node fell silent, but gRPC does not
    report why a stream broke. If the stream's last message is old, and messages from other nodes
    have arrived since then, this process was listening and the node was silent.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = self._since = clock()

    def on_message(self) -> float:
        """Record that a message arrived on some stream; returns the time."""
        now = self._clock()
        if now - self._last > MAX_GAP:
            self._since = now
        self._last = now
        return now

    def quiet(self, last: float) -> float:
        """Seconds since a stream's last message, at `last`, whether or not this process was
        listening."""
        return max(0.0, self._clock() - last)

    def silence(self, last: float, streams: int) -> float:
        """Seconds for which a stream, whose last message arrived at `last`, was silent while this
        process was listening. The part that a longer heartbeat interval explains does not count;
        `streams`: the number of attached streams, which determines the interval."""
        now = self._clock()
        if now - self._last > MAX_GAP:
            return 0.0
        slack = beat_interval(streams) - BEAT_INTERVAL
        return max(0.0, now - max(last, self._since) - slack)


# ---------------------------------------------------------------- dialling a reader


def peer_address(peer: str) -> str:
    """The numeric address in gRPC's name of a peer (`ipv4:10.0.0.7:41234`, `ipv6:%5B::1%5D:41234`);
    "" if there is none."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if kind not in ("ipv4", "ipv6"):
        return ""
    return host.removeprefix("::ffff:") if "." in host else host


async def reach(peer: str, request: m.ReachMe) -> m.Reached:
    """Dial the peer on its request (`elasticrun doctor`), to test whether this host can reach it.
    No other request makes the master open a connection.

    It dials only the address from which the peer connected, at an unprivileged port (`protobuf`
    rejects others), reads a nonce that the peer chose, and sends nothing. So nobody can make it
    connect to a third host.
    """
    began = time.time_ns()
    address = peer_address(peer)
    reason = await _dial_error(address, request) if address else "its address is not known here"
    return m.Reached(
        ok=not reason,
        reason=reason,
        address=address,
        mtu=mtu_to(address) if address else 0,
        # The midpoint, because the peer compares it with the midpoint between request and answer.
        clock_us=(began + time.time_ns()) // 2000,
        host=socket.gethostname(),
    )


async def _dial_error(address: str, request: m.ReachMe) -> str:
    """Why the nonce could not be read from the peer; "" if it was."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(DIAL_LIMIT):
            reader, writer = await asyncio.open_connection(address, request.port)
            nonce = await reader.readexactly(len(request.nonce))
    except TimeoutError:
        return f"no answer within {DIAL_LIMIT:g} s"
    except asyncio.IncompleteReadError:
        return "the connection ended before its nonce"
    except OSError as wrong:
        return os.strerror(wrong.errno).lower() if wrong.errno else str(wrong)
    finally:
        if writer is not None:
            writer.transport.abort()
    return "" if hmac.compare_digest(nonce, request.nonce) else "another process answers there"
