"""One stream to the master: token proof, Hello, reports out, orders in, heartbeats."""

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
"""Seconds without an echo of a heartbeat until the link opens a second connection; half of the
heartbeat interval if that is longer. In a large job, a master that was briefly away must not get
thousands of new connections, which cost it more than late echoes cost the agents."""

OUTBOX_MOST: Final = 1000
"""Maximum number of queued reports; beyond it the stream ends, and a new one resends all state."""

MAX_LOGGED: Final = 32
"""Maximum number of log lines per session about reports that could not be sent."""


class Session:
    """One stream on its own channel, from the token proof to its end."""

    def __init__(self, endpoint: Endpoint, trust: Trust, pem: auth.Pem | None) -> None:
        self.endpoint = endpoint
        self._channel = open_channel(endpoint, tls=pem, name=trust.name)
        self._stream: Attendance = attend(self._channel)
        self._token = trust.token
        self._outbox: deque[Report] = deque()
        self._once = Once(MAX_LOGGED)
        self._more = asyncio.Event()
        self._closing = False
        self._tasks = Tasks(self._finish)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the stream has ended, with the reason."""
        self.stale = asyncio.Event()
        """Set while a heartbeat has waited `echo_limit` seconds for its echo."""
        self.welcome: Welcome | None = None
        self.beat_interval, self.echo_limit = 1.0, ECHO_LIMIT
        self._echo = asyncio.Event()
        self._echoed = 0
        self._patience = 0.0
        self._on_silence: Callable[[bool], None] = lambda silent: None

    async def open(self, hello: Hello) -> Welcome | Refused:
        """Prove the token, send Hello and return the answer. Raises LinkError."""
        answer = await self._stream.enter(hello, self._token)
        if isinstance(answer, Welcome):
            self.welcome = answer
            self._pace(answer.beat_interval)
            return answer
        if isinstance(answer, Refused):
            return answer
        what = "nothing" if answer is None else type(answer).__name__
        raise LinkError(f"it answered our hello with {what}")

    def _pace(self, interval: float) -> None:
        """Set the heartbeat interval, at least 0.1 s, and the echo limit that follows from it."""
        self.beat_interval = max(0.1, interval)
        self.echo_limit = max(ECHO_LIMIT, interval / 2)

    @property
    def is_proved(self) -> bool:
        """Whether the peer has proved to be the job's own master. True without a token: then
        nothing can be proved."""
        return self._stream.proved or not self._token

    def exchange(
        self, on_order: Callable[[Order], None], on_silence: Callable[[bool], None], patience: float
    ) -> None:
        """Start exchanging reports and orders; call after a Welcome. Calls `on_silence(True)` when
        no echo has arrived for about `patience` seconds, and `on_silence(False)` when one arrives
        again."""
        self._on_silence, self._patience = on_silence, patience
        for body in (self._read(on_order), self._write(), self._beat()):
            self._tasks.start(body, "the session with the master")

    def send(self, report: Report) -> None:
        if len(self._outbox) >= OUTBOX_MOST:
            self._finish("the master accepts no reports")
            return
        self._outbox.append(report)
        self._more.set()

    def offer(self, report: Report) -> bool:
        """Send a report that is only useful while fresh, unless others are queued; returns whether
        it was sent."""
        if self._outbox:
            return False
        self.send(report)
        return True

    async def close(self, limit: float) -> None:
        """Send what is queued and close the stream, in `limit` seconds at most; then drop the
        connection."""
        if self._tasks and not self.ended.done():
            self._closing = True
            self._more.set()
            await asyncio.wait({self.ended}, timeout=limit)
        await self.drop()

    async def drop(self) -> None:
        """Cut the connection, whatever its state."""
        self._finish("closed")
        self._tasks.close()
        await self._tasks.wait()
        self._stream.cancel()
        await self._channel.close()

    def _finish(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    async def _read(self, on_order: Callable[[Order], None]) -> None:
        try:
            while (order := await self._stream.receive()) is not None:
                if isinstance(order, Echo):
                    if order.beat_interval:
                        self._pace(order.beat_interval)
                    self._echoed = order.number
                    self._echo.set()
                else:
                    on_order(order)
            self._finish("the master closed the stream")
        except LinkError as error:
            self._finish(str(error))

    async def _write(self) -> None:
        try:
            while True:
                while self._outbox:
                    await self._write_one(self._outbox.popleft())
                if self._closing:
                    await self._stream.close()
                    return
                self._more.clear()
                if not self._outbox and not self._closing:
                    await self._more.wait()
        except LinkError as error:
            self._finish(str(error))

    async def _write_one(self, report: Report) -> None:
        """Send one report. Raises LinkError. A report that cannot be encoded is a bug of ours,
        which a new session would only repeat, so it is logged and dropped."""
        try:
            await self._stream.send(report)
        except WireError as error:
            self._once.log(f"a report was not sent to the master: {error}", logging.ERROR)

    async def _beat(self) -> None:
        number = 0
        while True:
            # Jittered: otherwise nodes that connect at the same moment would always beat together.
            await asyncio.sleep(self.beat_interval * random.uniform(0.75, 1.25))
            number += 1
            self.send(Beat(number))
            limit = self.echo_limit
            if await self._wait_for_echo(number, limit):
                continue
            self.stale.set()
            if not await self._wait_for_echo(number, self._patience - self.beat_interval - limit):
                self._on_silence(True)
                await self._wait_for_echo(number, None)
                self._on_silence(False)
            self.stale.clear()

    async def _wait_for_echo(self, number: int, limit: float | None) -> bool:
        """Wait for the echo of this heartbeat, `limit` seconds at most (None: no limit); returns
        whether it has arrived."""
        try:
            async with asyncio.timeout(None if limit is None else max(0.0, limit)):
                while self._echoed < number:
                    self._echo.clear()
                    await self._echo.wait()
        except TimeoutError:
            return False
        return True
