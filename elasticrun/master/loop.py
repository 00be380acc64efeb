"""The master's event loop: one queue of events, one state machine, its effects.

This module also has the mailboxes for outgoing orders, and the counters for status and metrics.

A turn drains the inbox before the state machine judges silence: while a report is unread here, its
sender is not silent. A turn that starts more than OVERSLEPT seconds after its deadline first sends
`Overslept` to the state machine, because silence counts only while this loop was running.

The loop sleeps until an event arrives or the state machine's next deadline; there is no other
timer.

Effects after a `Record` wait, in order, until its facts are durable (decision 012); meanwhile
events are still processed and heartbeats echoed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from elasticrun.config import BEAT_INTERVAL
from elasticrun.core import events
from elasticrun.core.job.job import Job
from elasticrun.core.nodes.membership import beat_interval
from elasticrun.core.sight.curves import Curves
from elasticrun.core.sight.hangs.waiting import Klass
from elasticrun.core.sight.picture import CAUSES, Goodput, IncidentRow, Picture, VerdictRow
from elasticrun.host.log import LEVELS, logger
from elasticrun.master.page.readers import Readers
from elasticrun.master.store import FactStore
from elasticrun.master.trace.writer import TraceWriter
from elasticrun.wire import messages as m
from elasticrun.wire.rpc import protobuf
from elasticrun.wire.types import RoundName, WireError

OVERSLEPT: Final = 0.2
"""A turn that starts this many seconds after its deadline counts as overslept: the silence of a
node until then proves nothing."""

MAX_BATCH: Final = 1024
"""Maximum number of events per turn, before the tasks that write orders run."""

MAX_FAULTS: Final = 3
"""Number of exceptions of the state machine at which the master exits, so that its successor starts
from the record or the agents."""

CACHE_FACTOR: Final = 20
"""A cached status or picture is kept for this multiple of the time that building it took."""

MAX_WAITING: Final = 500_000
"""Maximum number of effects that wait for durable facts: several for each of MAX_SESSIONS nodes."""

SLOW_RECORD: Final = 1.0
"""Seconds after which the status says that orders wait for the record."""

MAX_ORDERS: Final = 32_768
"""Maximum number of orders queued for one agent; most are answers about shards that its ranks
request. One more closes the stream; the agent reconnects and asks again."""

MAX_REQUESTS: Final = 64
"""Maximum number of pending requests of readers and operators."""

REQUEST_LIMIT: Final = 15.0
"""Seconds that a request may wait for its reply; sampling all ranks takes several."""

T = TypeVar("T")


class StateMachineFault(RuntimeError):
    """The state machine raised MAX_FAULTS times; its state is no longer trusted."""


class RecordStuck(RuntimeError):
    """MAX_WAITING effects wait for facts that do not become durable."""


@dataclass(slots=True, eq=False)
class _Fence:
    """A queue entry for facts being written; the effects behind it wait until they are durable.
    `since`: when the write was requested."""

    since: float
    durable: bool = False


class _Cached(Generic[T]):
    """A cache that keeps a value for CACHE_FACTOR times the time that building it took."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._made: T | None = None
        self._until = 0.0

    def get(self, make: Callable[[], T]) -> T:
        """The cached value, or a new one."""
        began = self._clock()
        if self._made is None or began >= self._until:
            self._made = make()
            now = self._clock()
            self._until = now + CACHE_FACTOR * (now - began)
        return self._made


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Callbacks of the loop. They run in the loop and must not block."""

    on_over: Callable[[events.JobOver, Picture], object] = lambda *_: None
    """Called with the job's outcome and its last picture."""
    on_noted: Callable[[events.Note], object] = lambda _: None
    """Called for each note."""
    on_formed: Callable[[], object] = lambda: None
    """Called once, before this master sends its first Start."""
    on_metrics: Callable[[m.Metrics], object] = lambda _: None
    """Called with metrics that rank 0 of the current round reports."""
    on_stepped: Callable[[int, int], object] = lambda *_: None
    """Called with a round's number and the newest step it has reached."""
    on_filed: Callable[[IncidentRow], object] = lambda _: None
    """Called with an incident each time it changes."""
    on_judged: Callable[[VerdictRow, bool], object] = lambda *_: None
    """Called with each verdict on a hang and False, and again with True when the hang is over."""
    on_slow: Callable[[events.FoundSlow], object] = lambda _: None
    """Called for each node that is found slow but stays in the job."""


class Loop:
    """Feeds events to the state machine in the order of `put`, and carries out its effects."""

    def __init__(
        self,
        job: Job,
        *,
        job_id: str = "",
        clock: Callable[[], float] = time.monotonic,
        store: FactStore | None = None,
        tracer: TraceWriter | None = None,
        listeners: Listeners = Listeners(),
        readers: Readers | None = None,
    ) -> None:
        self._job = job
        self._job_id = job_id
        self.name = ""
        """The job's name for people; "": it has only its id."""
        self._listeners = listeners
        self.figures = Figures(clock)
        self._clock = clock
        self._inbox: deque[events.JobEvent] = deque()
        self._wake = asyncio.Event()
        self._boxes: dict[int, Mailbox] = {}
        self._store = store
        self._tracer = tracer
        self._held: deque[events.JobEffect | _Fence] = deque()  # starts with a fence, or is empty
        self._faults = 0
        self._paced = False  # whether many streams have ever slowed down the heartbeats
        self._status = _Cached[m.JobStatus](clock)
        self._picture = _Cached[Picture](clock)
        self._requests: dict[int, asyncio.Future[m.Reply]] = {}
        self._request_numbers = itertools.count(1)
        self.readers = Readers() if readers is None else readers
        """Creates the link to the job's page that each Welcome carries."""
        self.sources: Mapping[str, str] = {}
        """For each setting, where its value came from, for people."""

    # ------------------------------------------------------------ called by handlers

    def attach(self, event: events.Attached, box: Mailbox) -> None:
        """Add a stream that has sent Hello; its orders go to `box` from now on."""
        self._boxes[event.session] = box
        if self._store is not None:
            self._store.term_seen(event.hello.last_term)
        self.put(event)

    def put(self, event: events.JobEvent) -> None:
        """Queue an event. The queue is unbounded: `server` limits the rate of each stream."""
        self._inbox.append(event)
        self._wake.set()

    def status(self) -> m.JobStatus:
        """The status of the job, cached so that building it takes at most 1/CACHE_FACTOR of the
        loop's time."""
        status, why = self._status.get(self._status_now), self._delay_reason()
        return replace(status, reason=why) if why else status

    def picture(self) -> Picture:
        """All that is known of the job; cached like `status`."""
        made = self._picture.get(self._job.picture)
        by = self.sources.get
        rows = tuple(replace(row, source=by(row.name, row.source)) for row in made.settings)
        training = self.figures.curves.row(self._clock())
        return replace(made, status=self.status(), settings=rows, training=training)

    def last_picture(self) -> Picture:
        """Like `picture`, but not cached and without the sources of the settings."""
        return replace(self._job.picture(), status=self._status_now())

    def goodput(self) -> Goodput | None:
        """Where the time of all slots was spent; None before the first round."""
        return self._job.goodput()

    async def request(self, request: m.Request) -> m.Reply:
        """Send a request to the state machine; returns its reply. Refused if MAX_REQUESTS are
        pending, or if there is no reply within REQUEST_LIMIT."""
        if len(self._requests) >= MAX_REQUESTS:
            return m.Reply(False, f"{MAX_REQUESTS} requests are pending already: try again")
        number = next(self._request_numbers)
        self._requests[number] = waits = asyncio.Future[m.Reply]()
        self.put(events.Requested(number, request))
        try:
            async with asyncio.timeout(REQUEST_LIMIT):
                reply: m.Reply = await waits
        except TimeoutError:
            why = self._delay_reason() or "it is too busy"
            return m.Reply(False, f"the master did not answer within {REQUEST_LIMIT:g} s: {why}")
        finally:
            del self._requests[number]
        return replace(reply, body=self._complete_picture(reply.body)) if reply.body else reply

    def _complete_picture(self, body: str) -> str:
        """Replace the status and the settings in a picture's JSON by those of `picture`, which
        include what the state machine does not know."""
        parts = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        shown = self.picture()
        parts["status"] = msgspec.Raw(msgspec.json.encode(shown.status))
        parts["settings"] = msgspec.Raw(msgspec.json.encode(shown.settings))
        return msgspec.json.encode(parts).decode()

    def slow_nodes(self) -> int:
        """Number of nodes that are considered slow and not excluded."""
        return self._job.slow_nodes()

    def quiet(self) -> float:
        """Seconds since any rank made progress in a collective or a step."""
        return self._job.quiet()

    def stop_sending(self) -> None:
        """Another master decides: drop all queued orders and effects, and refuse the pending
        requests."""
        for number in self._requests:
            self._reply(number, m.Reply(False, "another master leads this job now: try again"))
        self._held.clear()
        self._boxes.clear()

    def _delay_reason(self) -> str:
        """Why orders are delayed, once that has lasted SLOW_RECORD seconds; else ""."""
        first = self._held[0] if self._held else None
        if not isinstance(first, _Fence):  # none, or effects are being carried out now
            return ""
        waited = self._clock() - first.since
        if waited < SLOW_RECORD:
            return ""
        return f"orders wait for the job's record, which has not been written for {waited:.0f} s"

    def _status_now(self) -> m.JobStatus:
        status = self._job.status()
        # Without a spec the state machine learns the job id from the first Hello.
        job_id = status.job_id or self._job_id
        return self.figures.shown(replace(status, job_id=job_id, name=self.name))

    # ------------------------------------------------------------ turns

    async def run(self) -> None:
        """Process events until cancelled. Raises StateMachineFault if the state machine keeps
        failing, RecordStuck if too many effects wait for the record."""
        deadline = self._job.next_deadline()
        if deadline is not None and deadline <= (now := self._clock()):
            self._step(events.Tick(), now)  # due from the start (loaded facts): not overslept
        while True:
            self._turn()
            if self._inbox:
                await asyncio.sleep(0)  # let writers and handlers run
            else:
                await self._sleep()

    async def _sleep(self) -> None:
        """Sleep until an event arrives or the state machine's deadline."""
        self._wake.clear()
        deadline = self._job.next_deadline()
        wait = None if deadline is None else max(0.0, deadline - self._clock())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._wake.wait()

    def _turn(self) -> None:
        now = self._clock()
        deadline = self._job.next_deadline()
        if deadline is not None and now - deadline > OVERSLEPT:
            self._step(events.Overslept(now - deadline), now)
        for _ in range(min(len(self._inbox), MAX_BATCH)):
            event = self._inbox.popleft()
            if isinstance(event, events.Heard) and isinstance(event.report, m.Metrics):
                if self.figures.on_metrics(event.report):  # not for the state machine
                    self._listeners.on_metrics(event.report)
                continue
            self._step(event, self._clock())
            if isinstance(event, events.Detached):
                self._boxes.pop(event.session, None)
            elif isinstance(event, events.Heard):
                newer = self.figures.on_report(event.report)
                if newer and isinstance(event.report, m.Steps):
                    self._listeners.on_stepped(event.report.round.number, event.report.step)
                if isinstance(event.report, m.Beat):  # echoed here, to prove that this loop runs
                    self._send((event.session,), m.Echo(event.report.number, self._pace()))
        deadline, now = self._job.next_deadline(), self._clock()
        if not self._inbox and deadline is not None and deadline <= now:
            self._step(events.Tick(), now)

    def _pace(self) -> float:
        """The heartbeat interval to send in an Echo; 0.0 if it was never changed. A node's Welcome
        has the interval for the number of nodes at that time; it increases as more nodes join."""
        pace = beat_interval(len(self._boxes))
        self._paced = self._paced or pace > BEAT_INTERVAL
        return pace if self._paced else 0.0

    def _step(self, event: events.JobEvent, now: float) -> None:
        try:
            effects = self._job.step(event, now)
        except Exception as fault:
            if self._tracer is not None:
                self._tracer.record_fault(event, now, fault)
            self._on_fault(event, fault)
            return
        if self._tracer is not None:
            self._tracer.record(event, now, effects)
        for effect in effects:
            self._perform_in_order(effect)

    def _on_fault(self, event: events.JobEvent, fault: Exception) -> None:
        """Log the failure, which is a bug, and end the event's stream or request, not the job. The
        MAX_FAULTS-th failure raises StateMachineFault."""
        self._faults += 1
        logger.error("a bug: %s while handling %s", fault, event, exc_info=fault)
        if isinstance(event, events.Requested):
            self._reply(event.number, m.Reply(False, f"a bug in elasticrun: {fault!r}"))
        if self._faults >= MAX_FAULTS:
            raise StateMachineFault(
                f"{self._faults} events could not be handled, the last: {fault}"
            )
        if isinstance(event, events.Heard | events.Attached):
            self._hang_up(event.session)

    # ------------------------------------------------------------ effects

    def _perform_in_order(self, effect: events.JobEffect) -> None:
        """Carry out an effect, or queue it behind the facts that are being written. Raises
        RecordStuck if too many are queued."""
        if isinstance(effect, events.Record):
            if self._store is not None:
                fence = _Fence(self._clock())
                self._held.append(fence)
                self._store.write(effect.facts, partial(self._on_durable, fence))
        elif not self._held:
            self._perform(effect)
        elif len(self._held) < MAX_WAITING:
            self._held.append(effect)
        else:
            raise RecordStuck(f"{MAX_WAITING} effects wait for the job's record")

    def _on_durable(self, fence: _Fence) -> None:
        """The facts of `fence` are durable: carry out the effects ahead of the first fence whose
        facts are not."""
        fence.durable = True
        while self._held:
            first = self._held[0]
            if isinstance(first, _Fence) and not first.durable:
                return
            self._held.popleft()
            if not isinstance(first, _Fence):
                self._perform(first)

    def _perform(self, effect: events.JobEffect) -> None:
        match effect:
            case events.Send():
                self._send(effect.sessions, effect.order)
            case events.Hangup():
                self._hang_up(effect.session)
            case events.Note():
                level = LEVELS.get(effect.level, logging.INFO)
                logger.log(logging.INFO if effect.on_nodes else level, "%s", effect.text)
                self._listeners.on_noted(effect)
            case events.JobOver():
                self._listeners.on_over(effect, self.last_picture())
            case events.Filed():
                self.figures.on_filed(effect.incident)
                self._listeners.on_filed(effect.incident)
            case events.Judged():
                self.figures.on_judged(effect.verdict.klass, over=effect.over)
                self._listeners.on_judged(effect.verdict, effect.over)
            case events.FoundSlow():
                self._listeners.on_slow(effect)
            case events.Replied():
                self._reply(effect.number, effect.reply)

    def _reply(self, number: int, reply: m.Reply) -> None:
        """Answer a request, if it is still pending."""
        waits = self._requests.get(number)
        if waits is not None and not waits.done():
            waits.set_result(reply)

    def _send(self, sessions: tuple[int, ...], order: m.Order) -> None:
        if self._store is not None and not self._store.leads():
            return  # checked here: the process may have been suspended since the decision
        if isinstance(order, m.Welcome) and not order.status_url:
            clock_us = time.time_ns() // 1000  # for the agent's checkup, which compares clocks
            order = replace(order, status_url=self.readers.link(), clock_us=clock_us)
        elif isinstance(order, m.Start):
            if not self.figures.rounds:
                self._listeners.on_formed()
            self.figures.on_start(order.round, order.group_world_size)
        try:
            data = protobuf.order_to_wire(order)
        except WireError as wrong:
            logger.error("a bug: cannot send an order: %s", wrong)
            return
        about = subject(order)
        for session in sessions:
            if (box := self._boxes.get(session)) is not None:
                box.put(about, data)

    def _hang_up(self, session: int) -> None:
        if (box := self._boxes.get(session)) is not None:
            box.close()


# ---------------------------------------------------------------- queued orders


def subject(order: m.Order) -> str:
    """The subject of an order. In a mailbox, a newer order replaces one with the same subject."""
    kind = type(order).__name__
    if isinstance(order, m.Persist | m.CommitCheckpoint):
        return f"{kind} {order.attempt}"
    if isinstance(order, m.PersistOver):
        return f"{kind} {order.attempt or f'{order.round} {order.step}'}"
    if isinstance(order, m.Holder):
        return f"{kind} {order.round} {order.step} {order.rank}"
    if isinstance(order, m.Replicate):
        return f"{kind} {order.saver}"
    if isinstance(order, m.WorkGrant):
        return f"{kind} {order.rank} {order.dataset}"
    return kind


class Mailbox:
    """Queued orders for one agent: the newest per subject, oldest first. The loop fills it, and the
    task that writes to the stream empties it.

    Orders are level-triggered, so a newer order on a subject replaces the older one. For most
    orders the subject is their type; orders about different attempts to persist, or about different
    shards, do not replace each other. So a mailbox stays small even if its agent reads slowly, and
    the stream is not dropped for that, which would make a healthy node suspect.
    """

    def __init__(self, on_close: Callable[[], object] = lambda: None) -> None:
        """`on_close`: called by the first `close`, so that the server can limit how long the agent
        may take to read the rest."""
        self._on_close = on_close
        self._orders: dict[str, bytes] = {}
        self._closed = False
        self._changed = asyncio.Event()

    def put(self, about: str, order: bytes) -> None:
        """Queue an encoded order; it replaces an unsent one with the same `subject`. Beyond
        MAX_ORDERS it closes the mailbox instead; once closed, it is a no-op."""
        if self._closed:
            return
        self._orders.pop(about, None)  # moves to the end: a Start stays behind an earlier Stop
        if about == "Start":  # the node no longer waits
            self._orders.pop("Wait", None)
        if len(self._orders) >= MAX_ORDERS:
            self.close()
            return
        self._orders[about] = order
        self._changed.set()

    def close(self) -> None:
        """Accept no more orders; queued ones are still sent."""
        if not self._closed:
            self._closed = True
            self._changed.set()
            self._on_close()

    async def take(self) -> bytes | None:
        """The next order, waiting for one; None when the box is closed and empty."""
        while not self._orders:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._orders.pop(next(iter(self._orders)))

    def __len__(self) -> int:
        return len(self._orders)


# ---------------------------------------------------------------- counters


class Figures:
    """Counters and ages for the status and /metrics that the state machine does not have: failed
    ranks, the newest step, the age of the job and of the round. No decision depends on them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._round: RoundName | None = None
        self._since = 0.0
        self._step, self._stepped = -1, 0.0
        self._stepped_in: RoundName | None = None
        self.began = clock()
        """When the job began, on `clock`, as far as this master knows."""
        self._failed: set[int] = set()
        self._failed_in: RoundName | None = None
        self.failures = 0
        """Failed ranks, each counted once per round, however often its node reports it."""
        self.rounds = 0
        """Rounds that this master has started."""
        self.nodes = 0
        """Number of nodes in the newest of these rounds."""
        self.incidents = dict.fromkeys(CAUSES, 0)
        """Finished incidents by cause."""
        self.verdicts = dict.fromkeys(map(str, Klass), 0)
        """Reported hangs by class."""
        self.curves = Curves()
        """Of the steps and metrics that rank 0 reports, since this master began."""
        self.probes = 0
        """Answers to probes, one per node and pass of the network check."""

    def on_filed(self, row: IncidentRow) -> None:
        """Count an incident, once it is over: only then is its cause final."""
        self.incidents[row.cause] += row.over

    def on_judged(self, klass: str, *, over: bool) -> None:
        """Count a verdict when it is reported, not when it is over."""
        self.verdicts[klass] += not over

    def on_start(self, name: RoundName, nodes: int = 0) -> None:
        """Count a round at its first Start; `nodes`: the number of its nodes."""
        self.nodes = nodes
        if name != self._round:
            self._round, self._since = name, self._clock()
            self.rounds += 1

    def on_metrics(self, report: m.Metrics) -> bool:
        """Note the steps in rank 0's metrics; returns whether they are of the current round, or no
        round is known yet."""
        is_current = self._round in (None, report.round)
        for row in report.rows:
            if is_current:
                values = dict(zip(report.names, row.values, strict=False))
                self.curves.add(self._clock() - row.age, report.round.number, row.step, values)
            self._on_step(report.round, row.step)
        return is_current

    def on_report(self, report: m.Report) -> bool:
        """Count a report; returns whether it shows a newer step."""
        before = (self._stepped_in, self._step)
        if isinstance(report, m.Probed):
            self.probes += 1
        elif isinstance(report, m.Steps):
            self._on_step(report.round, report.step)
            if before != (self._stepped_in, self._step):
                self.curves.add(self._stepped, report.round.number, report.step, {})
        elif isinstance(report, m.Holdings):
            for held in report.held:
                self._on_step(held.round, held.step)
        elif isinstance(report, m.Stopped):
            self._on_step(report.round, report.newest)
        elif isinstance(report, m.RanksFailed):
            self._on_step(report.round, report.newest)
            self._ranks_failed(report)
        return before != (self._stepped_in, self._step)

    def _ranks_failed(self, report: m.RanksFailed) -> None:
        if report.round != self._failed_in:
            self._failed_in = report.round
            self._failed.clear()
        new = {failure.rank for failure in report.failures} - self._failed
        self._failed |= new
        self.failures += len(new)

    def _on_step(self, name: RoundName, step: int) -> None:
        """Note a step that ranks of this round have reached or hold; -1: none. A later round may
        start again at a lower step."""
        if step < 0:
            return
        if self._round in (None, name) and (name != self._stepped_in or step > self._step):
            self._step, self._stepped, self._stepped_in = step, self._clock(), name

    def shown(self, picture: m.JobStatus) -> m.JobStatus:
        """The state machine's status with the current step and ages."""
        now = self._clock()
        since = 0.0 if self._step < 0 else max(0.0, now - self._stepped)
        age = max(0.0, now - self.began)
        return replace(picture, step=self._step, step_age=since, age=age)

    def round_age(self) -> float | None:
        """Seconds since the newest round started; None before the first."""
        return None if self._round is None else self._clock() - self._since
