"""The session with the master: dial, say hello, carry reports and orders, beat, dial again.

A stream that breaks is no event of the job: the link dials again, with a short jittered back-off,
for as long as the agent lives, and the brain decides how long a silence may last. Where the master
does not echo a beat within a second, a fresh connection is dialled beside the old one: a new SYN
does not wait for the old stream's retransmissions, which come at ever longer intervals.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from typing import Final, NamedTuple, Protocol

from elasticrun.agent.link.answering import PortAnswer, probe
from elasticrun.agent.link.session import Session
from elasticrun.agent.link.trust import NO_TRUST, Trust
from elasticrun.agent.runtime import Tasks, first_of, in_thread
from elasticrun.config import EXIT_FAILED, HEARTBEAT_TIMEOUT
from elasticrun.core.events import AgentEvent, LinkBack, LinkLost, Ordered
from elasticrun.core.rounds.failures import Ending, code_of
from elasticrun.host.log import logger
from elasticrun.wire import auth
from elasticrun.wire.messages import Hello, Leaving, Refused, Report, Welcome
from elasticrun.wire.rpc.channel import LinkError, Unproved
from elasticrun.wire.types import Endpoint

WELCOME_LIMIT: Final = 5.0
"""Seconds from dialling to the answer to our Hello; then the attempt is given up for a new one."""

BACKOFF_FIRST: Final = 0.05
BACKOFF_MOST: Final = 1.0
"""Seconds between attempts, doubled each time and jittered; an agent is back within a second of a
master's return, and ten thousand agents do not come in one instant."""

TELL_AFTER: Final = 4
"""Attempts at first contact before the operator is told that no master answers."""

STRANGER_AFTER: Final = 3
"""That many probes in a row of a port that was never a master's, WELCOME_LIMIT apart, must find
somebody there who does not speak our protocol before we end with a sentence."""


class FailedDial(NamedTuple):
    """An attempt that came to nothing: why, and the exit code where no other can come to more."""

    reason: str
    code: int | None = None


class LinkOwner(Protocol):
    """Whose link it is."""

    @property
    def dial(self) -> Endpoint:
        """Where the master is; it may change between attempts (a standalone one on a new port)."""

    def hello(self) -> Hello:
        """A fresh one, before each attempt."""

    def linked(self, event: AgentEvent) -> None:
        """Ordered, LinkBack or LinkLost."""

    def no_master(self, reason: str) -> None:
        """None is there at first; once."""

    def fatal(self, sentence: str) -> None:
        """The link itself has failed."""


class Link:
    """Keeps one session with the master alive, whatever becomes of connections and masters. After
    `patience` seconds without a word a stream counts as lost."""

    def __init__(
        self,
        owner: LinkOwner,
        trust: Trust = NO_TRUST,
        patience: float = HEARTBEAT_TIMEOUT,
        page_level: int = logging.INFO,
    ) -> None:
        """`page_level`: at which the address of the job's page is told."""
        self._owner = owner
        self._page_level = page_level
        self._patience = patience
        self._trust = trust
        self._warned = ""
        self._session: Session | None = None
        self._tasks = Tasks(owner.fatal)
        self._page = (0, "")
        self._strange = 0
        self._nudge = asyncio.Event()
        self._moved = asyncio.Event()
        self._dialled: Endpoint | None = None
        self._tries = 0
        self._goodbye: Leaving | None = None  # that no session could carry
        self._started = False
        self._greets = False  # a hello is on its way, by which a master may know us already
        self.connected = asyncio.Event()
        """Set once a master has welcomed us, for good."""

    def start(self) -> bool:
        """Begin to dial, once; whether it is now."""
        began, self._started = self._started, True
        if not began:
            self._tasks.start(self._run(), "the link to the master")
        return not began

    def say(self, report: Report) -> None:
        """Send a report; dropped without a session, since LinkBack makes the brain tell it all. But
        for that it leaves: by then it may be over."""
        if self._session is not None:
            self._session.say(report)
        elif isinstance(report, Leaving):
            self._goodbye = report

    def offer(self, report: Report) -> bool:
        """Send a report that matters only while it is new; whether it was sent."""
        return self._session is not None and self._session.offer(report)

    @property
    def dialled(self) -> Endpoint | None:
        """The master that was dialled last."""
        return self._dialled

    @property
    def beat_interval(self) -> float:
        """Seconds between two beats, as the master has asked for; 0.0 without a session."""
        return self._session.beat_interval if self._session is not None else 0.0

    def nudge(self) -> None:
        """Dial now instead of at the end of the back-off: a master is known to be up. Where that is
        another than the one we dial or talk to, it is given up for this one."""
        self._nudge.set()
        if self._dialled is not None and self._dialled != self._owner.dial:
            self._moved.set()

    async def close(self, limit: float) -> None:
        """Deliver what was said, `limit` seconds at most, and end."""
        if self._goodbye is not None and self._greets:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.connected.wait(), limit)
        session, self._session = self._session, None
        if session is not None:
            await session.close(limit)
        self._tasks.close()
        await self._tasks.over()

    async def _run(self) -> None:
        loop, pause = asyncio.get_running_loop(), BACKOFF_FIRST
        while True:
            session = await self._connect()
            if session is None:
                return
            began = loop.time()
            self._take_up(session)
            reason = await self._hold()
            if self._session is None:  # close() has taken it
                return
            ended, self._session = self._session, None
            self._owner.linked(LinkLost(reason))
            await ended.drop()
            # one that ends again and again just after its welcome is not dialled without a rest
            lasted = loop.time() - began >= BACKOFF_MOST
            pause = BACKOFF_FIRST if lasted else await self._rest(pause)

    def _take_up(self, session: Session) -> None:
        self.connected.set()
        self._session = session
        if session.welcome is not None:
            self._owner.linked(Ordered(session.welcome))
        self._owner.linked(LinkBack())
        if self._goodbye is not None:
            session.say(self._goodbye)
        session.carry(
            lambda order: self._owner.linked(Ordered(order)),
            lambda silent: self._silent(session, silent),
            self._patience,
        )

    def _silent(self, session: Session, silent: bool) -> None:
        """Of a pulled cable no kernel tells for a quarter of an hour. The master's fence counts on
        it that we notice, and start to wait for a master, as soon as it does (`core.rounds`)."""
        if session is not self._session:
            return
        if silent:
            self._owner.linked(LinkLost(f"nothing was heard from it for {self._patience:g} s"))
            return
        if session.welcome is not None:  # only that says to the brain that a master is there
            self._owner.linked(Ordered(session.welcome))
        self._owner.linked(LinkBack())

    async def _hold(self) -> str:
        """Until the session is gone for good; a stale one is replaced on the way."""
        while True:
            session = self._session
            if session is None:
                return "closed"
            if session.endpoint == self._owner.dial:
                ended = asyncio.shield(session.ended)
                await first_of(ended, session.stale.wait(), self._moved.wait())
            if session.ended.done():
                return session.ended.result()
            began = asyncio.get_running_loop().time()
            fresh = await self._attempt()
            if isinstance(fresh, Session):
                if self._session is not session:
                    await fresh.drop()
                    return "closed"
                self._take_up(fresh)
                await session.drop()
            else:
                self._nudge.clear()
                rest = began + session.echo_limit - asyncio.get_running_loop().time()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._nudge.wait(), max(0.0, rest))

    async def _connect(self) -> Session | None:
        """A welcomed session, however long it takes; None when there can never be one."""
        pause = BACKOFF_FIRST
        while True:
            self._nudge.clear()
            outcome = await self._attempt()
            if isinstance(outcome, Session):
                return outcome
            if isinstance(outcome, Refused):
                self._owner.linked(Ordered(outcome))
                return None
            pause = await self._rest(pause)

    async def _rest(self, pause: float) -> float:
        """So long, or until a nudge; what the next pause is."""
        try:
            await asyncio.wait_for(self._nudge.wait(), pause * random.uniform(0.5, 1.0))
        except TimeoutError:
            return min(BACKOFF_MOST, 2 * pause)
        return BACKOFF_FIRST

    async def _attempt(self) -> Session | Refused | None:
        """Dial once: a welcomed session, the end of all dialling, or None to dial again."""
        endpoint = self._dialled = self._owner.dial
        self._moved.clear()
        outcome = await self._dial(endpoint)
        if not isinstance(outcome, FailedDial):
            return outcome
        reason, code = outcome
        final = None if code is None else Refused(f"{endpoint}: {reason}", code)
        if self.connected.is_set():
            if final is not None:
                self._warn(final.reason)
            return None
        if final is not None:
            return final
        self._tries += 1
        if self._tries < TELL_AFTER:
            return None
        final = await self._stranger(endpoint)
        if final is None and self._tries == TELL_AFTER:
            self._owner.no_master(reason)
        return final

    async def _dial(self, endpoint: Endpoint) -> Session | Refused | FailedDial:
        """A welcomed session, or what the job's own master says in its place."""
        session: Session | None = None
        kept = False
        try:
            session = Session(endpoint, self._trust, await self._pem())
            self._greets = True
            answer = await self._answer(session)
            if isinstance(answer, Welcome):
                kept = True
                self._welcomed(answer)
                return session
            return answer if session.proved else FailedDial(answer.reason, answer.exit_code)
        except Unproved as error:
            return FailedDial(str(error), code_of(Ending.REFUSED))
        except LinkError as error:
            return FailedDial(str(error), EXIT_FAILED if error.rejected else None)
        except auth.TlsError as error:
            return FailedDial(str(error))
        except TimeoutError:
            return FailedDial("no answer")
        finally:
            self._greets = kept
            if session is not None and not kept:
                await session.drop()

    async def _answer(self, session: Session) -> Welcome | Refused:
        """The answer to our hello. LinkError, also when the master is known to be elsewhere."""
        opening, moved = await first_of(
            session.open(self._owner.hello()), self._moved.wait(), limit=WELCOME_LIMIT
        )
        if opening is not None:
            return opening.result()  # type: ignore[no-any-return]
        if moved is not None:
            raise LinkError("the master is elsewhere now")
        raise TimeoutError

    async def _pem(self) -> auth.Pem | None:
        """Our certificates as they stand now. TlsError, TimeoutError."""
        files = self._trust.files
        if files is None:
            return None
        return await in_thread(lambda: auth.read_pem(files), limit=WELCOME_LIMIT, name="tls")

    def _welcomed(self, welcome: Welcome) -> None:
        self._strange = 0
        self._warned = ""
        page = (welcome.term, welcome.status_url.partition("?")[0])  # each welcome has a new key
        if welcome.status_url and page != self._page:
            self._page = page
            logger.log(self._page_level, "the job's page: %s", welcome.status_url)

    def _warn(self, reason: str) -> None:
        """A running job is not ended by whoever has taken its master's port meanwhile; told once
        per change of the sentence."""
        if reason != self._warned:
            self._warned = reason
            logger.warning("%s; the ranks go on, and this node dials on", reason)

    async def _stranger(self, endpoint: Endpoint) -> Refused | None:
        """Whether the port belongs to somebody else, so that no patience will help."""
        files, name = self._trust.files, self._trust.name
        answer, why = await probe(endpoint, WELCOME_LIMIT, files, name)
        if answer is PortAnswer.INSECURE:
            return Refused(f"{endpoint}: {why}", code_of(Ending.REFUSED))
        if answer is PortAnswer.FOREIGN:
            self._strange = STRANGER_AFTER
        elif answer in (PortAnswer.SILENT, PortAnswer.CLOSED):
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
