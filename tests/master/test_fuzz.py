"""Strangers and fools at a real master with its real brain: it neither crashes, hangs nor grows,
and who behaves is served."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from elasticrun.core.job.job import Job
from elasticrun.wire import messages as m
from elasticrun.wire.rpc.channel import LinkError, attend, open_channel
from tests import aio
from tests.further import examples
from tests.harness import await_true
from tests.master import raw
from tests.master.people import LIMIT, ROUND, SPEC, enter, hear, hello, serving
from tests.master.test_process import Process, home, started
from tests.wire import strategies as draw

pytestmark = pytest.mark.slow

__all__ = ["home"]

HELLO = raw.PREFACE + raw.settings()


async def _is_well(master: Process) -> None:
    async with open_channel(master.endpoint) as channel:
        stream = attend(channel)
        assert isinstance(await enter(stream, hello("well-behaved")), m.Welcome)
        await stream.close()
        while await hear(stream) is not None:
            pass


def _shout(port: int, data: bytes) -> None:
    sock = socket.create_connection(("127.0.0.1", port), timeout=LIMIT)
    with contextlib.closing(sock), contextlib.suppress(OSError):  # it may hang up at once
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass


def test_noise_at_both_ports(home: Path) -> None:
    """Random bytes, bare and behind a valid preface, and frames that promise 16 MB."""
    chance = random.Random(4711)
    with started() as master:
        ports = (master.answer["port"], master.answer["status_port"])
        aio.run(_is_well(master))
        for port in ports:  # what the first visitor makes it import is not growth
            _shout(port, b"GET /status HTTP/1.0\r\n\r\n")
        process = psutil.Process(master.popen.pid)
        before, fds = process.memory_info().rss, process.num_fds()
        for turn in range(150):
            noise = chance.randbytes(chance.choice((1, 9, 100, 5000, 70_000)))
            head = (b"", raw.PREFACE, HELLO, HELLO + b"\xff\xff\xff\0\0")
            _shout(ports[turn % 2], chance.choice(head) + noise)
        aio.run(_is_well(master))
        # gRPC closes them in threads of its own
        await_true(lambda: process.num_fds() <= fds + 4, "end of the strangers' descriptors")
        assert process.memory_info().rss < before + 20_000 * 1024
        master.cut()
        assert master.ended() == (0, "")  # and not a word of it on the user's terminal


def test_dribblers_hold_up_nobody(home: Path) -> None:
    with started() as master, contextlib.ExitStack() as held:
        for number in range(100):
            port = master.answer["port"]
            sock = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT))
            sock.sendall(HELLO[: number % 30])
        aio.run(_is_well(master))


talk = st.lists(draw.later_reports, max_size=12)


@given(first=draw.hellos("job"), second=draw.hellos("job"), said=talk, answered=talk)
@settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_agents_say_the_brain_and_its_shell_go_on(
    first: m.Hello, second: m.Hello, said: list[m.Report], answered: list[m.Report]
) -> None:
    """Every message is allowed on the wire; together they make no sense."""

    async def run() -> None:
        async with serving(Job(SPEC, 1, lambda: "n0nce")) as served:
            async with served.stream() as one, served.stream() as other:
                with contextlib.suppress(LinkError):
                    await enter(one, first)
                    await enter(other, second)
                    for report in said:
                        await one.send(report)
                    for report in answered:
                        await other.send(report)
                    await one.send(m.Beat(77))
                    while await hear(one) not in (None, m.Echo(77)):
                        pass
            assert served.loop._faults == 0, "the state machine raised"

    aio.run(run())


def test_reports_of_rounds_that_never_were(home: Path) -> None:
    """A confused agent, again and again; then the job goes its way."""
    reports: list[m.Report] = [
        m.Finished(ROUND),
        m.Stopped(ROUND),
        m.Running(ROUND, (1,)),
        m.Stopping(ROUND, 1e9),
        m.RanksFailed(ROUND, ()),
    ]

    async def confuse(master: Process) -> None:
        for turn in range(10):
            async with open_channel(master.endpoint) as channel:
                stream = attend(channel)
                with contextlib.suppress(LinkError):
                    await enter(stream, hello(f"confused-{turn % 3}"))
                    for report in reports:
                        await stream.send(report)
                    await stream.send(m.Beat(turn))
                    while await hear(stream) not in (None, m.Echo(turn)):
                        pass

    with started() as master:
        aio.run(confuse(master))
        aio.run(_is_well(master))
        master.cut()
        code, said = master.ended()
        assert code == 0
        assert "defect" not in said


def test_status_is_served_while_a_hundred_agents_come_and_go(home: Path) -> None:
    async def storm(master: Process) -> None:
        async def one(number: int) -> None:
            async with open_channel(master.endpoint) as channel:
                stream = attend(channel)
                with contextlib.suppress(LinkError):
                    await enter(stream, hello(f"n{number}"))

        await asyncio.gather(*(one(number) for number in range(100)))

    with started() as master:
        aio.run(storm(master))
        assert master.status().nodes
