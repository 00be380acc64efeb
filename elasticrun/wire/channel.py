"""gRPC as elasticrun uses it: one place for every option of channels and servers.

gRPC's defaults are made for data centres behind load balancers. Each option below replaces one
that would cost a job its life; what goes wrong without it stands beside it, and a test shows it.

An agent: `open_channel`, then `attend` for its stream (`Attendance`). `elasticrun status`:
`get_status`. The master: `make_server` and `listen`. Bytes are turned into messages here or, in
the master, by the handler itself, so that a message which is not understood becomes a sentence
for its sender and never an exception inside gRPC.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from elasticrun.wire import codec
from elasticrun.wire.ids import Endpoint
from elasticrun.wire.messages import MAX_MESSAGE_BYTES, MAX_STATUS_BYTES, JobStatus, Order, Report


def _import_grpc() -> Any:
    """Import grpc with its C core silent and without fork handlers, and leave no trace of that in
    the environment, which the ranks inherit. A user's own settings are respected.

    The core reads these variables once, at import. Its log would go to the user's terminal; what
    matters comes back as a status. Its fork handlers print a warning for every child.
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

SERVER_OPTIONS: Final[Mapping[str, int]] = {
    # Two masters would share one port, and each agent meet one of them by chance.
    "grpc.so_reuseport": 0,
    # A stopped or unplugged node is noticed after 5 s. `ping_timeout` is what rules: with its
    # default of 60 s the keepalive values alone saw nothing in 12 s of SIGSTOP.
    "grpc.keepalive_time_ms": 1000,
    "grpc.keepalive_timeout_ms": 4000,
    "grpc.http2.ping_timeout_ms": 4000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
    # An agent's own pings (a proxy's, a later version's) are no reason to hang up on it.
    "grpc.http2.min_ping_interval_without_data_ms": 500,
    "grpc.http2.max_ping_strikes": 0,
    # Bounds: of a message, of headers, of streams on one connection, of the time a stranger may
    # take to say that it speaks HTTP/2, and of the time a connection may stand without a stream.
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_metadata_size": 8 * 1024,
    "grpc.absolute_max_metadata_size": 16 * 1024,
    "grpc.max_concurrent_streams": 16,
    "grpc.server_handshake_timeout_ms": 10_000,
    "grpc.max_connection_idle_ms": 60_000,
}

CLIENT_OPTIONS: Final[Mapping[str, int]] = {
    # $http_proxy would carry the way to a master on loopback through a proxy that refuses it.
    "grpc.enable_http_proxy": 0,
    # A master that comes back, under a new address even, is found at once; the defaults back off
    # up to 120 s and look a name up at most every 30 s.
    "grpc.dns_min_time_between_resolutions_ms": 500,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    # How long one attempt to connect may take: two lost SYNs.
    "grpc.min_reconnect_backoff_ms": 4000,
    # A channel opened afresh is a fresh connection; by default it would join a dying one.
    "grpc.use_local_subchannel_pool": 1,
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
}


# ---------------------------------------------------------------- the agent's side


class LinkError(Exception):
    """The stream is gone or could not be opened; the text is a sentence.

    `rejected`: the peer answered that it does not understand us, so dialling again is no use.
    """

    def __init__(self, reason: str, *, rejected: bool = False) -> None:
        super().__init__(reason)
        self.rejected = rejected


def open_channel(endpoint: Endpoint, options: Mapping[str, int] = CLIENT_OPTIONS) -> Any:
    """A grpc.aio channel to the master at `endpoint`; nothing is dialled before it is used.

    `dns:///` keeps a host such as `unix` from being read as a scheme; addresses pass as they are.
    """
    return grpc.aio.insecure_channel(f"dns:///{endpoint}", options=tuple(options.items()))


class Attendance:
    """An agent's stream to the master: Reports out, Orders in.

    One task may send while another receives. Cancelling a task inside either cancels the stream;
    do so before the channel is closed: grpc never wakes a send whose stream did not come to stand.
    """

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, report: Report) -> None:
        """Hand one report to the transport, waiting while its window is full. LinkError."""
        data = codec.report_to_wire(report)
        try:
            await self._call.write(data)
        except grpc.aio.AioRpcError as broken:
            raise _link_error(broken) from None
        except asyncio.InvalidStateError:
            raise LinkError("the stream to the master has ended") from None

    async def receive(self) -> Order | None:
        """The next order; None when the master has closed the stream in good order. LinkError."""
        try:
            data = await self._call.read()
            if data is grpc.aio.EOF:
                code = await self._call.code()
                if code is not grpc.StatusCode.OK:
                    raise _link_error_of(code, await self._call.details())
                return None
        except grpc.aio.AioRpcError as broken:
            raise _link_error(broken) from None
        try:
            return codec.order_from_wire(data)
        except codec.WireError as wrong:
            self._call.cancel()
            raise LinkError(f"the master sent {wrong}", rejected=True) from None

    async def close(self) -> None:
        """Say that no report follows: the master takes this for a clean departure."""
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # it has ended already

    def cancel(self) -> None:
        """Drop the stream; the master sees it break."""
        self._call.cancel()


def attend(channel: Any) -> Attendance:
    """Open the stream; the first report sent must be a Hello."""
    call = channel.stream_stream(ATTEND)(wait_for_ready=False)
    return Attendance(call)


async def get_status(endpoint: Endpoint, timeout: float) -> JobStatus:
    """Ask the master at `endpoint` for its page. LinkError after `timeout` seconds at most."""
    options = {**CLIENT_OPTIONS, "grpc.max_receive_message_length": MAX_STATUS_BYTES}
    async with open_channel(endpoint, options) as channel:
        try:
            ask = channel.unary_unary(GET_STATUS)
            data = await ask(codec.STATUS_REQUEST, timeout=timeout, wait_for_ready=False)
            return codec.status_from_wire(data)
        except grpc.aio.AioRpcError as broken:
            raise _link_error(broken) from None
        except codec.WireError as wrong:
            raise LinkError(f"{endpoint} sent {wrong}", rejected=True) from None


def _link_error(broken: Any) -> LinkError:
    return _link_error_of(broken.code(), broken.details())


def _link_error_of(code: Any, details: str | None) -> LinkError:
    codes = grpc.StatusCode
    rejected = code in (codes.INVALID_ARGUMENT, codes.UNIMPLEMENTED)
    text = " ".join((details or "").split())[:400] or code.name.lower().replace("_", " ")
    if code is codes.INTERNAL and "from Core" in text:
        text = "the stream broke while it was written to"  # grpc's word for it says nothing
    if code is codes.UNIMPLEMENTED:
        text = f"it is no elasticrun master ({text})"
    return LinkError(text, rejected=rejected)


# ---------------------------------------------------------------- the master's side


class ListenError(OSError):
    """A port could not be had; the text is a sentence. `taken`: somebody else listens there."""

    def __init__(self, reason: str, *, taken: bool) -> None:
        super().__init__(reason)
        self.taken = taken


Attend = Callable[[Any], Awaitable[None]]
"""Handler of one stream: gets the grpc.aio context, whose read() and write() carry bytes."""

GetStatus = Callable[[Any], Awaitable[bytes]]
"""Handler of a status request: gets the context, returns an encoded reply."""


def make_server(
    attend: Attend,
    status: GetStatus,
    *,
    most: int,
    options: Mapping[str, int] = SERVER_OPTIONS,
) -> Any:
    """A grpc.aio server with the two methods of JobMaster; `most` calls are served at a time."""

    async def on_attend(_requests: Any, context: Any) -> None:
        await attend(context)

    async def on_status(_request: bytes, context: Any) -> bytes:
        return await status(context)

    made = grpc.aio.server(options=tuple(options.items()), maximum_concurrent_rpcs=most)
    handlers = {
        "Attend": grpc.stream_stream_rpc_method_handler(on_attend),
        "GetStatus": grpc.unary_unary_rpc_method_handler(on_status),
    }
    made.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    return made


def listen(server: Any, host: str, port: int) -> int:
    """Bind the server; returns the port (a free one for 0). ListenError says why not."""
    where = Endpoint(host, port)
    try:
        bound = server.add_insecure_port(str(where))
    except RuntimeError:
        bound = 0
    if bound:
        return int(bound)
    raise _why_not(where)


def _why_not(where: Endpoint) -> ListenError:
    """gRPC only says that it failed; the same bind once more, by hand, says why."""
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
