"""The link to the master: connect, Hello, reports and orders, heartbeats, reconnect.

A broken stream is not an event of the job. The link reconnects with a short jittered backoff until
the agent ends or a master refuses it; `core.worker` decides how long the master may be unreachable.
If the master does not echo a heartbeat in time, the link opens a second connection beside the old
one: a new SYN does not wait for the old stream's retransmissions, whose intervals keep growing.
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
"""Seconds from connecting to the answer to our Hello; then a new attempt starts."""

BACKOFF_FIRST: Final = 0.05
BACKOFF_MOST: Final = 1.0
"""Seconds between attempts, doubled each time and jittered. An agent reconnects within a second of
a master's return, and ten thousand agents do not connect at the same instant."""

LOG_AFTER: Final = 4
"""Failed attempts at first contact after which the agent logs that no master answers."""

FOREIGN_AFTER: Final = 3
"""Consecutive probes that found a silent or closing peer, after which the agent ends. A peer that
speaks another protocol ends it at once. Applies only before the first Welcome."""


class FailedDial(NamedTuple):
    """A failed attempt: the reason, and the exit code if retrying cannot help."""

    reason: str
    code: int | None = None


class LinkOwner(Protocol):
    """What a link needs from its owner."""

    @property
    def dial(self) -> Endpoint:
        """The master's address; it may change between attempts (a standalone master on a new
        port)."""

    def hello(self) -> Hello:
        """Return a new Hello; called for each attempt."""

    def linked(self, event: AgentEvent) -> None:
        """Receives Ordered, LinkBack or LinkLost."""

    def no_master(self, reason: str) -> None:
        """Called once, when LOG_AFTER attempts at first contact have failed."""

    def fatal(self, sentence: str) -> None:
        """Called when the link itself has failed."""


class Link:
    """Keeps one session with the master open across broken connections and restarted masters. A
    stream counts as lost after `patience` seconds without a message."""

    def __init__(
        self,
        owner: LinkOwner,
        trust: Trust = NO_TRUST,
        patience: float = HEARTBEAT_TIMEOUT,
        page_level: int = logging.INFO,
    ) -> None:
        """`page_level`: the log level for the address of the job's page."""
        self._owner = owner
        self._page_level = page_level
        self._patience = patience
        self._trust = trust
        self._warned = ""
        self._session: Session | None = None
        self._tasks = Tasks(owner.fatal)
        self._page = (0, "")
        self._foreign_answers = 0
        self._nudge = asyncio.Event()
        self._moved = asyncio.Event()
        self._dialled: Endpoint | None = None
        self._tries = 0
        self._goodbye: Leaving | None = None  # a Leaving that no session could send
        self._started = False
        self._may_be_known = False  # a Hello is pending or accepted: a master may know this node
        self.connected = asyncio.Event()
        """Set when a master first accepts this node; never cleared."""

    def start(self) -> bool:
        """Start connecting, once; returns whether this call started it."""
        began, self._started = self._started, True
        if not began:
            self._tasks.start(self._run(), "the link to the master")
        return not began

    def send(self, report: Report) -> None:
        """Send a report. Without a session it is dropped, because LinkBack makes the state machine
        resend everything. Only Leaving is kept: the state machine may have ended by then."""
        if self._session is not None:
            self._session.send(report)
        elif isinstance(report, Leaving):
            self._goodbye = report

    def offer(self, report: Report) -> bool:
        """Send a report that is only useful while it is fresh; returns False, without sending it,
        if it would have to wait."""
        return self._session is not None and self._session.offer(report)

    @property
    def dialled(self) -> Endpoint | None:
        """The address of the master dialled last."""
        return self._dialled

    @property
    def beat_interval(self) -> float:
        """Seconds between heartbeats, as the master requested; 0.0 without a session."""
        return self._session.beat_interval if self._session is not None else 0.0

    def nudge(self) -> None:
        """Connect now, without waiting for the backoff: a master is known to be up. If its address
        differs from the current one, the current attempt or session is replaced."""
        self._nudge.set()
        if self._dialled is not None and self._dialled != self._owner.dial:
            self._moved.set()

    async def close(self, limit: float) -> None:
        """Send what is queued and stop. Takes up to `limit` seconds to send, and before that up to
        `limit` seconds to connect if a Leaving could not be sent yet."""
        if self._goodbye is not None and self._may_be_known:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.connected.wait(), limit)
        session, self._session = self._session, None
        if session is not None:
            await session.close(limit)
        self._tasks.close()
        await self._tasks.wait()

    async def _run(self) -> None:
        loop, pause = asyncio.get_running_loop(), BACKOFF_FIRST
        while True:
            session = await self._connect()
            if session is None:
                return
            began = loop.time()
            self._use_session(session)
            reason = await self._keep_session()
            if self._session is None:  # close() has taken it
                return
            ended, self._session = self._session, None
            self._owner.linked(LinkLost(reason))
            await ended.drop()
            # a session that keeps breaking just after its Welcome also gets a backoff
            lasted = loop.time() - began >= BACKOFF_MOST
            pause = BACKOFF_FIRST if lasted else await self._back_off(pause)

    def _use_session(self, session: Session) -> None:
        self.connected.set()
        self._session = session
        if session.welcome is not None:
            self._owner.linked(Ordered(session.welcome))
        self._owner.linked(LinkBack())
        if self._goodbye is not None:
            session.send(self._goodbye)
        session.exchange(
            lambda order: self._owner.linked(Ordered(order)),
            lambda silent: self._report_silence(session, silent),
            self._patience,
        )

    def _report_silence(self, session: Session, silent: bool) -> None:
        """Report that the master has fallen silent, or that it answers again.

        TCP reports a pulled cable only after about 15 minutes. The master's fence relies on the
        agent noticing the loss as early as the master does, and waiting for a master from then on
        (`core.rounds`)."""
        if session is not self._session:
            return
        if silent:
            self._owner.linked(LinkLost(f"it sent nothing for {self._patience:g} s"))
            return
        if session.welcome is not None:  # without a Welcome the state machine sees no master
            self._owner.linked(Ordered(session.welcome))
        self._owner.linked(LinkBack())

    async def _keep_session(self) -> str:
        """Wait until the session has ended for good and return the reason. Replaces a session that
        is stale or whose master has moved."""
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
                self._use_session(fresh)
                await session.drop()
            else:
                self._nudge.clear()
                rest = began + session.echo_limit - asyncio.get_running_loop().time()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._nudge.wait(), max(0.0, rest))

    async def _connect(self) -> Session | None:
        """Return a session that the master accepted, however long that takes; None after a final
        refusal, which the owner receives."""
        pause = BACKOFF_FIRST
        while True:
            self._nudge.clear()
            outcome = await self._attempt()
            if isinstance(outcome, Session):
                return outcome
            if isinstance(outcome, Refused):
                self._owner.linked(Ordered(outcome))
                return None
            pause = await self._back_off(pause)

    async def _back_off(self, pause: float) -> float:
        """Wait for the backoff or a nudge; returns the next backoff."""
        try:
            await asyncio.wait_for(self._nudge.wait(), pause * random.uniform(0.5, 1.0))
        except TimeoutError:
            return min(BACKOFF_MOST, 2 * pause)
        return BACKOFF_FIRST

    async def _attempt(self) -> Session | Refused | None:
        """Connect once: an accepted session, a final refusal, or None to try again."""
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
        if self._tries < LOG_AFTER:
            return None
        final = await self._check_foreign(endpoint)
        if final is None and self._tries == LOG_AFTER:
            self._owner.no_master(reason)
        return final

    async def _dial(self, endpoint: Endpoint) -> Session | Refused | FailedDial:
        """Connect once: an accepted session, the refusal of the job's own master, or why the
        attempt failed."""
        session: Session | None = None
        kept = False
        try:
            session = Session(endpoint, self._trust, await self._pem())
            self._may_be_known = True
            answer = await self._answer(session)
            if isinstance(answer, Welcome):
                kept = True
                self._welcomed(answer)
                return session
            return answer if session.is_proved else FailedDial(answer.reason, answer.exit_code)
        except Unproved as error:
            return FailedDial(str(error), code_of(Ending.REFUSED))
        except LinkError as error:
            return FailedDial(str(error), EXIT_FAILED if error.rejected else None)
        except auth.TlsError as error:
            return FailedDial(str(error))
        except TimeoutError:
            return FailedDial("no answer")
        finally:
            self._may_be_known = kept
            if session is not None and not kept:
                await session.drop()

    async def _answer(self, session: Session) -> Welcome | Refused:
        """The answer to our Hello. Raises LinkError, also if the master has moved, and
        TimeoutError."""
        opening, moved = await first_of(
            session.open(self._owner.hello()), self._moved.wait(), limit=WELCOME_LIMIT
        )
        if opening is not None:
            return opening.result()  # type: ignore[no-any-return]
        if moved is not None:
            raise LinkError("the master has moved")
        raise TimeoutError

    async def _pem(self) -> auth.Pem | None:
        """Read our TLS files anew; None without TLS. Raises TlsError and TimeoutError."""
        files = self._trust.files
        if files is None:
            return None
        return await in_thread(lambda: auth.read_pem(files), limit=WELCOME_LIMIT, name="tls")

    def _welcomed(self, welcome: Welcome) -> None:
        self._foreign_answers = 0
        self._warned = ""
        page = (welcome.term, welcome.status_url.partition("?")[0])  # each Welcome has a new key
        if welcome.status_url and page != self._page:
            self._page = page
            logger.log(self._page_level, "the job's page: %s", welcome.status_url)

    def _warn(self, reason: str) -> None:
        """Log a refusal, once per change of its text. A running job does not end because another
        process has taken its master's port."""
        if reason != self._warned:
            self._warned = reason
            logger.warning("%s; the ranks keep running, and this node keeps reconnecting", reason)

    async def _check_foreign(self, endpoint: Endpoint) -> Refused | None:
        """A refusal if retrying cannot help: another program owns the port, or the TLS settings do
        not match."""
        files, name = self._trust.files, self._trust.name
        answer, why = await probe(endpoint, WELCOME_LIMIT, files, name)
        if answer is PortAnswer.INSECURE:
            return Refused(f"{endpoint}: {why}", code_of(Ending.REFUSED))
        if answer is PortAnswer.FOREIGN:
            self._foreign_answers = FOREIGN_AFTER
        elif answer in (PortAnswer.SILENT, PortAnswer.CLOSED):
            self._foreign_answers += 1
        else:
            self._foreign_answers = 0
        if self._foreign_answers < FOREIGN_AFTER:
            return None
        return Refused(
            f"{endpoint} is in use by a process that is not an elasticrun master; use another port",
            EXIT_FAILED,
        )
