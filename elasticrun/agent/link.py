"""The session with the master: dial, say hello, carry reports and orders, beat, dial again.

A stream that breaks is no event of the job: the link dials again, with a short jittered back-off,
for as long as the agent lives, and the brain decides how long a silence may last. Where the master
does not echo a beat within a second, a fresh connection is dialled beside the old one: a new SYN
does not wait for the old stream's retransmissions (COORDINATION 5).
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from elasticrun.agent.probe import Answer, probe
from elasticrun.agent.threads import tell_failure
from elasticrun.config import EXIT_FAILED
from elasticrun.core.effects import AgentEvent, LinkBack, LinkLost, Ordered
from elasticrun.operator_log import logger
from elasticrun.wire.channel import Attendance, LinkError, attend, open_channel
from elasticrun.wire.ids import Endpoint
from elasticrun.wire.messages import Beat, Echo, Hello, Order, Refused, Report, Welcome

WELCOME_LIMIT: Final = 5.0
"""Seconds from dialling to the answer to our Hello; then the attempt is given up for a new one."""

BACKOFF_FIRST: Final = 0.1
BACKOFF_MOST: Final = 1.0
"""Seconds between attempts, doubled each time and jittered; an agent is back within a second of a
master's return, and ten thousand agents do not come in one instant."""

ECHO_LIMIT: Final = 1.0
"""Seconds after a beat without an echo at which a second connection is dialled."""

OUTBOX_MOST: Final = 1000
"""Reports that wait for a full transport; beyond it the stream is given up and state told anew."""

TELL_AFTER: Final = 3
"""Attempts at first contact before the operator is told that no master answers."""

STRANGER_AFTER: Final = 3
"""That many probes in a row of a port that was never a master's, WELCOME_LIMIT apart, must find
somebody there who does not speak our protocol before we end with a sentence."""


class _Session:
    """One stream on one channel of its own, from Hello to its end."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._channel = open_channel(endpoint)
        self._stream: Attendance = attend(self._channel)
        self._outbox: deque[Report] = deque()
        self._more = asyncio.Event()
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the stream is gone, with the reason."""
        self.stale = asyncio.Event()
        """Set while a beat has waited ECHO_LIMIT for its echo."""
        self.welcome: Welcome | None = None
        self.beat_interval = 1.0
        self._echo = asyncio.Event()
        self._echoed = 0

    async def open(self, hello: Hello) -> Welcome | Refused:
        """Say hello and hear the answer. LinkError."""
        await self._stream.send(hello)
        answer = await self._stream.receive()
        if isinstance(answer, Welcome):
            self.welcome = answer
            self.beat_interval = max(0.1, answer.beat_interval)
            return answer
        if isinstance(answer, Refused):
            return answer
        said = "nothing" if answer is None else type(answer).__name__
        raise LinkError(f"it answered our hello with {said}")

    def carry(self, heard: Callable[[Order], None]) -> None:
        """Begin to exchange reports and orders; to be called after a Welcome."""
        bodies: list[Coroutine[Any, Any, None]] = [self._read(heard), self._write(), self._beat()]
        self._tasks = [asyncio.create_task(body) for body in bodies]

    def say(self, report: Report) -> None:
        if len(self._outbox) >= OUTBOX_MOST:
            self._end("the master takes no reports")
            return
        self._outbox.append(report)
        self._more.set()

    async def close(self, limit: float) -> None:
        """Send what is queued, leave in good order, then drop everything."""
        if self._tasks and not self.ended.done():
            self._closing = True
            self._more.set()
            await asyncio.wait({self.ended}, timeout=limit)
        await self.drop()

    async def drop(self) -> None:
        """Cut the connection, in whatever state it is."""
        self._end("closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._stream.cancel()
        await self._channel.close()

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    async def _read(self, heard: Callable[[Order], None]) -> None:
        try:
            while (order := await self._stream.receive()) is not None:
                if isinstance(order, Echo):
                    self._echoed = order.number
                    self._echo.set()
                else:
                    heard(order)
            self._end("the master closed the stream")
        except LinkError as error:
            self._end(str(error))

    async def _write(self) -> None:
        try:
            while True:
                while self._outbox:
                    await self._stream.send(self._outbox.popleft())
                if self._closing:
                    await self._stream.close()
                    return
                self._more.clear()
                if not self._outbox and not self._closing:
                    await self._more.wait()
        except LinkError as error:
            self._end(str(error))

    async def _beat(self) -> None:
        number = 0
        while True:
            await asyncio.sleep(self.beat_interval)
            number += 1
            self._echo.clear()
            self.say(Beat(number))
            while self._echoed < number:
                try:
                    await asyncio.wait_for(self._echo.wait(), ECHO_LIMIT)
                except TimeoutError:
                    self.stale.set()
                    await self._echo.wait()
                self._echo.clear()
            self.stale.clear()


class Link:
    """Keeps one session with the master alive, whatever becomes of connections and masters.

    `deliver` gets Ordered, LinkBack and LinkLost; `hello` is asked for a fresh Hello before each
    attempt; `endpoint` may change between attempts (a standalone master on a new port);
    `waiting(reason)` is called once when no master is there at first, `broken(sentence)` when the
    link itself fails."""

    def __init__(
        self,
        endpoint: Callable[[], Endpoint],
        hello: Callable[[], Hello],
        deliver: Callable[[AgentEvent], None],
        waiting: Callable[[str], None] = lambda reason: None,
        broken: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._deliver = deliver
        self._session: _Session | None = None
        self._task: asyncio.Task[None] | None = None
        self._page = ""
        self._strange = 0
        self._nudge = asyncio.Event()
        self._waiting = waiting
        self._broken = broken
        self._tries = 0
        self.connected = asyncio.Event()
        """Set once a master has welcomed us, for good."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        tell_failure(self._task, self._broken, "the link to the master")

    def say(self, report: Report) -> None:
        """Send a report; dropped without a session, since LinkBack makes the brain tell it all."""
        if self._session is not None:
            self._session.say(report)

    def nudge(self) -> None:
        """Dial now instead of at the end of the back-off: the master is known to be up."""
        self._nudge.set()

    async def close(self, limit: float) -> None:
        """Deliver what was said, `limit` seconds at most, and end."""
        session, self._session = self._session, None
        if session is not None:
            await session.close(limit)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            session = await self._connect()
            if session is None:
                return
            self._take_up(session)
            reason = await self._hold()
            if self._session is None:  # close() has taken it
                return
            ended, self._session = self._session, None
            self._deliver(LinkLost(reason))
            await ended.drop()

    def _take_up(self, session: _Session) -> None:
        self.connected.set()
        self._session = session
        if session.welcome is not None:
            self._deliver(Ordered(session.welcome))
        self._deliver(LinkBack())
        session.carry(lambda order: self._deliver(Ordered(order)))

    async def _hold(self) -> str:
        """Until the session is gone for good; a stale one is replaced on the way."""
        while True:
            session = self._session
            if session is None:
                return "closed"
            stale = asyncio.ensure_future(session.stale.wait())
            waits: tuple[asyncio.Future[Any], ...] = (session.ended, stale)
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            stale.cancel()
            if session.ended.done():
                return session.ended.result()
            began = asyncio.get_running_loop().time()
            fresh = await self._attempt()
            if isinstance(fresh, _Session):
                if self._session is not session:
                    await fresh.drop()
                    return "closed"
                self._take_up(fresh)
                await session.drop()
            else:
                await asyncio.sleep(
                    max(0.0, began + ECHO_LIMIT - asyncio.get_running_loop().time())
                )

    async def _connect(self) -> _Session | None:
        """A welcomed session, however long it takes; None when there can never be one."""
        pause = BACKOFF_FIRST
        while True:
            self._nudge.clear()
            outcome = await self._attempt()
            if isinstance(outcome, _Session):
                return outcome
            if isinstance(outcome, Refused):
                self._deliver(Ordered(outcome))
                return None
            try:
                await asyncio.wait_for(self._nudge.wait(), pause * random.uniform(0.5, 1.0))
                pause = BACKOFF_FIRST
            except TimeoutError:
                pause = min(BACKOFF_MOST, 2 * pause)

    async def _attempt(self) -> _Session | Refused | None:
        endpoint = self._endpoint()
        session = _Session(endpoint)
        reason = "no answer"
        try:
            answer = await asyncio.wait_for(session.open(self._hello()), WELCOME_LIMIT)
            if isinstance(answer, Welcome):
                self._strange = 0
                if answer.status_url not in ("", self._page):
                    self._page = answer.status_url
                    logger.info("the job's page: %s", self._page)
                return session
            await session.drop()
            return answer
        except LinkError as error:
            reason = str(error)
            if error.rejected:
                await session.drop()
                return Refused(f"{endpoint}: {reason}", EXIT_FAILED)
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            await session.drop()
            raise
        await session.drop()
        if self.connected.is_set():
            return None
        self._tries += 1
        if self._tries == TELL_AFTER:
            self._waiting(reason)
        return await self._stranger(endpoint) if self._tries > TELL_AFTER else None

    async def _stranger(self, endpoint: Endpoint) -> Refused | None:
        """Whether the port belongs to somebody else, so that no patience will help."""
        answer = await probe(endpoint, WELCOME_LIMIT)
        if answer is Answer.FOREIGN:
            self._strange = STRANGER_AFTER
        elif answer is Answer.SILENT:
            self._strange += 1
        else:
            self._strange = 0
        if self._strange < STRANGER_AFTER:
            return None
        return Refused(
            f"{endpoint} is held by a process that does not answer as an elasticrun master; "
            "name another port",
            EXIT_FAILED,
        )
