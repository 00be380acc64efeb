"""`progress(step)` and `quiet(...)`: how a rank reports its training to its agent.

`progress` takes a few microseconds, with or without an agent. `quiet("judge", minutes=20)`
announces that the block is expected to take long.

At most ten times a second a datagram with the number of steps and their duration goes to this
node's agent. Once a second `progress` reads torch's flight recorder to find the rank's own part of
that time. All ranks read at the same instant, when the second of the wall clock changes, so that
the cost delays one step of the job instead of one step per rank.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

from elasticrun.training import recorder
from elasticrun.wire import env
from elasticrun.wire.progress import (
    MAX_COLUMNS,
    MAX_QUIET_SECONDS,
    MAX_ROWS,
    MAX_VALUE,
    Own,
    RankNotFinite,
    RankQuiet,
    RankRows,
    RankSteps,
    address,
    encode,
    is_column,
    read_place,
)

SEND_EVERY: Final = 0.1
"""Seconds between two datagrams; the steps in between share the next one."""

BURST: Final = 20
"""Number of datagrams with rows that may be sent at once, before the rate is one per SEND_EVERY."""

READ_EVERY: Final = 1
"""Initial seconds between two reads of the recorder. Doubled when a read costs more than
READ_SHARE.
"""

READ_SHARE: Final = 0.005
"""Share of one core that reads may cost."""

MAX_READ_EVERY: Final = 16
"""Maximum seconds between two reads."""

USELESS_READS: Final = 10
"""After this many consecutive reads without information about a step, the recorder counts as
useless: the steps contain no collectives, or NCCL's are not timed.
"""

SLOWED: Final = 5
"""An injected slowness is based on the shortest own part of this many steps, so that a stall of the
whole machine does not inflate it.
"""

ACCEPT_LIMIT: Final = 0.1
"""Seconds to wait until the agent accepts a `quiet` message; its queue may be full."""

MAX_MARKS: Final = 2048
"""Number of steps remembered until the next read; more steps displace the oldest."""


OWN_COLUMNS: Final = ("time", "round", "step")
"""Our own columns; "_" is appended to a metric with such a name."""


class MetricRows:
    """Metrics of the script's steps until they are sent: at once while they are rare, then ten
    times a second in datagrams with all waiting rows. Keeps the newest MAX_ROWS."""

    def __init__(self, local_rank: int) -> None:
        self._local_rank = local_rank
        self._rows: deque[tuple[int, float, dict[str, str]]] = deque(maxlen=MAX_ROWS)
        self._dropped = 0
        self._may_send = float(BURST)
        self._since = time.monotonic()

    def add(self, step: int, metrics: Mapping[str, object]) -> bytes:
        """Add a row; return the datagram to send now, b"" for none. Raises TypeError or ValueError
        for a value that is not a number."""
        values = {name: _number(value) for name, value in metrics.items() if is_column(name)}
        if taken := [name for name in OWN_COLUMNS if name in values]:
            values |= {f"{name}_": values.pop(name) for name in taken}
        self._dropped += len(self._rows) == MAX_ROWS
        self._rows.append((step, time.time(), values))
        now = time.monotonic()
        self._may_send = min(BURST, self._may_send + (now - self._since) / SEND_EVERY)
        self._since = now
        return self._datagram() if self._may_send >= 1.0 else b""

    def _datagram(self) -> bytes:
        names: dict[str, None] = {}
        for _, _, values in self._rows:
            names.update(dict.fromkeys(values))
        columns = tuple(names)[:MAX_COLUMNS]
        rows = tuple(
            (step, at, tuple(values.get(name, "") for name in columns))
            for step, at, values in self._rows
        )
        return encode(RankRows(self._local_rank, columns, rows, self._dropped))

    def mark_sent(self) -> None:
        """Remove the rows of the datagram, because it has been sent."""
        self._may_send -= 1.0
        self._rows.clear()


def _number(value: Any) -> str:
    """The number as text. Accepts a tensor of one element, which must be copied to the host: this
    waits for a GPU."""
    if type(value) is int:
        text = repr(value)
        return text if len(text) <= MAX_VALUE else repr(float(value))
    return repr(float(value))


def _is_cheap(loss: Any) -> bool:
    """Whether reading this loss waits for no device and no other rank, and cannot fail."""
    if type(loss).__name__ == "Tensor" and type(loss).__module__ == "torch":
        return bool(loss.device.type == "cpu" and loss.numel() == 1)
    return type(loss) is float or (type(loss).__module__ == "numpy" and loss.size == 1)


class ProgressReporter:
    """One rank's connection to its agent. Times are seconds, monotonic unless stated otherwise."""

    def __init__(self, place: str, slowness: float = 1.0) -> None:
        """`place` is the value of wire.env.PROGRESS. `slowness` is an injected fault: the rank's
        own part takes this many times as long. Raises OSError if no socket can be created,
        ValueError for an invalid place."""
        name, self._local_rank = read_place(place)
        self._address = address(name)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._slowness = slowness
        self._slept = 0.0
        self._owns: deque[float] = deque(maxlen=SLOWED)
        self._last = -1.0
        self._marks: deque[int] = deque(maxlen=MAX_MARKS)
        self._steps = 0
        self._seconds = 0.0
        self.newest_step = -1
        self._send_at = 0.0
        self._every = READ_EVERY
        self._instant = 0
        self._split = recorder.Split()
        self._knows = Own.LATER
        self._useless_reads = 0
        self._rows = MetricRows(self._local_rank) if os.environ.get("RANK") == "0" else None
        self._bad_loss = b""  # the report of the first loss that is not finite, until it is sent
        self._has_bad_loss = False

    def report_metrics(self, number: int, metrics: Mapping[str, object]) -> None:
        """Report metrics of step `number`; only rank 0's are kept."""
        if self._rows is None or not (data := self._rows.add(number, metrics)):
            return
        with contextlib.suppress(OSError):  # queue full: the next datagram has these rows too
            self._socket.sendto(data, self._address)
            self._rows.mark_sent()

    def check_loss(self, number: int, loss: Any) -> None:
        """Report the first loss that is not finite. A tensor on a device is read by rank 0 only,
        which reads it for its metrics too."""
        if not self._has_bad_loss:
            if self._rows is None and not _is_cheap(loss):
                return
            value = float(loss.detach() if hasattr(loss, "detach") else loss)
            if math.isfinite(value):
                return
            self._has_bad_loss = True
            self._bad_loss = encode(RankNotFinite(self._local_rank, number, repr(value)))
        if self._bad_loss:
            with contextlib.suppress(OSError):  # queue full: sent with the next step
                self._socket.sendto(self._bad_loss, self._address)
                self._bad_loss = b""

    def report_step(self, number: int) -> None:
        """Report that step `number` is complete. With an injected slowness, this also sleeps."""
        self.newest_step = number
        now, wall = time.monotonic(), time.time_ns()
        self._marks.append(wall)
        last, self._last = self._last, now
        if last < 0.0:
            return  # the start of the first step is unknown
        self._steps += 1
        self._seconds += now - last
        instant = wall // (self._every * 10**9)
        if instant != self._instant or self._slowness > 1.0:
            self._instant = instant
            self._read_recorder(now - last)
        if now >= self._send_at:
            self._send_at = now + SEND_EVERY
            self._send_steps(number)
        if self._slept:
            time.sleep(self._slept)

    def _read_recorder(self, seconds: float) -> None:
        """Split the steps since the last read into own part and waiting."""
        began = time.thread_time()
        state = recorder.read_recorders()
        found = recorder.split(self._marks, state)
        for _ in range(found.used):
            self._marks.popleft()
        if found.steps:
            self._split, self._knows, self._useless_reads = found, Own.KNOWN, 0
        elif state.knows is not Own.KNOWN:
            self._knows = state.knows
        else:
            self._useless_reads += 1
            if self._useless_reads >= USELESS_READS:
                self._knows = Own.UNAVAILABLE
        if self._slowness > 1.0:
            own = found.own / found.steps if found.steps else seconds
            self._owns.append(max(0.0, own - self._slept))
            self._slept = min(self._owns) * (self._slowness - 1.0)
        elif time.thread_time() - began > READ_SHARE * self._every:
            self._every = min(MAX_READ_EVERY, 2 * self._every)

    def _send_steps(self, number: int) -> None:
        own = waited = math.nan
        if self._knows is Own.KNOWN:
            own = self._split.own / self._split.steps
            waited = self._split.waited / self._split.steps
        each = self._seconds / self._steps
        report = RankSteps(self._local_rank, number, self._steps, each, own, waited, self._knows)
        with contextlib.suppress(OSError):  # the queue is full, or the agent has exited
            self._socket.sendto(encode(report), self._address)
            self._steps, self._seconds = 0, 0.0
            if self._knows is Own.KNOWN:
                self._knows = Own.LATER

    def close(self) -> None:
        self._socket.close()


_reporter: ProgressReporter | None = None
_connect_tried = False
_warned = False


def progress(step: int, **metrics: float) -> None:
    """Report that this rank has completed step `step`; call once a step, after the optimizer's
    step. `metrics` of rank 0 become a row of the job's `progress.csv`: `progress(step, loss=0.25,
    lr=1e-4)`. The page draws them; with `total=`, the number of the last step, it also shows when
    the training will end. The first `loss` of any rank that is NaN or infinite is reported; one on
    a GPU only by rank 0, so that the others need not wait for it.

    A no-op without an agent (or under torchrun). Never raises and, given numbers, never waits (a
    tensor on a GPU is waited for). A value that is not a number gives one warning."""
    global _reporter, _connect_tried
    if type(step) is not int and not hasattr(step, "__index__"):
        _warn_about_step(step)
    if _reporter is None and _connect_tried:
        return
    with contextlib.suppress(Exception):
        if _reporter is None:
            _connect_tried = True  # not at import, which may happen in the process that forks ranks
            _reporter = _connect()
        if _reporter is not None:
            if metrics:
                _report_metrics(_reporter, step, metrics)
            _reporter.report_step(step)


def newest_step() -> int:
    """The newest step that was reported in this round; -1: none."""
    return -1 if _reporter is None else _reporter.newest_step


def begin_round() -> None:
    """Drop the connection, because this process joins another round: the agent uses a new socket
    address for each round."""
    global _reporter, _connect_tried
    if _reporter is not None:
        _reporter.close()
    _reporter, _connect_tried = None, False


def _report_metrics(reporter: ProgressReporter, step: int, metrics: Mapping[str, object]) -> None:
    try:
        if "loss" in metrics:
            reporter.check_loss(int(step), metrics["loss"])
        reporter.report_metrics(int(step), metrics)
    except (TypeError, ValueError, OverflowError) as wrong:
        _warn_once(f"progress() is given {metrics!r:.100}: it accepts only numbers ({wrong})", 4)


def _warn_about_step(step: object) -> None:
    """Warn even without an agent, so that a wrong script is noticed everywhere."""
    kind = type(step).__name__
    _warn_once(
        f"progress() is given {step!r:.100} (a {kind}): it needs the number of the step, and "
        "reports nothing until it gets one",
        4,
    )


def _warn_once(sentence: str, level: int) -> None:
    """Warn once per process."""
    global _warned
    if not _warned:
        _warned = True
        with contextlib.suppress(Warning):  # warnings may be errors
            warnings.warn(f"elasticrun: {sentence}", stacklevel=level)


def _connect() -> ProgressReporter | None:
    """The connection to the agent that started this process; None if there is none."""
    place = os.environ.get(env.PROGRESS)
    if not place:
        return None
    planted = os.environ.get(env.NODE_FAULT)
    return ProgressReporter(place, env.slowness(env.read_own_faults(planted)) if planted else 1.0)


_quiet_blocks: list[tuple[str, float]] = []
"""The active `quiet` blocks and their ends (monotonic); the innermost is last."""


@contextlib.contextmanager
def quiet(what: str, *, minutes: float) -> Iterator[None]:
    """Announce that this rank now does something that is expected to take long, for at most
    `minutes` minutes, and at most a day::

        with training.quiet("judge", minutes=20):
            judge(model)

    Until the block ends or the minutes are over, ranks waiting for this one are not reported as
    hung. May be used from any thread. In nested blocks the innermost is named and the longest limit
    applies. A no-op without an agent. It raises nothing itself, and waits at most 0.2 s."""
    word = " ".join(str(what).split()) or "something"
    seconds = _seconds(minutes)
    if not seconds:
        yield
        return
    entry = (word, time.monotonic() + seconds)
    _quiet_blocks.append(entry)
    _send_quiet()
    try:
        yield
    finally:
        _quiet_blocks.remove(entry)
        _send_quiet()


def _seconds(minutes: float) -> float:
    """The seconds; 0.0 and a warning for an invalid number."""
    with contextlib.suppress(TypeError, ValueError):
        if minutes > 0.0:
            return min(MAX_QUIET_SECONDS, 60.0 * minutes)
    with contextlib.suppress(Warning):  # warnings may be errors
        warnings.warn(f"elasticrun: quiet() got an invalid minutes={minutes!r:.100}", stacklevel=4)
    return 0.0


def _send_quiet() -> None:
    now = time.monotonic()
    held = [one for one in _quiet_blocks if one[1] > now]
    word, until = (held[-1][0], max(one[1] for one in held)) if held else ("", now)
    # A socket per call: other threads may call this, and a forked process must not share one.
    with contextlib.suppress(OSError, ValueError):
        name, local_rank = read_place(os.environ.get(env.PROGRESS, ""))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.settimeout(ACCEPT_LIMIT)
            line.sendto(encode(RankQuiet(local_rank, word, until - now)), address(name))


if env.PROGRESS in os.environ:
    recorder.prepare(os.environ)
