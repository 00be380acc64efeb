"""The port proxy as a process: who is let through to whom, and when it closes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.agent.link import port_proxy_child
from elasticrun.host.system.processes import state
from elasticrun.wire import messages as m
from elasticrun.wire.rpc.channel import get_status
from elasticrun.wire.types import Endpoint
from tests import aio
from tests.harness import await_true
from tests.master.people import LIMIT, at_once, enter, hear, hello, serving, status as page


@dataclasses.dataclass
class Opened:
    """A running proxy."""

    popen: subprocess.Popen[bytes]
    port: int
    control: socket.socket

    def tell(self, **words: str | None) -> None:
        self.control.sendall(json.dumps(words).encode() + b"\n")

    def visit(self, first: bytes = b"") -> socket.socket:
        visitor = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT)
        visitor.sendall(first)
        return visitor


@contextlib.contextmanager
def opened(code: int = 0) -> Iterator[Opened]:
    """A proxy on a free port; it must end by itself when its control stream does."""
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    fds = (listener.fileno(), theirs.fileno())
    popen = subprocess.Popen(port_proxy_child.command(*fds), pass_fds=fds, start_new_session=True)
    listener.close()
    theirs.close()
    try:
        yield Opened(popen, port, ours)
        ours.close()
        assert popen.wait(LIMIT) == code
    finally:
        ours.close()
        popen.kill()
        popen.wait()


class Behind:
    """A server on loopback, standing for a store or a master."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(LIMIT)
        self.where = f"127.0.0.1:{self.listener.getsockname()[1]}"

    def accept(self) -> socket.socket:
        connection, _ = self.listener.accept()
        connection.settimeout(LIMIT)
        return connection

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()


@contextlib.contextmanager
def serving_a_store() -> Iterator[tuple[Opened, Behind]]:
    with opened() as gate, Behind() as store:
        gate.tell(store=store.where)
        yield gate, store


def read(sock: socket.socket, count: int) -> bytes:
    """Exactly so many bytes, or what came before the end."""
    data = b""
    while len(data) < count and (more := sock.recv(count - len(data))):
        data += more
    return data


def ended(sock: socket.socket) -> bool:
    """Whether the next thing to be read is the end, in good order or not."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_the_first_bytes_decide() -> None:
    with opened() as gate, Behind() as store, Behind() as master:
        gate.tell(store=store.where)
        gate.tell(master=master.where)
        for first, behind in ((b"\x00hello", store), (port_proxy_child.PREFACE + b"\r\n", master)):
            with gate.visit(first) as visitor, behind.accept() as inner:
                assert read(inner, len(first)) == first
                inner.sendall(b"answer")
                assert read(visitor, 6) == b"answer"


def test_a_preface_in_pieces_is_waited_for() -> None:
    with opened() as gate, Behind() as store, Behind() as master:
        gate.tell(store=store.where, master=master.where)
        with gate.visit(b"PRI * HT") as visitor:
            with gate.visit(b"PRI*") as other, store.accept() as inner:
                assert read(inner, 4) == b"PRI*"
                other.close()
            visitor.sendall(b"TP/2.0\r\n")
            with master.accept() as inner:
                assert read(inner, 16) == b"PRI * HTTP/2.0\r\n"


def test_a_half_closed_connection_still_answers() -> None:
    with (
        serving_a_store() as (gate, store),
        gate.visit(b"question") as visitor,
        store.accept() as inner,
    ):
        visitor.shutdown(socket.SHUT_WR)
        assert read(inner, 100) == b"question"  # and the end
        inner.sendall(b"answer")
        inner.close()
        assert read(visitor, 100) == b"answer"


def test_a_slow_reader_holds_up_its_writer_and_nobody_else() -> None:
    """16 MB through a reader that looks later: nothing is lost, it does not grow."""
    size = 16 * 1024 * 1024
    data = os.urandom(1024) * (size // 1024)
    with serving_a_store() as (gate, store):
        with gate.visit(b"x") as visitor, store.accept() as inner:
            writer = threading.Thread(target=visitor.sendall, args=(data,))
            writer.start()
            with gate.visit(b"y") as other, store.accept() as beside:
                assert read(beside, 1) == b"y"
                beside.sendall(b"z")
                assert read(other, 1) == b"z"
            assert read(inner, size + 1)[1:] == data
            writer.join()
        for line in Path(f"/proc/{gate.popen.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                assert int(line.split()[1]) < 40_000  # kB


def test_a_new_store_closes_the_connections_of_the_older_round() -> None:
    with opened() as gate, Behind() as old, Behind() as new, Behind() as master:
        gate.tell(store=old.where, master=master.where)
        with (
            gate.visit(b"a") as zombie,
            old.accept() as inner,
            gate.visit(port_proxy_child.PREFACE) as agent,
            master.accept() as session,
        ):
            assert read(inner, 1) == b"a"
            assert read(session, len(port_proxy_child.PREFACE)) == port_proxy_child.PREFACE
            gate.tell(store=old.where)  # the same again: nothing happens
            gate.tell(store=new.where)
            assert ended(zombie)
            assert ended(inner)
            with gate.visit(b"b") as visitor, new.accept() as current:
                assert read(current, 1) == b"b"
                current.sendall(b"c")
                assert read(visitor, 1) == b"c"
            session.sendall(b"still here")  # agents are of no round
            assert read(agent, 10) == b"still here"


def test_between_rounds_connections_are_closed_and_newcomers_wait() -> None:
    """Before the first one, too."""
    with opened() as gate, Behind() as old, Behind() as new, gate.visit(b"early") as zombie:
        gate.tell(store=old.where)
        with old.accept() as inner:
            assert read(inner, 5) == b"early"
            inner.sendall(b"late")
            assert read(zombie, 4) == b"late"
            gate.tell(store=None)
            assert ended(zombie)
            with gate.visit(b"b"):
                gate.tell(store=new.where)
                with new.accept() as later:
                    assert read(later, 1) == b"b"


def test_a_store_that_is_not_there_closes_the_connection() -> None:
    with opened() as gate:
        with Behind() as gone:
            where = gone.where
        gate.tell(store=where)
        with gate.visit(b"a") as visitor:
            assert ended(visitor)
        assert gate.popen.poll() is None


def test_noise_on_the_control_stream_is_passed_over() -> None:
    with opened() as gate, Behind() as store:
        for noise in (b"\xff\n", b"[]\n", b'{"store": 7}\n', b'{"master": "nowhere"}\n', b"{\n"):
            gate.control.sendall(noise)
        gate.control.sendall(b"x" * 20_000 + b"\n")
        gate.tell(store=store.where)
        with gate.visit(b"a"), store.accept() as inner:
            assert read(inner, 1) == b"a"


def test_signals_to_everybody_are_not_for_the_proxy() -> None:
    with serving_a_store() as (gate, store):
        with gate.visit(b"a"), store.accept() as inner:  # it runs, so its handlers stand
            assert read(inner, 1) == b"a"
        for word in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
            gate.popen.send_signal(getattr(signal, word))
        with gate.visit(b"b"), store.accept() as inner:
            assert read(inner, 1) == b"b"


def test_killed_it_leaves_its_port_free() -> None:
    with opened(-signal.SIGKILL) as gate:
        gate.popen.kill()
        gate.popen.wait()
        socket.create_server(("127.0.0.1", gate.port)).close()


@contextlib.contextmanager
def within(most: int) -> Iterator[tuple[tuple[str, int], socket.socket]]:
    """A proxy in this process, whose limits can be changed: where it listens, and its control
    stream."""
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, theirs:
        running = threading.Thread(
            target=port_proxy_child.Proxy(listener, theirs.fileno(), most).run
        )
        running.start()
        try:
            yield listener.getsockname(), ours
        finally:
            ours.close()
            running.join(LIMIT)


def test_who_says_nothing_is_dropped(monkeypatch) -> None:
    """With a shorter limit: thirty seconds are too long to wait."""
    monkeypatch.setattr(port_proxy_child, "HEAD_LIMIT", 0.2)
    with within(16) as (where, _), socket.create_connection(where, timeout=LIMIT) as silent:
        assert ended(silent)


def test_connections_are_bounded_and_others_wait_their_turn() -> None:
    with within(2) as (where, control), Behind() as store:
        control.sendall(json.dumps({"store": store.where}).encode() + b"\n")
        visitors = [socket.create_connection(where, timeout=LIMIT) for _ in range(3)]
        for number, visitor in enumerate(visitors):
            visitor.sendall(bytes([65 + number]))
        inner = [store.accept() for _ in range(2)]
        assert {read(sock, 1) for sock in inner} == {b"A", b"B"}
        store.listener.settimeout(0.3)
        with pytest.raises(TimeoutError):
            store.accept()
        store.listener.settimeout(LIMIT)
        visitors[0].close()
        for sock in inner:
            sock.close()
        with store.accept() as third:
            assert read(third, 1) == b"C"
        for visitor in visitors:
            visitor.close()


def test_without_descriptors_it_rests_and_goes_on_when_there_are_some() -> None:
    """A connection that cannot be accepted stays in the kernel's queue, which tells of it at every
    look: it must not look again and again."""
    with serving_a_store() as (gate, store):
        with gate.visit(b"A") as visitor, store.accept() as inner:
            assert read(inner, 1) == b"A"
            used = len(os.listdir(f"/proc/{gate.popen.pid}/fd"))
            limits = resource.prlimit(gate.popen.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(gate.popen.pid, resource.RLIMIT_NOFILE, (used + 1, limits[1]))
            waiting = [gate.visit() for _ in range(4)]
            # One that looks again and again never sleeps.
            await_true(lambda: state(gate.popen.pid) == "S", "a proxy that rests")
            visitor.close()
        for sock in waiting[1:]:
            sock.close()
        resource.prlimit(gate.popen.pid, resource.RLIMIT_NOFILE, limits)
        waiting[0].sendall(b"B")
        with store.accept() as inner, waiting[0]:
            assert read(inner, 1) == b"B"


# ---------------------------------------------------------------- the real things behind it


def test_grpc_goes_through() -> None:
    async def run(gate: Opened) -> None:
        async with serving() as served:
            gate.tell(master=str(served.endpoint))
            through = Endpoint("127.0.0.1", gate.port)
            assert at_once(await get_status(through, LIMIT)) == page()
            served.endpoint = through
            async with served.agent() as stream:
                await stream.send(m.Beat(1))
                assert await hear(stream) == m.Echo(1)
                await stream.close()
                while await hear(stream) is not None:
                    pass
            async with served.stream() as stream:
                assert isinstance(await enter(stream, hello("second")), m.Welcome)

    with opened() as gate:
        aio.run(run(gate))


STORE = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
port, server = int(sys.argv[1]), sys.argv[2] == "server"
store = TCPStore("127.0.0.1", port, is_master=server, wait_for_workers=False,
                 timeout=timedelta(seconds=60))
if server:
    print(store.port, flush=True)
    sys.stdin.read()
else:
    store.set("key", b"x" * 1_000_000)
    assert store.get("key") == b"x" * 1_000_000
    print(store.add("count", 2))
"""


@pytest.mark.slow
def test_a_tcpstore_goes_through() -> None:
    command = [sys.executable, "-c", STORE]
    with (
        opened() as gate,
        subprocess.Popen(
            [*command, "0", "server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as host,
    ):
        gate.tell(store=f"127.0.0.1:{int(host.stdout.readline())}")
        done = subprocess.run(
            [*command, str(gate.port), "client"], capture_output=True, text=True, timeout=240
        )
        assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
        host.stdin.close()
