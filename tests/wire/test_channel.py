"""Each option of `channel.py` does what its comment says, and the thing goes wrong without it;
and what gRPC says is told in words."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from elasticrun.wire import auth, messages as m
from elasticrun.wire.rpc import channel as c, protobuf
from elasticrun.wire.rpc.channel import MAX_EXPLANATION, in_words
from elasticrun.wire.types import Endpoint
from tests import aio
from tests.harness import free_port
from tests.master import raw
from tests.master.people import UNHURRIED

LIMIT = 240.0
STATUS = m.JobStatus("j", "running", "", None, 0, 0, 0, 0, 1, 1, (), "", "")


def without(options: Mapping[str, int], *names: str) -> dict[str, int]:
    """These options with gRPC's own defaults for some."""
    assert set(names) <= set(options)
    return {name: value for name, value in options.items() if name not in names}


class Master:
    """A server that echoes beats and notes when a stream has ended."""

    def __init__(self, options: Mapping[str, int] = UNHURRIED, port: int = 0) -> None:
        self.attached = asyncio.Event()
        self.ended = asyncio.Event()
        self.server = c.make_server(self._attend, self._status, max_calls=100, options=options)
        self.port = c.listen(self.server, "127.0.0.1", port)
        self.endpoint = Endpoint("127.0.0.1", self.port)

    async def _attend(self, context: Any) -> None:
        try:
            while (data := await context.read()) is not c.grpc.aio.EOF:
                report = protobuf.report_from_wire(data)
                self.attached.set()
                await context.write(protobuf.order_to_wire(m.Echo(report.number)))
        finally:
            self.ended.set()

    async def _status(self, context: Any) -> None:
        await show(context, STATUS)

    async def __aenter__(self) -> Master:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)


async def beats(endpoint: Endpoint, options: Mapping[str, int] = c.CLIENT_OPTIONS) -> None:
    async with c.open_channel(endpoint, options) as channel, asyncio.timeout(LIMIT):
        stream = c.attend(channel)
        await stream.send(m.Beat(3))
        assert await stream.receive() == m.Echo(3)
        await stream.close()
        assert await stream.receive() is None


async def show(context: Any, page: m.JobStatus) -> None:
    """What a master of a job without a token does for a reader."""
    keeper = auth.AuthServer("", "1", "j", 1, m.Role.READER)
    while not keeper.is_authenticated:
        answer = keeper.receive(protobuf.report_from_wire(await context.read()))
        if answer is not None:
            await context.write(protobuf.answer_to_wire(answer))
    await context.write(protobuf.answer_to_wire(page))


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port of loopback that a server may listen on again and again, and nobody else is given.

    The socket that holds it never listens, and shares it with who asks for it by number, as gRPC
    does (SO_REUSEADDR). The kernel chooses a port that is bound for nobody, neither for another
    process nor for the dialling client itself, which could connect to itself there."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield int(sock.getsockname()[1])


# ---------------------------------------------------------------- defaults of gRPC turned off


async def test_a_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    async with Master() as master:
        await beats(master.endpoint)
        with pytest.raises(c.LinkError):
            await beats(master.endpoint, without(c.CLIENT_OPTIONS, "grpc.enable_http_proxy"))


async def test_two_servers_cannot_share_a_port() -> None:
    async with Master() as master:
        with pytest.raises(c.ListenError, match="another process listens") as refused:
            Master(port=master.port)
        assert refused.value.taken
    shared = without(UNHURRIED, "grpc.so_reuseport")
    async with Master(shared) as master:
        Master(shared, port=master.port)  # gRPC's default says nothing


async def test_an_address_that_is_not_ours_is_a_sentence() -> None:
    server = c.make_server(Master._attend, Master._status, max_calls=1)
    with pytest.raises(c.ListenError, match=r"192\.0\.2\.1:0") as refused:
        c.listen(server, "192.0.2.1", 0)
    assert not refused.value.taken


# ---------------------------------------------------------------- silence

STOPPED = """
import asyncio, sys
from elasticrun.wire.rpc import channel as c
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint

async def main():
    stream = c.attend(c.open_channel(Endpoint("127.0.0.1", int(sys.argv[1]))))
    await stream.send(m.Beat(1))
    await stream.receive()
    await stream.receive()

asyncio.run(main())
"""


async def _cut_after(options: Mapping[str, int], limit: float) -> float | None:
    """Seconds from SIGSTOP of a client to the end of its stream; None: not within `limit`."""
    async with Master(options) as master:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STOPPED, str(master.port)
        )
        try:
            await asyncio.wait_for(master.attached.wait(), LIMIT)
            client.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            try:
                await asyncio.wait_for(master.ended.wait(), limit)
            except TimeoutError:
                return None
            return time.monotonic() - began
        finally:
            client.kill()
            await client.wait()


@pytest.mark.slow
def test_a_stopped_client_is_cut() -> None:
    assert aio.run(_cut_after(c.SERVER_OPTIONS, LIMIT)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpc.http2.ping_timeout_ms", "grpc.keepalive_time_ms"])
def test_without_the_option_a_stopped_client_is_kept(name: str) -> None:
    """For 10 s at least, which is twice what it takes with the options. gRPC's measurement of
    bandwidth is off, because now and then it sends a ping of its own."""
    options = {**without(c.SERVER_OPTIONS, name), "grpc.http2.bdp_probe": 0}
    assert aio.run(_cut_after(options, 10.0)) is None


# ---------------------------------------------------------------- coming back


async def _found_again(options: Mapping[str, int], down: float, limit: float) -> bool:
    """Whether a channel that saw its master away for `down` seconds finds the next one."""
    with held_port() as port:
        async with Master(port=port) as first:
            channel = c.open_channel(first.endpoint, options)
            stream = c.attend(channel)
            await stream.send(m.Beat(1))
            await stream.receive()
        async with channel:
            return await _finds(channel, port, down, limit)


async def _finds(channel: Any, port: int, down: float, limit: float) -> bool:
    """Whether it is connected within `limit` seconds after another master has begun, which is
    `down` seconds from now."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(down):
            while True:
                await channel.wait_for_state_change(channel.get_state(try_to_connect=True))
    async with Master(port=port):
        try:
            async with asyncio.timeout(limit):
                state = channel.get_state(try_to_connect=True)
                while state is not c.grpc.ChannelConnectivity.READY:
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            return False
        return True


@pytest.mark.slow
def test_a_master_that_was_away_is_found_again() -> None:
    # A machine that pauses for seconds spoils one attempt; a defect spoils each.
    assert any(aio.run(_found_again(c.CLIENT_OPTIONS, down=6.0, limit=3.0)) for _ in range(3))


@pytest.mark.slow
def test_without_the_options_it_is_not_found_for_long() -> None:
    """gRPC's back-off has grown beyond the limit by then: it dials before 6.2 s and after 7.4 s
    (1 s at first, 1.6 times that each time, up to a fifth more or less)."""
    names = ("grpc.max_reconnect_backoff_ms", "grpc.initial_reconnect_backoff_ms")
    slow = without(c.CLIENT_OPTIONS, *names, "grpc.min_reconnect_backoff_ms")
    # A machine that pauses for a second spoils one attempt; with our options each one finds it.
    assert not all(aio.run(_found_again(slow, down=6.4, limit=0.9)) for _ in range(3))


# ---------------------------------------------------------------- one connection each, bounds


def _connections(port: int) -> int:
    import psutil

    return sum(
        bool(found.raddr) and found.raddr.port == port and found.status == psutil.CONN_ESTABLISHED
        for found in psutil.Process().net_connections("tcp")
    )


@pytest.mark.parametrize(("names", "count"), [((), 2), (("grpc.use_local_subchannel_pool",), 1)])
async def test_a_second_channel_is_a_second_connection(names: tuple[str, ...], count: int) -> None:
    options = without(c.CLIENT_OPTIONS, *names)
    async with Master() as master:
        channels = [c.open_channel(master.endpoint, options) for _ in range(2)]
        for channel in channels:
            stream = c.attend(channel)
            await stream.send(m.Beat(1))
            await stream.receive()
        assert _connections(master.port) == count
        for channel in channels:
            await channel.close()


@pytest.mark.slow
@pytest.mark.parametrize("names", [(), ("grpc.max_concurrent_streams",)], ids=["bound", "default"])
async def test_streams_on_one_connection_are_bounded(names: tuple[str, ...]) -> None:
    most = c.SERVER_OPTIONS["grpc.max_concurrent_streams"]
    options = without(UNHURRIED, *names)
    async with Master(options) as master:
        channel = c.open_channel(master.endpoint)
        sends = [asyncio.ensure_future(c.attend(channel).send(m.Beat(1))) for _ in range(most + 1)]
        await asyncio.wait(sends, timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
        done, waiting = await asyncio.wait(sends, timeout=LIMIT if names else 2.0)
        assert done  # gRPC counts a little less than it is told
        assert bool(waiting) == (not names)
        for send in waiting:
            send.cancel()
        await asyncio.gather(*sends, return_exceptions=True)
        await channel.close()


async def test_a_status_reply_may_be_longer_than_a_message() -> None:
    node = m.NodeStatus("n", "h", "a", "alive", "running", "r" * 4000, 0, 0, 1, ())
    wide = m.JobStatus("j", "running", "", None, 0, 0, 0, 0, 1, 1, (node,) * 100, "", "")

    async def attend(_context: Any) -> None: ...

    async def status(context: Any) -> None:
        await show(context, wide)

    server = c.make_server(attend, status, max_calls=1, options=UNHURRIED)
    port = c.listen(server, "127.0.0.1", 0)
    await server.start()
    assert await c.get_status(Endpoint("localhost", port), LIMIT) == wide
    await server.stop(0)


@pytest.mark.parametrize("names", [(), ("grpc.max_allowed_incoming_connections",)])
async def test_connections_are_bounded(names: tuple[str, ...]) -> None:
    most = 3
    options = {**UNHURRIED, "grpc.max_allowed_incoming_connections": most}
    async with Master(without(options, *names)) as master:
        served = 0
        held = []
        for _ in range(most + 3):
            wire = await Wire.open(master.port)
            held.append(wire)
            served += bool(await wire.hears(raw.SETTINGS))
        assert served == (most + 3 if names else most)
        for wire in held:
            wire.close()


@pytest.mark.parametrize("names", [(), ("grpc.max_receive_message_length",)], ids=["ours", "grpcs"])
async def test_an_order_over_the_bound_is_refused_by_the_agent(names: tuple[str, ...]) -> None:
    async def attend(context: Any) -> None:
        await context.write(b"\0" * (m.MAX_MESSAGE_BYTES + 1))

    server = c.make_server(attend, attend, max_calls=1, options=UNHURRIED)
    port = c.listen(server, "127.0.0.1", 0)
    await server.start()
    options = without(c.CLIENT_OPTIONS, *names)
    async with c.open_channel(Endpoint("127.0.0.1", port), options) as channel:
        call = channel.stream_stream(c.ATTEND)()
        if names:
            assert len(await call.read()) > m.MAX_MESSAGE_BYTES
        else:
            with pytest.raises(c.grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is c.grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(0)


# ---------------------------------------------------------------- what only raw HTTP/2 shows


class Wire:
    """A connection without a gRPC library, with the frames that came back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int, *, greet: bool = True) -> Wire:
        made = cls(*await asyncio.open_connection("127.0.0.1", port))
        if greet:
            made.send(raw.PREFACE + raw.settings())
        return made

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def frame(self) -> tuple[int, int, bytes] | None:
        """Kind, flags and payload of the next frame; None at the end of the connection."""
        try:
            head = await self._reader.readexactly(9)
            return head[3], head[4], await self._reader.readexactly(int.from_bytes(head[:3]))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def hears(
        self, kind: int, *, within: float = LIMIT, answer: bool = False
    ) -> bytes | None:
        """The payload of the next frame of this kind; None if the connection ends before it, or
        nothing of the kind comes `within` seconds. `answer`: acknowledge pings on the way."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while (got := await self.frame()) is not None:
                    if answer and got[0] == raw.PING and not got[1]:
                        self.send(raw.frame(raw.PING, got[2], flags=raw.ACK))
                    if got[0] == kind and not got[1] & raw.ACK:
                        return got[2] or b"-"
        return None

    async def ends(self, within: float) -> bool:
        """Whether the other side closes it in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while await self.frame() is not None:
                    pass
                return True
        return False

    def close(self) -> None:
        self._writer.transport.abort()


PINGS = 12


@pytest.mark.parametrize("names", [(), ("grpc.http2.max_ping_strikes",)], ids=["ours", "grpcs"])
async def test_pings_of_an_agent_or_a_proxy_are_no_reason_to_hang_up(
    names: tuple[str, ...],
) -> None:
    options = UNHURRIED  # the wire answers no ping
    if names:  # gRPC's own idea of how often one may ping goes with it
        names += ("grpc.http2.min_ping_interval_without_data_ms",)
        options = without(c.SERVER_OPTIONS, *names)
    async with Master(options) as master:
        wire = await Wire.open(master.port)
        for _ in range(PINGS):
            wire.send(raw.frame(raw.PING, b"12345678"))
        assert await wire.ends(LIMIT if names else 1.0) == bool(names)
        wire.close()


@pytest.mark.slow
@pytest.mark.parametrize("names", [(), ("grpc.keepalive_permit_without_calls",)])
async def test_a_connection_without_a_stream_is_pinged_too(names: tuple[str, ...]) -> None:
    """Or a host that vanishes between two streams would keep its connection."""
    async with Master(without(UNHURRIED, *names)) as master:
        wire = await Wire.open(master.port)
        # The first ping of a connection measures bandwidth and comes either way.
        counted = 0
        within = 4.0 if names else LIMIT
        while counted < 3 and await wire.hears(raw.PING, within=within, answer=True):
            counted += 1
        assert (counted == 3) == (not names)
        wire.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "greet"),
    [("grpc.server_handshake_timeout_ms", False), ("grpc.max_connection_idle_ms", True)],
    ids=["no-word", "no-stream"],
)
@pytest.mark.parametrize("kept", [True, False], ids=["ours", "grpcs"])
async def test_a_connection_on_which_nothing_happens_is_closed(
    name: str, greet: bool, kept: bool
) -> None:
    """Here after less than a second, in the place of 10 and 60; never or in minutes without."""
    ours = {**c.SERVER_OPTIONS, name: 700}
    async with Master(ours if kept else without(UNHURRIED, name)) as master:
        wire = await Wire.open(master.port, greet=greet)
        assert await wire.ends(LIMIT if kept else 3.0) == kept
        wire.close()


# ---------------------------------------------------------------- sentences and silence


async def test_a_dead_endpoint_is_a_sentence() -> None:
    with pytest.raises(c.LinkError) as dead:
        await c.get_status(Endpoint("127.0.0.1", free_port()), 5.0)
    assert "\n" not in str(dead.value)
    assert not dead.value.rejected


async def test_a_server_that_is_no_master_is_named_so() -> None:
    server = c.grpc.aio.server()
    port = c.listen(server, "127.0.0.1", 0)
    await server.start()
    with pytest.raises(c.LinkError, match="not an elasticrun master") as wrong:
        await c.get_status(Endpoint("127.0.0.1", port), LIMIT)
    assert wrong.value.rejected
    await server.stop(0)


def test_importing_grpc_leaves_no_trace_and_says_nothing() -> None:
    """Neither in the environment, which ranks inherit, nor on the terminal."""
    code = """
import asyncio, os, sys, warnings
before = dict(os.environ)
from elasticrun.wire.rpc import channel as c
assert dict(os.environ) == before, set(os.environ) ^ set(before)

async def main():
    async def nothing(context): ...
    server = c.make_server(nothing, nothing, max_calls=1)
    port = c.listen(server, "127.0.0.1", 0)
    await server.start()
    try:
        c.listen(c.make_server(nothing, nothing, max_calls=1), "127.0.0.1", port)
    except c.ListenError:
        pass
    os.waitpid(os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", ""], os.environ), 0)
    with warnings.catch_warnings():  # Python's own, of grpc's threads, since 3.12
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.wait()
    await server.stop(0)

asyncio.run(main())
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_users_own_grpc_settings_stand() -> None:
    code = "import os; import elasticrun.wire.rpc.channel; print(os.environ['GRPC_VERBOSITY'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "GRPC_VERBOSITY": "error"},
    )
    assert done.stdout == "error\n"


# ---------------------------------------------------------------- gRPC's explanations


@pytest.mark.parametrize(
    ("details", "said"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to "
            "connect to remote host: Connection refused",
            "Connection refused",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:43017: "
            "connection attempt timed out before receiving SETTINGS frame",
            "it accepts no connection",
        ),
        (
            "errors resolving h:1: [field:hostname lookup error:UNKNOWN: address lookup failed for "
            "h:1: Domain name not found]",
            "the name server does not know this host",
        ),
        ("Cancelling all calls", "it has ended"),
        ("Stream removed (ping timeout)", "no answer to pings"),
        ("two\n lines", "two lines"),
        ("", "unavailable"),
        (None, "unavailable"),
        ("x" * 1000, "x" * MAX_EXPLANATION),
    ],
)
def test_what_an_operator_reads(details: str | None, said: str) -> None:
    assert in_words("UNAVAILABLE", details) == said
