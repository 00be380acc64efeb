"""A master in this process with a brain that only records, and agents that say what they are told
to say: for what the shell does itself."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import pytest
from msgspec import structs

from elasticrun import __version__
from elasticrun.core.events import Attached, Hangup, Heard, JobEffect, JobEvent, JobOver, Send
from elasticrun.core.sight.picture import Goodput, LedgerRow, Picture
from elasticrun.master import server
from elasticrun.master.loop import Listeners, Loop
from elasticrun.master.server import MAX_CALLS, Servicer
from elasticrun.wire import messages as m
from elasticrun.wire.auth import Pem
from elasticrun.wire.rpc.channel import (
    SERVER_OPTIONS,
    Attendance,
    attend,
    listen,
    make_server,
    open_channel,
)
from elasticrun.wire.types import Endpoint, RoundName, mint_incarnation

LIMIT = 240.0
"""Seconds to wait for what must come; far above what it takes."""

UNHURRIED: Mapping[str, int] = {
    **SERVER_OPTIONS,
    "grpc.keepalive_timeout_ms": round(1000 * LIMIT),
    "grpc.http2.ping_timeout_ms": round(1000 * LIMIT),
}
"""A transport that hangs up on nobody for standing still, as the process of the tests does now and
then: it would be the peer of its own streams that is silent."""

SPEC = m.JobSpec("job", 1, 2, 1, 3, 30.0, 0.0, 600.0, 30.0, 60.0, "auto", 600.0, 30.0, 600.0)
ROUND = RoundName(1, 1, "0badcafe")


def hello(node: str = "n0", **changes: Any) -> m.Hello:
    made = m.Hello(
        protocol=m.PROTOCOL_VERSION,
        version=__version__,
        node=node,
        incarnation=mint_incarnation(),
        host="host",
        address="127.0.0.1",
        pid=1,
        node_rank=-1,
        local_world_size=2,
        role="default",
        spec=SPEC,
        attached=None,
    )
    return structs.replace(made, **changes)


def status(**changes: Any) -> m.JobStatus:
    node = m.NodeStatus(
        "n0", "host", "127.0.0.1", "alive", "running", "because [so]", 0, 0, 2, (7, 8)
    )
    made = m.JobStatus("job", "running", "reason", ROUND, 2, 1, 2, 3, 1, 2, (node,), "boom", "")
    return structs.replace(made, **changes)


def at_once(page: m.JobStatus) -> m.JobStatus:
    """The page of a master as it was when it began: its age, which is real time, left out."""
    assert page.age >= 0.0
    return structs.replace(page, age=0.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """The smallest brain of the right shape: greets, remembers, and does what a test says
    through `on`."""

    def __init__(self) -> None:
        self.events: list[JobEvent] = []
        self._waiting: list[tuple[Callable[[JobEvent], bool], asyncio.Future[JobEvent]]] = []
        self.deadline: float | None = None
        self.on: Callable[[JobEvent], list[JobEffect]] = lambda event: []
        self.page = status()
        self.whole = Picture(self.page)

    def step(self, event: JobEvent, now: float) -> list[JobEffect]:
        self.events.append(event)
        for right, found in self._waiting:
            if not found.done() and right(event):
                found.set_result(event)
        effects: list[JobEffect] = []
        if isinstance(event, Attached):
            welcome = m.Welcome(m.PROTOCOL_VERSION, __version__, "job", 1, 1.0, 600.0, "")
            effects.append(Send((event.session,), welcome))
        elif isinstance(event, Heard) and isinstance(event.report, m.Leaving):
            effects.append(Send((event.session,), m.End(0, "bye", ())))
            effects.append(Hangup(event.session))
            if event.report.reason == "over":
                effects.append(JobOver(3, "the test says so"))
        return effects + self.on(event)

    def next_deadline(self) -> float | None:
        return self.deadline

    def status(self) -> m.JobStatus:
        return self.page

    def slow_nodes(self) -> int:
        return len(self.whole.slow)

    def quiet(self) -> float:
        return 7.5

    def goodput(self) -> Goodput | None:
        return Goodput("goodput", 0.5, 0.5, 8.0, (LedgerRow("step", "", 4.0),), "goodput 50.0 %")

    def picture(self) -> Picture:
        return structs.replace(self.whole, status=self.page)

    async def until(self, right: Callable[[JobEvent], bool]) -> JobEvent:
        """The first event of which `right` holds, waiting for it."""
        for event in self.events:
            if right(event):
                return event
        found: asyncio.Future[JobEvent] = asyncio.get_running_loop().create_future()
        self._waiting.append((right, found))
        return await asyncio.wait_for(found, LIMIT)


@dataclasses.dataclass
class Served:
    """A master that serves in this process."""

    brain: Recorder
    loop: Loop
    servicer: Servicer
    endpoint: Endpoint
    over: list[JobOver]

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[Attendance]:
        """A stream on a channel of its own, with nothing said on it yet."""
        channel = open_channel(self.endpoint)
        try:
            yield attend(channel)
        finally:
            await channel.close()

    @contextlib.asynccontextmanager
    async def agent(self, node: str = "n0", token: str = "") -> AsyncIterator[Attendance]:
        """An agent that has been welcomed."""
        async with self.stream() as stream:
            assert isinstance(await enter(stream, hello(node), token), m.Welcome)
            yield stream

    async def too_late(self, due: str, asked: list[str]) -> None:
        """For the one stream that is on its way in: its time is over as soon as this is due of it.
        `asked`: see `asking`."""
        async with asyncio.timeout(LIMIT):
            while asked[-1:] != [due]:  # noqa: ASYNC110  (nothing tells of it)
                await asyncio.sleep(0)
        (limit,) = self.servicer._pending._waiting
        limit.reschedule(asyncio.get_running_loop().time())

    async def is_well(self, token: str = "") -> None:
        """A well-behaved client is served."""
        async with self.agent("well-behaved", token) as stream:
            await stream.send(m.Beat(4711))
            assert await hear(stream) == m.Echo(4711)


async def hear(stream: Attendance) -> m.Order | None:
    """The next order, within the limit."""
    async with asyncio.timeout(LIMIT):
        return await stream.receive()


async def enter(stream: Attendance, said: m.Hello, token: str = "") -> m.Order | None:
    """What the master answers to this Hello and the proof before it, within the limit."""
    async with asyncio.timeout(LIMIT):
        return await stream.enter(said, token)


def asking(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the master has asked of streams on their way in, the newest last; it grows."""
    asked: list[str] = []
    first = server._first

    async def noted(context: Any, awaited: str) -> m.Report:
        asked.append(awaited)
        return await first(context, awaited)

    monkeypatch.setattr(server, "_first", noted)
    return asked


async def told(*command: str, **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that runs while this process serves."""
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    made = await asyncio.create_subprocess_exec(*command, env=variables, **pipes)
    out, err = await asyncio.wait_for(made.communicate(), LIMIT)
    return made.returncode or 0, out.decode(), err.decode()


@contextlib.asynccontextmanager
async def serving(
    brain: Any = None,
    *,
    store: Any = None,
    port: int = 0,
    tls: Pem | None = None,
    transport: Mapping[str, int] = UNHURRIED,
    bounds: Mapping[str, float] = MappingProxyType({}),
    **options: Any,
) -> AsyncIterator[Served]:
    """A master's loop and server around `brain` (a Recorder); `bounds`: of those in server.py, the
    ones that are other than there."""
    with patch.multiple(server, **{"PROVE_LIMIT": LIMIT, **bounds}):
        brain = brain or Recorder()
        over: list[JobOver] = []
        listeners = Listeners(on_over=lambda outcome, _: over.append(outcome))
        loop = Loop(brain, store=store, listeners=listeners)
        servicer = Servicer(loop, "job", **options)
        methods = (servicer.attend, servicer.status, servicer.reach)
        more = (servicer.ask_for, servicer.operate, servicer.join)
        made = make_server(*methods, *more, max_calls=MAX_CALLS, options=transport)
        port = listen(made, "127.0.0.1", port, tls)
        await made.start()
        turning = asyncio.ensure_future(loop.run())
        try:
            yield Served(brain, loop, servicer, Endpoint("127.0.0.1", port), over)
            assert not turning.done(), turning
        finally:
            turning.cancel()
            await asyncio.gather(turning, return_exceptions=True)
            await made.stop(0)
