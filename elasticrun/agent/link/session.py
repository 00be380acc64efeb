"""One stream to the master: the proof of the token, our hello, reports out and orders in, beats."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from typing import Final

from elasticrun.agent.link.trust import Trust
from elasticrun.agent.runtime import Once, Tasks
from elasticrun.wire import auth
from elasticrun.wire.messages import Beat, Echo, Hello, Order, Refused, Report, Welcome
from elasticrun.wire.rpc.channel import Attendance, LinkError, attend, open_channel
from elasticrun.wire.types import Endpoint, WireError

ECHO_LIMIT: Final = 1.0
"""Seconds after a beat without an echo at which a second connection is dialled; half of the beat
interval where that is longer. In a large job a master that was away for a moment must not find
thousands of new connections, each of which costs it more than the echo that was late."""

OUTBOX_MOST: Final = 1000
"""Reports that wait for a full transport; beyond it the stream is given up and state told anew."""

MOST_TOLD: Final = 32
"""Sentences of one session about reports that could not be sent."""


class Session:
    """One stream on one channel of its own, from the proof of the token to its end."""

    def __init__(self, endpoint: Endpoint, trust: Trust, pem: auth.Pem | None) -> None:
        self.endpoint = endpoint
        self._channel = open_channel(endpoint, tls=pem, name=trust.name)
        self._stream: Attendance = attend(self._channel)
        self._token = trust.token
        self._outbox: deque[Report] = deque()
        self._told = Once(MOST_TOLD)
        self._more = asyncio.Event()
        self._closing = False
        self._tasks = Tasks(self._end)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the stream is gone, with the reason."""
        self.stale = asyncio.Event()
        """Set while a beat has waited `echo_limit` for its echo."""
        self.welcome: Welcome | None = None
        self.beat_interval, self.echo_limit = 1.0, ECHO_LIMIT
        self._echo = asyncio.Event()
        self._echoed = 0
        self._patience = 0.0
        self._silent: Callable[[bool], None] = lambda silent: None

    async def open(self, hello: Hello) -> Welcome | Refused:
        """Prove the token, say hello and hear the answer. LinkError."""
        answer = await self._stream.enter(hello, self._token)
        if isinstance(answer, Welcome):
            self.welcome = answer
            self._pace(answer.beat_interval)
            return answer
        if isinstance(answer, Refused):
            return answer
        said = "nothing" if answer is None else type(answer).__name__
        raise LinkError(f"it answered our hello with {said}")

    def _pace(self, interval: float) -> None:
        """Beat this often from now on."""
        self.beat_interval = max(0.1, interval)
        self.echo_limit = max(ECHO_LIMIT, interval / 2)

    @property
    def proved(self) -> bool:
        """Whether what we heard came from the job's own master, as far as that can be known."""
        return self._stream.proved or not self._token

    def carry(
        self, heard: Callable[[Order], None], silent: Callable[[bool], None], patience: float
    ) -> None:
        """Begin to exchange reports and orders; to be called after a Welcome. `silent(True)` when
        nothing was heard for `patience` seconds, `silent(False)` when that is over."""
        self._silent, self._patience = silent, patience
        for body in (self._read(heard), self._write(), self._beat()):
            self._tasks.start(body, "the session with the master")

    def say(self, report: Report) -> None:
        if len(self._outbox) >= OUTBOX_MOST:
            self._end("the master takes no reports")
            return
        self._outbox.append(report)
        self._more.set()

    def offer(self, report: Report) -> bool:
        """Send a report that matters only while it is new, unless something waits to be sent;
        whether it was."""
        if self._outbox:
            return False
        self.say(report)
        return True

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
        self._tasks.close()
        await self._tasks.over()
        self._stream.cancel()
        await self._channel.close()

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    async def _read(self, heard: Callable[[Order], None]) -> None:
        try:
            while (order := await self._stream.receive()) is not None:
                if isinstance(order, Echo):
                    if order.beat_interval:
                        self._pace(order.beat_interval)
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
                    await self._send(self._outbox.popleft())
                if self._closing:
                    await self._stream.close()
                    return
                self._more.clear()
                if not self._outbox and not self._closing:
                    await self._more.wait()
        except LinkError as error:
            self._end(str(error))

    async def _send(self, report: Report) -> None:
        """LinkError. What cannot be encoded is a defect of ours, which a new session would meet
        again at once."""
        try:
            await self._stream.send(report)
        except WireError as error:
            self._told.tell(f"a report was not sent to the master: {error}", logging.ERROR)

    async def _beat(self) -> None:
        number = 0
        while True:
            # Jittered: nodes that attached in one moment would beat in one moment for ever.
            await asyncio.sleep(self.beat_interval * random.uniform(0.75, 1.25))
            number += 1
            self.say(Beat(number))
            limit = self.echo_limit
            if await self._echo_of(number, limit):
                continue
            self.stale.set()
            if not await self._echo_of(number, self._patience - self.beat_interval - limit):
                self._silent(True)
                await self._echo_of(number, None)
                self._silent(False)
            self.stale.clear()

    async def _echo_of(self, number: int, limit: float | None) -> bool:
        """Whether the answer to this beat comes within `limit` seconds."""
        try:
            async with asyncio.timeout(None if limit is None else max(0.0, limit)):
                while self._echoed < number:
                    self._echo.clear()
                    await self._echo.wait()
        except TimeoutError:
            return False
        return True
