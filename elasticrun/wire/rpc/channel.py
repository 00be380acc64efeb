"""gRPC in elasticrun: all options of channels and servers, and readable texts for its errors.

gRPC's defaults are made for data centers behind load balancers. Each option below replaces a
default that could end a job; the comment above it says what goes wrong without it, and a test shows
it.

An agent uses `open_channel`, then `attend` for its stream (`Attendance`), whose `enter` proves the
job's token and sends Hello. Other clients call `get_status`, `reach_me`, `ask_for` or
`ask_to_join`; the master calls `make_server` and `listen`. Bytes are decoded here or, in the
master, by the handler itself, so that an invalid message becomes a sentence for its sender and
never an exception inside gRPC.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

from elasticrun.wire.auth import AuthClient, Denied, Pem
from elasticrun.wire.messages import (
    MAX_MESSAGE_BYTES,
    MAX_STATUS_BYTES,
    Challenge,
    Hello,
    JobStatus,
    Order,
    Reached,
    ReachMe,
    Refused,
    Reply,
    Report,
    Request,
    Role,
)
from elasticrun.wire.rpc import protobuf
from elasticrun.wire.types import Endpoint, WireError

A = TypeVar("A")

MAX_EXPLANATION: Final = 400
"""Maximum characters of an explanation of an error."""

_PLAIN: Final = {
    "Cancelling all calls": "it has ended",
    "Stream removed (Socket closed)": "the connection was closed",
    "Stream removed (ping timeout)": "no answer to pings",
    "Deadline Exceeded": "no answer in time",
    "connection attempt timed out before receiving SETTINGS frame": "it accepts no connection",
    "Timeout occurred: FD Shutdown": "it accepts no connection",
}
"""Better texts for gRPC's (1.85) most frequent errors, and for ours."""

_PREFIX: Final = re.compile(
    r"^failed to connect to all addresses; last error: (?:[A-Z_]+: )?(?:ipv[46]:\S+: )?"
)
"""The text before the cause when no connection can be made."""


def in_words(code: str, details: str | None) -> str:
    """An explanation of at most MAX_EXPLANATION characters. `code`: the name of the status, used if
    gRPC gives no details."""
    text = " ".join((details or "").split()) or code.lower().replace("_", " ")
    # e.g. "failed to connect to all addresses; last error: UNKNOWN: ipv4:...: Failed to connect to
    # remote host: Connection refused", of which only the end is informative
    text = _PREFIX.sub("", text.rpartition("remote host: ")[2])
    if "address lookup failed" in text:
        text = "the name server does not know this host"
    return _PLAIN.get(text, text)[:MAX_EXPLANATION]


def _import_grpc() -> Any:
    """Import grpc with its C core silent and without fork handlers, without a trace of that in the
    environment, which the ranks inherit. A user's own settings are respected.

    The core reads these variables once, at import. Its log would go to the user's terminal; errors
    that matter are returned as a status. Its fork handlers print a warning for every child.
    """
    ours = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}
    ours = {name: word for name, word in ours.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        import grpc
        import grpc.aio
    finally:
        for name in ours:
            del os.environ[name]
    return grpc


grpc = _import_grpc()

SERVICE: Final = "elasticrun.v1.JobMaster"
ATTEND: Final = f"/{SERVICE}/Attend"
GET_STATUS: Final = f"/{SERVICE}/GetStatus"
REACH: Final = f"/{SERVICE}/Reach"
ASK_FOR: Final = f"/{SERVICE}/AskFor"
OPERATE: Final = f"/{SERVICE}/Operate"
JOIN: Final = f"/{SERVICE}/Join"

SERVER_OPTIONS: Final[Mapping[str, int]] = {
    # Without this, two masters could share one port, and each agent reach one of them by chance.
    "grpc.so_reuseport": 0,
    # A stopped or unplugged node is noticed after 5 s. `ping_timeout` is decisive: with its default
    # of 60 s, the keepalive values alone detected nothing in 12 s of SIGSTOP.
    "grpc.keepalive_time_ms": 1000,
    "grpc.keepalive_timeout_ms": 4000,
    "grpc.http2.ping_timeout_ms": 4000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
    # Do not disconnect an agent because of its own pings (a proxy's, a later version's).
    "grpc.http2.min_ping_interval_without_data_ms": 500,
    "grpc.http2.max_ping_strikes": 0,
    # Bounds: of a message, of headers, of streams on one connection (an agent has one; each costs a
    # stranger nothing and us about 27 kB), of connections, of the time for a stranger to start
    # HTTP/2, and of the time that a connection may have no stream.
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_metadata_size": 8 * 1024,
    "grpc.absolute_max_metadata_size": 16 * 1024,
    "grpc.max_concurrent_streams": 4,
    "grpc.max_allowed_incoming_connections": 32_768,
    "grpc.server_handshake_timeout_ms": 10_000,
    "grpc.max_connection_idle_ms": 60_000,
}


def server_options(silence: float) -> Mapping[str, int]:
    """SERVER_OPTIONS for a master that must notice a silent node within `silence` seconds. Below
    the usual five, it pings proportionally faster, at most ten times as fast. Above, it keeps the
    usual interval: noticing earlier does no harm."""
    share = min(1.0, max(0.1, silence / 5.0))
    every, answer = round(1000 * share), round(4000 * share)
    return {
        **SERVER_OPTIONS,
        "grpc.keepalive_time_ms": every,
        "grpc.keepalive_timeout_ms": answer,
        "grpc.http2.ping_timeout_ms": answer,
    }


CLIENT_OPTIONS: Final[Mapping[str, int]] = {
    # $http_proxy would route connections to a master on loopback through a proxy that refuses them.
    "grpc.enable_http_proxy": 0,
    # A master that returns, even under a new address, is found at once; the defaults back off up to
    # 120 s and resolve a name at most every 30 s.
    "grpc.dns_min_time_between_resolutions_ms": 500,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    # Time for one attempt to connect: two lost SYNs.
    "grpc.min_reconnect_backoff_ms": 4000,
    # A new channel is a new connection; by default it would share a dying one.
    "grpc.use_local_subchannel_pool": 1,
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
}


# ---------------------------------------------------------------- the agent's side


class LinkError(Exception):
    """The stream broke or could not be opened; the text is a sentence.

    `rejected`: the peer answered that it does not understand us, so retrying is useless.
    """

    def __init__(self, reason: str, *, rejected: bool = False) -> None:
        super().__init__(reason)
        self.rejected = rejected


class Unproved(LinkError):
    """The peer must not be followed: it could not prove the job's token."""


def open_channel(
    endpoint: Endpoint,
    options: Mapping[str, int] = CLIENT_OPTIONS,
    *,
    tls: Pem | None = None,
    name: str = "",
) -> Any:
    """A grpc.aio channel to the master at `endpoint`; connects when it is used.

    `tls`: certificates to present and to trust, None for plain TCP. `name`: the host name or
    address that the master's certificate must contain, "" for the endpoint's. `dns:///` prevents a
    host such as `unix` from being parsed as a scheme; addresses are unaffected.
    """
    where = f"dns:///{endpoint}"
    if tls is None:
        return grpc.aio.insecure_channel(where, options=tuple(options.items()))
    trusted = grpc.ssl_channel_credentials(tls.ca or None, tls.key or None, tls.cert or None)
    named = {**options, "grpc.ssl_target_name_override": name or endpoint.host}
    return grpc.aio.secure_channel(where, trusted, options=tuple(named.items()))


class Attendance:
    """An agent's stream to the master: Reports out, Orders in.

    One task may send while another receives. Cancelling a task that is in `send` or `receive`
    cancels the stream. Do so before the channel is closed: grpc never wakes a send whose stream was
    never established.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self.proved = False
        """Whether the master has proved the job's token (or there is none to prove)."""

    async def enter(self, hello: Hello, token: str = "") -> Order | None:
        """Prove the token to the master and check its proof, send Hello, and return the answer:
        usually a Welcome or a Refused. Raises LinkError; Unproved for a master that is not the
        job's."""
        client = AuthClient(
            token,
            hello.version,
            Role.AGENT,
            job_id=hello.spec.job_id,
            node=hello.node,
            incarnation=hello.incarnation,
        )
        await self.send(client.knock)
        answer = await self.receive()
        if answer is None or isinstance(answer, Refused):
            return answer
        if not isinstance(answer, Challenge):  # e.g. a Welcome from a peer that proves nothing
            self.cancel()
            raise Unproved(f"it answered our knock with {type(answer).__name__}")
        try:
            proof = client.answer(answer)
        except Denied as denied:
            self.cancel()
            raise Unproved(str(denied)) from None
        self.proved = True
        await self.send(proof)
        await self.send(hello)
        return await self.receive()

    async def send(self, report: Report) -> None:
        """Pass one report to the transport, waiting while its window is full. Raises LinkError."""
        data = protobuf.report_to_wire(report)
        try:
            await self._call.write(data)
        except grpc.aio.AioRpcError as broken:
            raise _link_error(broken.code(), broken.details()) from None
        except asyncio.InvalidStateError:
            raise LinkError("the stream to the master has ended") from None

    async def receive(self) -> Order | None:
        """The next order; None if the master has closed the stream properly. Raises LinkError."""
        try:
            data = await self._call.read()
            if data is grpc.aio.EOF:
                code = await self._call.code()
                if code is not grpc.StatusCode.OK:
                    raise _link_error(code, await self._call.details())
                return None
        except grpc.aio.AioRpcError as broken:
            raise _link_error(broken.code(), broken.details()) from None
        try:
            return protobuf.order_from_wire(data)
        except WireError as wrong:
            self._call.cancel()
            raise LinkError(f"the master sent {wrong}", rejected=True) from None

    async def close(self) -> None:
        """Declare that no report follows, which the master treats as a clean departure."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it has ended already
            await self._call.done_writing()

    def cancel(self) -> None:
        """Drop the stream; the master sees it break."""
        self._call.cancel()


def attend(channel: Any) -> Attendance:
    """Open the stream; call `enter` before anything else on it."""
    return Attendance(channel.stream_stream(ATTEND)(wait_for_ready=False))


async def get_status(
    endpoint: Endpoint,
    timeout: float,
    *,
    token: str = "",
    tls: Pem | None = None,
    name: str = "",
    version: str = "status",
) -> JobStatus:
    """Get the status from the master at `endpoint`; `token` is a reader's (`auth.reader_token`).

    Raises LinkError after at most `timeout` seconds; its `rejected` means that retrying is
    useless."""
    client = AuthClient(token, version)
    return await _ask(GET_STATUS, client, None, JobStatus, endpoint, timeout, tls, name)


async def reach_me(
    endpoint: Endpoint,
    timeout: float,
    request: ReachMe,
    *,
    token: str = "",
    tls: Pem | None = None,
    name: str = "",
    version: str = "doctor",
) -> Reached:
    """Make the master at `endpoint` connect to us as `request` says; return what it knows of us.
    `token` is a reader's (`auth.reader_token`). Raises LinkError like `get_status`."""
    client = AuthClient(token, version)
    return await _ask(REACH, client, request, Reached, endpoint, timeout, tls, name)


async def ask_for(
    endpoint: Endpoint,
    timeout: float,
    request: Request,
    *,
    token: str = "",
    role: Role = Role.READER,
    tls: Pem | None = None,
    name: str = "",
) -> Reply:
    """Send a reader's or an operator's request to the master at `endpoint` and return its reply.
    `token` is that of the role (`auth.reader_token`, `auth.operator_token`). Raises LinkError like
    `get_status`."""
    method = OPERATE if role is Role.OPERATOR else ASK_FOR
    client = AuthClient(token, request.verb, role)
    return await _ask(method, client, request, Reply, endpoint, timeout, tls, name)


async def ask_to_join(
    endpoint: Endpoint, timeout: float, client: AuthClient, *, tls: Pem | None = None
) -> Reply:
    """Get what the master at `endpoint` gives to the holder of a join code (see
    `AuthClient.with_code`); the body is sealed (`wire.auth`). Raises LinkError like
    `get_status`."""
    return await _ask(JOIN, client, Request("join"), Reply, endpoint, timeout, tls, "")


async def _ask(
    method: str,
    client: AuthClient,
    request: Report | None,
    kind: type[A],
    endpoint: Endpoint,
    timeout: float,
    tls: Pem | None,
    name: str,
) -> A:
    """Call `method` and return its answer, after both sides have proved the token. `request`: what
    to send after the proof, if anything. Raises LinkError, also for a refusal."""
    options = {**CLIENT_OPTIONS, "grpc.max_receive_message_length": MAX_STATUS_BYTES}
    async with open_channel(endpoint, options, tls=tls, name=name) as channel:
        call = channel.stream_stream(method)(timeout=timeout, wait_for_ready=False)
        try:
            await call.write(protobuf.report_to_wire(client.knock))
            answer = await _answer(call)
            if not isinstance(answer, Challenge | Refused):
                raise Denied("it sent a page without proving the token")
            if isinstance(answer, Challenge):
                await call.write(protobuf.report_to_wire(client.answer(answer)))
                if request is not None:
                    await call.write(protobuf.report_to_wire(request))
                answer = await _answer(call)
        except grpc.aio.AioRpcError as broken:
            raise _link_error(broken.code(), broken.details()) from None
        except asyncio.InvalidStateError:  # the stream ended during a write
            raise _link_error(await call.code(), await call.details()) from None
        except WireError as wrong:
            raise LinkError(f"{endpoint} sent {wrong}", rejected=True) from None
        except Denied as denied:
            raise Unproved(str(denied), rejected=True) from None
        finally:
            call.cancel()
    match answer:
        case kind():
            return answer
        case Refused():
            raise LinkError(answer.reason, rejected=True)
        case Challenge():
            raise LinkError("a second challenge", rejected=True)
    raise LinkError(f"it answered with {type(answer).__name__}", rejected=True)


async def _answer(call: Any) -> Any:
    """The next answer to a client that is not an agent. Raises WireError, AioRpcError, or LinkError
    if the stream has ended."""
    data = await call.read()
    if data is grpc.aio.EOF:
        raise _link_error(await call.code(), await call.details())
    return protobuf.answer_from_wire(data)


def _link_error(code: Any, details: str | None) -> LinkError:
    codes = grpc.StatusCode
    rejected = code in (codes.INVALID_ARGUMENT, codes.UNIMPLEMENTED)
    text = in_words(code.name, details)
    if code is codes.INTERNAL and "from Core" in text:
        text = "the stream broke while it was written to"  # gRPC's text for it says nothing
    if code is codes.UNIMPLEMENTED:
        text = f"it is not an elasticrun master ({text})"
    return LinkError(text, rejected=rejected)


# ---------------------------------------------------------------- the master's side


class ListenError(OSError):
    """A port is not available; the text is a sentence. `taken`: another process listens there."""

    def __init__(self, reason: str, *, taken: bool) -> None:
        super().__init__(reason)
        self.taken = taken


Serve = Callable[[Any], Awaitable[None]]
"""Handler of one stream: gets the grpc.aio context, whose read() and write() transfer bytes."""


def make_server(
    attend: Serve,
    status: Serve,
    reach: Serve | None = None,
    ask_for: Serve | None = None,
    operate: Serve | None = None,
    join: Serve | None = None,
    *,
    max_calls: int,
    options: Mapping[str, int] = SERVER_OPTIONS,
) -> Any:
    """A grpc.aio server with the methods of JobMaster; `max_calls` calls are served at a time."""

    def handler(serve: Serve) -> Any:
        async def on_stream(_requests: Any, context: Any) -> None:
            await serve(context)

        return grpc.stream_stream_rpc_method_handler(on_stream)

    made = grpc.aio.server(options=tuple(options.items()), maximum_concurrent_rpcs=max_calls)
    methods = {
        "Attend": attend,
        "GetStatus": status,
        "Reach": reach,
        "AskFor": ask_for,
        "Operate": operate,
        "Join": join,
    }
    handlers = {name: handler(serve) for name, serve in methods.items() if serve is not None}
    made.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    return made


def listen(server: Any, host: str, port: int, tls: Pem | None = None) -> int:
    """Bind the server; return the port (a free one for 0). Raises ListenError.

    `tls` with a `ca` serves only clients whose certificate that CA has signed."""
    where = Endpoint(host, port)
    try:
        if tls is None:
            bound = server.add_insecure_port(str(where))
        else:
            pairs = ((tls.key, tls.cert),)
            own = grpc.ssl_server_credentials(pairs, tls.ca or None, bool(tls.ca))
            bound = server.add_secure_port(str(where), own)
        if bound:
            return int(bound)
    except RuntimeError:
        pass
    raise _why_not(where)


def _why_not(where: Endpoint) -> ListenError:
    """The reason why the port cannot be bound. gRPC only says that it failed, so bind it again here
    to find out."""
    try:
        found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
        family, kind, proto, _, address = found[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as wrong:
        taken = wrong.errno == errno.EADDRINUSE
        text = "another process listens there" if taken else (wrong.strerror or str(wrong))
        return ListenError(f"cannot listen on {where}: {text}", taken=taken)
    return ListenError(f"cannot listen on {where}: the port was taken for a moment", taken=True)
