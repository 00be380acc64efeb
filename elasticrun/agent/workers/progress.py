"""Combines the steps that local ranks report into small periodic reports for the master.

Each round has its own socket, so leftover processes of an earlier round reach nobody. There is no
timer for steps: arriving datagrams trigger a report when one is due. A report that cannot be sent
at once is not queued: the next one includes its data.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from elasticrun.agent.runtime import Once, Timer
from elasticrun.wire.messages import (
    MAX_METRIC_ROWS,
    MAX_METRICS,
    MetricRow,
    Metrics,
    NotFinite,
    Start,
    Steps,
)
from elasticrun.wire.progress import (
    CREDENTIALS_BYTES,
    DATAGRAM_BYTES,
    Own,
    RankCosts,
    RankDatagram,
    RankNotFinite,
    RankQuiet,
    RankRows,
    RankSteps,
    bound_socket,
    decode,
    mint_name,
    place,
    sender_of,
)
from elasticrun.wire.types import INT32, RoundName

if TYPE_CHECKING:
    from elasticrun.agent.link.link import Link

MIN_INTERVAL: Final = 1.0
"""Minimum seconds between two reports; the heartbeat interval if that is longer."""

REPORTS_PER_SECOND: Final = 50.0
"""Maximum reports per second that a master gets from all nodes. Each is stored in its trace, a ring
buffer that should reach back an hour. So nodes of larger rounds report less often, up to
MAX_INTERVAL."""

MAX_INTERVAL: Final = 20.0
"""Maximum seconds between two reports of a node in a large round."""

PATIENCE: Final = 5.0
"""Seconds after the first new data until a report is sent without the remaining ranks, which have
become silent."""

MOST_ROWS: Final = 128
"""Maximum number of queued rows; beyond it the oldest are dropped."""

MOST_AT_ONCE: Final = 64
"""Maximum datagrams read per turn of the loop."""

MOST_PER_RANK: Final = 50
"""Maximum datagrams read per second and local rank; a rank that sends ten per second, as intended,
never reaches it. The kernel queues a few more, and the sender drops the rest."""


@dataclass(slots=True)
class _Window:
    """What one local rank has reported since the last report; sums in seconds over `steps`."""

    step: int = 0
    steps: int = 0
    seconds: float = 0.0
    owns: int = 0  # datagrams with the rank's own part
    own: float = 0.0
    waited: float = 0.0
    reports_own: bool = False  # has reported it in this round

    @property
    def is_fresh(self) -> bool:
        """Whether there is new data, including its own part if the rank reports that at all."""
        return self.owns > 0 if self.reports_own else self.steps > 0

    @property
    def slowness(self) -> tuple[float, float]:
        """A sort key: greater means slower."""
        return (self.own / self.owns if self.owns else 0.0, self.seconds / max(1, self.steps))

    def add(self, message: RankSteps) -> None:
        self.step = message.step
        self.steps += message.steps
        self.seconds += message.steps * message.seconds
        if message.knows is Own.KNOWN:
            self.reports_own = True
            self.owns += 1
            self.own += message.own
            self.waited += message.waited

    def clear(self) -> None:
        self.steps = self.owns = 0
        self.seconds = self.own = self.waited = 0.0


@dataclass(frozen=True, slots=True)
class _LastCosts:
    """The last message of a rank's Checkpointer."""

    costs: RankCosts
    at: float
    steps: int  # datagrams so far with a step


class MetricReports:
    """Sends rows of metrics from rank 0 to the master: one report per second, except `flush`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._round: RoundName | None = None
        self._rows: deque[tuple[int, float, dict[str, str]]] = deque(maxlen=MOST_ROWS)
        self._by_rank = self._dropped = 0  # dropped rows, by the rank and here
        self._sent_at = -math.inf
        self._timer = Timer()

    def start(self, start: Start) -> None:
        """Start a new round."""
        self._round = start.round
        self._rows.clear()
        self._by_rank = self._dropped = 0

    def add(self, message: RankRows) -> None:
        """Queue rows, and send them when due."""
        self._by_rank = message.dropped
        self._dropped += max(0, len(self._rows) + len(message.rows) - MOST_ROWS)
        for step, at, values in message.rows:
            pairs = zip(message.names, values, strict=True)
            self._rows.append((step, at, {name: value for name, value in pairs if value}))
        self._await()

    def _await(self) -> None:
        if self._rows and not self._timer.is_set:
            every = max(MIN_INTERVAL, self._link.beat_interval)
            wait = self._sent_at + every - asyncio.get_running_loop().time()
            if wait > 0.0:
                self._timer.after(wait, self._send)
            else:
                self._send()

    def _send(self) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        self.flush(once=True)
        if self._rows:
            self._timer.after(max(MIN_INTERVAL, self._link.beat_interval), self._send)

    def flush(self, *, once: bool = False) -> None:
        """Send all rows, or (`once`) as many as fit in one report."""
        while self._rows and self._round is not None:
            rows = list(islice(self._rows, MAX_METRIC_ROWS))
            names = tuple(dict.fromkeys(name for *_, values in rows for name in values))[
                :MAX_METRICS
            ]
            now = time.time()
            table = tuple(
                MetricRow(step, max(0.0, now - at), tuple(values.get(name, "") for name in names))
                for step, at, values in rows
            )
            report = Metrics(self._round, names, table, self._by_rank + self._dropped)
            if not once:
                self._link.send(report)
            elif not self._link.offer(report):
                return  # kept: there may be no master now
            for _ in rows:
                self._rows.popleft()
            if once:
                return

    def stop(self) -> None:
        """Stop sending."""
        self._timer.cancel()
        self._rows.clear()


class Progress:
    """Receives what the ranks of the current round report, and combines it."""

    def __init__(self, nproc: int, link: Link) -> None:
        self._nproc = nproc
        self._link = link
        self._socket: socket.socket | None = None
        self._name = ""
        self._next_name = mint_name()
        self._start: Start | None = None
        self._windows: dict[int, _Window] = {}
        self._latest: dict[int, tuple[int, float]] = {}
        self._callers: set[int] = set()  # local ranks that call `progress`
        self._spoilt: set[int] = set()  # local ranks that have reported a loss that is not finite
        self._costs: dict[int, _LastCosts] = {}
        self._quiet_phases: dict[
            int, tuple[str, float]
        ] = {}  # the phase that a rank reports, and its end
        self._sent_at = -math.inf
        self._every = MIN_INTERVAL
        self._new_since = math.inf
        self._second = 0
        self._read_in_second = 0
        self._pause = Timer()
        self._once = Once()
        self._metrics = MetricReports(link)
        self.newest = -1
        """The newest step that a rank of this round has reported; -1: none."""

    def round_began(self, start: Start) -> None:
        """Start a round; datagrams of the last one's ranks are no longer read."""
        self.close()
        self._start = start
        self._metrics.start(start)
        self.newest = -1
        self._windows, self._latest = {}, {}
        self._callers, self._costs, self._quiet_phases = set(), {}, {}
        self._spoilt = set()
        self._new_since = math.inf
        share = start.group_world_size / REPORTS_PER_SECOND
        self._every = max(MIN_INTERVAL, min(MAX_INTERVAL, share))
        name, self._next_name = self._next_name, mint_name()
        try:
            found = bound_socket(name)
        except OSError as error:
            self._once.log(f"the steps of ranks are not recorded: {error}")
            return
        self._socket, self._name = found, name
        asyncio.get_running_loop().add_reader(found, self._readable)

    def place(self, local_rank: int) -> str:
        """The value of wire.env.PROGRESS for this rank; "" if there is no socket."""
        return place(self._name, local_rank) if self._name else ""

    def next_place(self, local_rank: int) -> str:
        """The same for the next round."""
        return place(self._next_name, local_rank)

    def seen(self, local_rank: int) -> tuple[int, float]:
        """The newest step of this rank in this round, and its seconds; -1: none."""
        return self._latest.get(local_rank, (-1, 0.0))

    def quiet_phase(self, local_rank: int) -> tuple[str, float]:
        """The long phase that this rank reports, and its maximum remaining seconds; "" and 0.0:
        none."""
        what, until = self._quiet_phases.get(local_rank, ("", 0.0))
        left = until - asyncio.get_running_loop().time()
        return (what, left) if what and left > 0.0 else ("", 0.0)

    def ranks_stopping(self) -> None:
        """No-op: the next report includes their data (`link.reports`)."""

    def ranks_gone(self, *, done: bool) -> None:
        """Send the ranks' last data now, because they have exited."""
        self.flush()

    def close(self) -> None:
        """Stop reading. May be called again."""
        self._pause.cancel()
        self._metrics.stop()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        self._socket, self._name = None, ""

    # ------------------------------------------------------------ datagrams in

    def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if int(now) != self._second:
            self._second, self._read_in_second = int(now), 0
        for _ in range(MOST_AT_ONCE):
            if self._socket is None:
                return
            if self._read_in_second >= MOST_PER_RANK * self._nproc:
                self._pause_reading(loop, self._second + 1 - now)
                return
            try:
                data, credentials, flags, _ = self._socket.recvmsg(
                    DATAGRAM_BYTES, CREDENTIALS_BYTES
                )
            except BlockingIOError:
                return
            except OSError as error:
                self._once.log(f"the steps of ranks are no longer recorded: {error}")
                self.close()
                return
            self._read_in_second += 1
            if self._is_ours(credentials) and not flags & socket.MSG_TRUNC:
                self._receive(decode(data), now)

    def _pause_reading(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """Pause until the next second, so that a rank that sends too much does not keep the agent
        busy."""
        assert self._socket is not None
        self._once.log("a local rank reports its steps too often: some are dropped")
        loop.remove_reader(self._socket)
        self._pause.after(seconds, self._resume)

    def _resume(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._readable)

    def _is_ours(self, credentials: list[tuple[int, int, bytes]]) -> bool:
        """Whether the sender runs as this user, according to the kernel."""
        sender = sender_of(credentials)
        if sender is None or sender[1] == os.getuid():
            return sender is not None
        pid, uid = sender
        sentence = f"a process of another user (pid {pid}, uid {uid}) sends steps: ignored"
        self._once.log(sentence, kind="another user")
        return False

    def _receive(self, message: RankDatagram | None, now: float) -> None:
        if message is None or message.local_rank >= self._nproc:
            return
        if isinstance(message, RankRows):
            if self._start is not None and self._start.first_rank + message.local_rank == 0:
                # a rank that dies has sent its last row, but perhaps not its last RankSteps
                self.newest = max(self.newest, *(step for step, *_ in message.rows), -1)
                self._metrics.add(message)
            return
        if isinstance(message, RankNotFinite):
            self._not_finite(message)
            return
        if isinstance(message, RankQuiet):
            self._quiet_phases[message.local_rank] = (message.what, now + message.seconds)
            return
        if isinstance(message, RankCosts):
            found = self._of_checkpointer(message, now)
            if found is None or message.local_rank in self._callers:
                return
            message = found
        else:
            self._callers.add(message.local_rank)
        several = self._start is not None and self._start.group_world_size > 1
        if message.knows is Own.UNAVAILABLE and several:
            self._once.log(
                "torch's flight recorder does not record how long ranks wait for each other: a "
                "slow node cannot be detected"
            )
        self.newest = max(self.newest, message.step)
        self._latest[message.local_rank] = (message.step, message.seconds)
        self._windows.setdefault(message.local_rank, _Window()).add(message)
        self._new_since = min(self._new_since, now)
        self._report(now)

    def _not_finite(self, message: RankNotFinite) -> None:
        """Report a rank's first loss that is not finite."""
        if self._start is not None and message.local_rank not in self._spoilt:
            self._spoilt.add(message.local_rank)
            rank = self._start.first_rank + message.local_rank
            report = NotFinite(self._start.round, rank, message.step, message.value)
            self._link.send(report)

    def _of_checkpointer(self, message: RankCosts, now: float) -> RankSteps | None:
        """The steps since the Checkpointer's last message, if the script does not call `progress`.
        The first two messages are not used: a script that calls it has done so by then."""
        before = self._costs.get(message.local_rank)
        count = (before.steps if before is not None else 0) + (message.step >= 0)
        self._costs[message.local_rank] = _LastCosts(message, now, count)
        if before is None or count < 3 or message.step <= before.costs.step:
            return None
        steps = min(message.step - before.costs.step, INT32)
        return RankSteps(message.local_rank, message.step, steps, (now - before.at) / steps)

    # ------------------------------------------------------------ reports out

    def flush(self) -> None:
        """Send data that is not due yet, because a rank has failed, or all were stopped or have
        finished. Otherwise the count of repeated steps would be too low."""
        if self._socket is not None:
            self._readable()
        left = [window for window in self._windows.values() if window.steps]
        if left and self._start is not None:
            self._send(self._start, left, asyncio.get_running_loop().time())
        self._metrics.flush()

    def _report(self, now: float) -> None:
        """Report the slowest rank, if a report is due."""
        if self._start is None or now - self._sent_at < max(self._every, self._link.beat_interval):
            return
        late = now - self._new_since >= PATIENCE
        fresh = [window for window in self._windows.values() if window.is_fresh]
        if not fresh or (len(fresh) < len(self._windows) and not late):
            return
        self._send(self._start, fresh, now)

    def _send(self, start: Start, fresh: list[_Window], now: float) -> None:
        slowest = max(fresh, key=lambda window: window.slowness)
        own, seconds = slowest.slowness
        report = Steps(
            round=start.round,
            step=slowest.step,
            steps=min(slowest.steps, INT32),
            seconds=seconds,
            own=own,
            waited=slowest.waited / slowest.owns if slowest.owns else 0.0,
            saves=max((one.costs.saves for one in self._costs.values()), default=0),
            saved=sum(one.costs.saved for one in self._costs.values()),
            restored=sum(one.costs.restored for one in self._costs.values()),
        )
        if self._link.offer(report):
            self._sent_at, self._new_since = now, math.inf
            self._windows = {rank: one for rank, one in self._windows.items() if one.is_fresh}
            for window in self._windows.values():
                window.clear()
