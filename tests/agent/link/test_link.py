"""The session with a real master: welcomes, refusals, broken and silent connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from elasticrun.agent.link import session
from elasticrun.agent.link.answering import PortAnswer, probe
from elasticrun.agent.link.link import Link
from elasticrun.agent.link.master_process import MasterProcess
from elasticrun.config import spec_of
from elasticrun.core import events
from elasticrun.core.events import AgentEvent, LinkBack, LinkLost, Ordered
from elasticrun.host.log import logger
from elasticrun.wire.messages import Hello, Join, Leaving, Missed, Refused, Start, Welcome
from elasticrun.wire.types import Endpoint, RoundName
from tests.agent.configs import JOB, STANDALONE, launched
from tests.harness import LIMIT
from tests.master import people
from tests.master.people import SPEC, serving
from tests.wire.test_channel import held_port

pytestmark = pytest.mark.slow

LAUNCH = launched()
ASKED = spec_of(LAUNCH, JOB)
Hosted = tuple[MasterProcess, Endpoint]


@pytest.fixture
def master() -> Iterator[Hosted]:
    """A job master as an agent starts it."""
    with held_port() as port:  # one of them is served on again
        process = MasterProcess(LAUNCH, STANDALONE, JOB, Endpoint("127.0.0.1", port))
        try:
            answer = json.loads(os.read(process.ready_fd, 4096))
            yield process, Endpoint("127.0.0.1", answer["port"])
        finally:
            process.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.process.pid, signal.SIGCONT)
            process.process.wait(LIMIT)


def hello(**changes: Any) -> Hello:
    """One that is welcome to a master of that job."""
    return people.hello("node", **{"version": "0", "spec": ASKED, **changes})


class Heard:
    """What a link delivered, and a wait for the next of a kind."""

    def __init__(self, dial: Endpoint, hello: Callable[[], Hello]) -> None:
        self.dial = dial
        self.hello = hello
        self.events: list[AgentEvent] = []
        self._changed = asyncio.Event()

    fatal = staticmethod(pytest.fail)

    def no_master(self, reason: str) -> None: ...

    def linked(self, event: AgentEvent) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, good: Callable[[list[AgentEvent]], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not good(self.events):
                self._changed.clear()
                await self._changed.wait()

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    def orders(self, kind: type) -> list[Any]:
        found = (event.order for event in self.events if isinstance(event, Ordered))
        return [order for order in found if isinstance(order, kind)]


@contextlib.asynccontextmanager
async def linked(
    where: Endpoint, say: Hello | None = None, *, patience: float = LIMIT, **how: Any
) -> AsyncIterator[tuple[Link, Heard]]:
    """A master may stand still for as long as it likes: its silence is no loss here."""
    heard = Heard(where, lambda: say or hello())
    link = Link(heard, patience=patience, **how)
    link.start()
    try:
        yield link, heard
    finally:
        await link.close(5.0)


async def test_welcome_then_orders(master: Hosted) -> None:
    async with linked(master[1]) as (link, heard):
        await heard.until(lambda events: LinkBack() in events)
        assert isinstance(heard.events[0], Ordered)
        assert isinstance(heard.events[0].order, Welcome)
        joined = 0

        def started(_: list[AgentEvent]) -> bool:
            nonlocal joined
            if heard.count(LinkBack) > joined:  # as the brain does, each time
                joined = heard.count(LinkBack)
                link.send(Join(Endpoint("127.0.0.1", 4711)))
            return bool(heard.orders(Start))

        await heard.until(started)
        assert heard.orders(Start)[0].store == Endpoint("127.0.0.1", 4711)


async def test_what_cannot_be_said_is_left_out(caplog, monkeypatch) -> None:
    """A new session would meet it again at once, and so on for ever."""
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(session, "ECHO_LIMIT", LIMIT)
    join = Join(Endpoint("127.0.0.1", 1))
    async with serving() as served, linked(served.endpoint, hello(spec=SPEC)) as (link, heard):
        await heard.until(lambda _: heard.count(LinkBack) == 1)
        for _ in range(3):
            link.send(Missed(RoundName(1, 1, "a"), 5, -1))
        link.send(join)
        await served.brain.until(
            lambda event: isinstance(event, events.Heard) and event.report == join
        )
        assert not heard.count(LinkLost)
    (said,) = [one.message for one in caplog.records if "not sent to the master" in one.message]
    assert "missed.step is -1" in said


async def test_a_master_hears_of_one_that_left_before_its_welcome() -> None:
    """It may know this node by its hello, and would wait for it."""
    leaving = Leaving("received SIGTERM", 15)
    async with serving() as served, linked(served.endpoint, hello(spec=SPEC)) as (link, heard):
        link.send(leaving)
        asked = heard.hello
        said = asyncio.Event()
        heard.hello = lambda: (said.set(), asked())[1]
        await said.wait()
        await link.close(LIMIT)
        await served.brain.until(
            lambda event: isinstance(event, events.Heard) and event.report == leaving
        )


async def test_another_jobs_master_refuses(master: Hosted) -> None:
    other = hello(spec=replace(ASKED, job_id="another"))
    async with linked(master[1], other) as (_, heard):
        await heard.until(lambda _: bool(heard.orders(Refused)))
        assert "'another'" in heard.orders(Refused)[0].reason
        assert heard.count(LinkBack) == 0


async def test_another_version_is_one_sentence(master: Hosted) -> None:
    async with linked(master[1], hello(protocol=99, version="9.9")) as (_, heard):
        await heard.until(lambda _: bool(heard.orders(Refused)))
        assert "install one version" in heard.orders(Refused)[0].reason


async def test_a_master_that_comes_back_is_found(master: Hosted) -> None:
    process, endpoint = master
    async with linked(endpoint) as (_, heard):
        await heard.until(lambda _: heard.count(LinkBack) >= 1)
        process.process.kill()
        await heard.until(lambda _: heard.count(LinkLost) >= 1)
        process.process.wait()
        back = heard.count(LinkBack)
        again = MasterProcess(LAUNCH, STANDALONE, JOB, endpoint)
        try:
            await heard.until(lambda _: heard.count(LinkBack) > back)
        finally:
            again.process.kill()
            again.close()
            again.process.wait()


class Relay:
    """A wire between two ports that can be cut without a word: what is on it never arrives."""

    def __init__(self, target: Endpoint) -> None:
        self._target = target
        self._frozen: set[asyncio.StreamWriter] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> Endpoint:
        self._server = await asyncio.start_server(self._visit, "127.0.0.1", 0)
        return Endpoint("127.0.0.1", self._server.sockets[0].getsockname()[1])

    def freeze(self) -> None:
        """Nothing passes any more on the connections there are; new ones work."""
        self._frozen |= self._writers

    def cut(self) -> None:
        """End the connections there are; new ones work."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection(
            self._target.host, self._target.port
        )
        self._writers |= {writer, back_writer}
        for source, sink in ((reader, back_writer), (back_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if sink not in self._frozen:
                    sink.write(data)
            if sink not in self._frozen:
                sink.close()


async def test_without_an_echo_a_fresh_connection_takes_over(master: Hosted) -> None:
    relay = Relay(master[1])
    endpoint = await relay.start()
    async with linked(endpoint) as (_, heard):
        await heard.until(lambda _: heard.count(LinkBack) >= 1)
        back = heard.count(LinkBack)
        relay.freeze()
        await heard.until(lambda _: heard.count(LinkBack) > back)
        # The old connection was never lost, as far as anybody could tell.
        assert heard.count(LinkLost) == 0
    await relay.stop()


async def test_a_session_that_ends_just_after_its_welcome_is_not_dialled_without_a_rest(
    master: Hosted,
) -> None:
    relay = Relay(master[1])
    endpoint = await relay.start()
    began = asyncio.get_running_loop().time()
    async with linked(endpoint) as (_, heard):
        for number in range(1, 7):
            await heard.until(lambda _, number=number: heard.count(LinkBack) >= number)
            relay.cut()
        # rests of 0.025, 0.05, 0.1, 0.2 and 0.4 s at least; a few milliseconds each without
        assert asyncio.get_running_loop().time() - began > 0.5
    await relay.stop()


# ---------------------------------------------------------------- whose port is it


async def test_the_probe_knows_a_master(master: Hosted) -> None:
    assert await probe(master[1], LIMIT) == (PortAnswer.HTTP2, "")


async def rude(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.9\r\n")
    await writer.drain()
    writer.close()


async def test_the_probe_knows_strangers_and_nobody() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    for handler, limit, answer in (
        (rude, LIMIT, PortAnswer.FOREIGN),
        (silent, 0.1, PortAnswer.SILENT),
    ):
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert await probe(Endpoint("127.0.0.1", port), limit) == (answer, "")
        server.close()
        await server.wait_closed()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        assert await probe(Endpoint("127.0.0.1", port), LIMIT) == (PortAnswer.NOBODY, "")


async def test_a_master_that_says_nothing_counts_as_lost(master: Hosted) -> None:
    """The stream stands, as with a cable that was pulled: no kernel would tell of its end for a
    quarter of an hour, and meanwhile another world could begin elsewhere."""
    async with linked(master[1], patience=2.0) as (_, heard):
        await heard.until(lambda events: LinkBack() in events)
        os.kill(master[0].process.pid, signal.SIGSTOP)
        lost = LinkLost("it sent nothing for 2 s")
        await heard.until(lambda events: lost in events)
        os.kill(master[0].process.pid, signal.SIGCONT)
        await heard.until(lambda events: LinkBack() in events[events.index(lost) :])
