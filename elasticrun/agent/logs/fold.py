"""Folds equal lines of several ranks into one, with the ranks that wrote it: `[0-5,7] step ~100`.

This module is pure: lines come in with the time, lines to show come out. Lines are held in one
queue. A rank's line joins a queued line if both differ only in their numbers and the queued one is
later in the queue than the rank's previous line; otherwise it is appended. Lines are shown from the
front, so the lines of one rank keep their order.

A line waits WINDOW seconds at most, and less if no rank can join it any more (every rank has
written it, or something later). If only one rank writes a kind of line, the next such line is not
held. Errors and warnings are shown at once; other ranks' copies follow within the window.
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, NamedTuple

from elasticrun.agent.logs import masks
from elasticrun.agent.logs.unit import PendingTraceback

WINDOW: Final = 1.0
"""Seconds that a line is held for other ranks. Raise it if ranks drift further apart; the terminal
is delayed by as much."""

BAR_WINDOW: Final = 0.4
"""Seconds between two shown states of a progress bar."""

SOON: Final = 0.2
"""Seconds to hold a line that only a minority of ranks has written, unless such lines are known to
be common."""

MINORITY: Final = 10
"""Fewer than one in this many ranks is a minority; a single rank always is."""

MOST_LINES: Final = 8192
"""Maximum lines in the queue; beyond it the oldest are shown with the ranks known so far."""

MOST_BYTES: Final = 4 * 1024 * 1024
"""The same limit in bytes of their text."""

MOST_KEYS: Final = 2048
"""Number of line keys remembered as common or not."""

MOST_A_SECOND: Final = 20_000
"""Lines of all ranks per second that are compared. Nobody can read a faster flood; it passes
through uncompared until a second has fewer lines."""

LONGEST: Final = 2048
"""Bytes; longer lines are shown at once, without comparison."""

COMMON: Final = -1

TRACE_WINDOW: Final = 10.0
"""Seconds in which another rank's identical traceback is shown as a one-line reference."""

_number = attrgetter("number")


class FoldedLines(NamedTuple):
    """Lines to show."""

    who: int
    """The ranks that wrote the lines, as a bit mask of their places."""
    lines: list[bytes]
    """A traceback is one item of many lines."""
    is_bar: bool = False
    """A state of a progress bar, which the next one overwrites."""
    same_as: int = -1
    """The place of a rank that has just shown the same traceback; -1: none."""


@dataclass(slots=True, eq=False)
class SharedLine:
    """A queued line, with the text of the first rank."""

    number: int
    key: bytes
    text: bytes
    who: int
    since: float
    values: list[bytes] | None = None
    differing: set[int] = field(default_factory=set)

    @property
    def is_bar(self) -> bool:
        """Whether this is a state of a progress bar. It has waited before it was queued, so it is
        due at once."""
        return self.key.startswith(b"\r")

    def join(self, place: int, text: bytes) -> None:
        """Add a rank that wrote the same line."""
        self.who |= 1 << place
        if text == self.text:
            return
        if self.values is None:
            self.values = masks.numbers(self.text)
        for i, (ours, theirs) in enumerate(zip(self.values, masks.numbers(text), strict=False)):
            if ours != theirs:
                self.differing.add(i)

    def words(self) -> bytes:
        """The text to print after the ranks."""
        if self.who & (self.who - 1):
            return masks.mark_differing(self.text, self.differing)
        return self.text


class Fold:
    """Folds one stream of one agent's ranks, which are identified by their places 0, 1, 2, ..."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._queue: dict[int, SharedLine] = {}  # by number, in order
        self._by_key: dict[bytes, list[SharedLine]] = {}
        self._times: list[tuple[float, int]] = []  # heap: due time, number; some are already shown
        self._bytes = 0
        self._number = 0
        self._last = [0] * ranks  # number of each rank's last line
        self._alive = set(range(ranks))
        self._known: dict[bytes, int] = {}  # COMMON, or the place of the only rank that writes it
        self._alarms: dict[bytes, tuple[float, int]] = {}  # alarms shown at once: time and place
        self._pending: dict[int, PendingTraceback] = {}
        self._traces: dict[bytes, tuple[float, int]] = {}  # shown in full: time, place
        self._states: dict[int, bytes] = {}  # the newest state of each rank's progress bar
        self._states_due = 0.0
        self._second = 0.0  # when the current second of the count began
        self._count = 0
        self._flooded = False
        self._out: list[FoldedLines] = []

    def add(self, place: int, lines: Sequence[tuple[bytes, bool]], now: float) -> list[FoldedLines]:
        """Add a rank's lines, without their ends, each with whether a carriage return ended it:
        then it is a state of a bar. Returns the lines to show now."""
        if self._is_flood(len(lines), now):
            self._settle(place, now)
            self._at_once(place, *(line for line, _ in lines))
            return self.tick(now)
        for line, is_bar in lines:
            if is_bar:
                self._bar(place, line, now)
            else:
                self._line(place, line, now)
        return self.tick(now)

    def _is_flood(self, lines: int, now: float) -> bool:
        if now - self._second >= 1.0:
            self._flooded = self._count > MOST_A_SECOND and now - self._second < 2.0
            self._second, self._count = now, 0
        self._count += lines
        return self._flooded or self._count > MOST_A_SECOND

    def due(self) -> float | None:
        """When to call `tick` if no more lines arrive before."""
        while self._times and self._times[0][1] not in self._queue:
            heapq.heappop(self._times)
        times = [self._times[0][0]] if self._times else []
        times += [pending.due() for pending in self._pending.values()]
        if self._states:
            times.append(self._states_due)
        return min(times, default=None)

    def tick(self, now: float) -> list[FoldedLines]:
        """Return the lines to show now."""
        for place, pending in list(self._pending.items()):
            if pending.due() <= now:
                self._show_pending(place, pending, now)
        if self._states and self._states_due <= now:
            for place in sorted(self._states):
                self._hold_bar(place, now)
        self._show_complete()
        self._show_due(now)
        while len(self._queue) > MOST_LINES or self._bytes > MOST_BYTES:
            self._show(next(iter(self._queue.values())))
        out, self._out = self._out, []
        return out

    def release(self, place: int, now: float) -> list[FoldedLines]:
        """Show all held lines of this rank, because the caller is about to show the unfinished
        start of its next line."""
        if place in self._pending:
            self._show_pending(place, self._pending[place], now)
        self._release(1 << place)
        return self.tick(now)

    def ended(self, place: int, now: float) -> list[FoldedLines]:
        """Call when this rank has ended: other lines no longer wait for it."""
        self._alive.discard(place)
        self._settle(place, now)
        return self.tick(now)

    def flush(self, now: float) -> list[FoldedLines]:
        """Show all held lines. Call when all ranks have ended."""
        for place in range(self._ranks):
            self._alive.discard(place)
            self._settle(place, now)
        return self.tick(now)

    # ---------------------------------------------------------------- lines in

    def _line(self, place: int, line: bytes, now: float) -> None:
        pending = self._pending.get(place)
        if pending is not None:
            if pending.includes(line):
                if pending.add(line, now):
                    self._show_pending(place, pending, now)
                return
            self._show_pending(place, pending, now, ends=True)
        if place in self._states:
            if masks.bar_key(self._states[place]) == masks.bar_key(line):
                del self._states[place]  # the last state of the bar, with a line end
            else:
                self._hold_bar(place, now)
        if PendingTraceback.begins(line):
            self._release(1 << place)
            self._pending[place] = PendingTraceback(line, now)
        elif len(line) > LONGEST:
            self._at_once(place, line)
        elif _is_alarm(line):
            self._alarm(place, line, now)
        else:
            self._ordinary(place, line, now)

    def _alarm(self, place: int, line: bytes, now: float) -> None:
        """Show an error or a warning at once. If another rank has just shown the identical line,
        hold it for more ranks instead."""
        before = self._alarms.get(line)
        if before is not None and before[1] != place and now - before[0] < WINDOW:
            self._hold(place, line, line, now, now + WINDOW)
            return
        self._alarms.pop(line, None)
        self._alarms[line] = (now, place)
        _bound(self._alarms)
        self._at_once(place, line)

    def _ordinary(self, place: int, line: bytes, now: float) -> None:
        key = masks.key_of(line)
        known = self._known.get(key)
        if known is None or known == place:
            if known == place and key not in self._by_key and not self._holds(place):
                self._at_once(place, line)
                return
            self._hold(place, key, line, now, now + SOON)
            return
        self._known[key] = COMMON
        self._hold(place, key, line, now, now + WINDOW)

    def _holds(self, place: int) -> bool:
        """Whether a line of this rank may still be in the queue."""
        return bool(self._queue) and self._last[place] >= next(iter(self._queue))

    def _hold(self, place: int, key: bytes, line: bytes, now: float, due: float) -> None:
        same = self._by_key.setdefault(key, [])
        last = self._last[place]
        if same and same[-1].number > last:
            held = same[bisect_right(same, last, key=_number)]
            held.join(place, line)
            self._last[place] = held.number
            return
        self._number += 1
        held = SharedLine(self._number, key, line, 1 << place, now)
        self._last[place] = held.number
        self._queue[held.number] = held
        self._bytes += len(line)
        same.append(held)
        self._wait(held, due)

    def _wait(self, held: SharedLine, due: float) -> None:
        if len(self._times) > 4 * MOST_LINES:
            self._times = [item for item in self._times if item[1] in self._queue]
            heapq.heapify(self._times)
        heapq.heappush(self._times, (due, held.number))

    def _bar(self, place: int, state: bytes, now: float) -> None:
        if not state.strip():
            return
        if place in self._pending:
            self._show_pending(place, self._pending[place], now, ends=True)
        if not self._states:
            self._states_due = now + BAR_WINDOW
        self._states[place] = state

    def _settle(self, place: int, now: float) -> None:
        """End this rank's open traceback and progress bar: no more lines belong to them."""
        if place in self._pending:
            self._show_pending(place, self._pending[place], now, ends=True)
        if place in self._states:
            self._hold_bar(place, now)

    def _hold_bar(self, place: int, now: float) -> None:
        """Queue the newest state of a bar, due immediately."""
        state = self._states.pop(place)
        self._hold(place, masks.bar_key(state), state, now, now)

    # ---------------------------------------------------------------- lines out

    def _at_once(self, place: int, *lines: bytes, same_as: int = -1) -> None:
        self._release(1 << place)
        self._number += 1
        self._last[place] = self._number
        self._out.append(FoldedLines(1 << place, list(lines), same_as=same_as))

    def _show_pending(
        self, place: int, pending: PendingTraceback, now: float, *, ends: bool = False
    ) -> None:
        text = pending.take(now)
        if text and (ends or pending.is_over) and PendingTraceback.begins(text.partition(b"\n")[0]):
            self._show_traceback(place, text, now)
        elif text:
            self._at_once(place, text)
        if ends or pending.is_over:
            del self._pending[place]

    def _show_traceback(self, place: int, text: bytes, now: float) -> None:
        """Show a whole traceback, or a reference if another rank has just shown the same one."""
        same = b"\n".join(masks.body(line) for line in text.split(b"\n"))
        key = hashlib.sha256(same).digest()
        at, first = self._traces.get(key, (-TRACE_WINDOW, place))
        if first == place or now - at >= TRACE_WINDOW:
            self._traces.pop(key, None)
            self._traces[key] = (now, place)
            _bound(self._traces)
            self._at_once(place, text)
            return
        self._at_once(place, same_as=first)

    def _show_complete(self) -> None:
        """Show lines that no rank can join any more."""
        passed = min((self._last[place] for place in self._alive), default=self._number)
        while self._queue:
            held = next(iter(self._queue.values()))
            if held.number > passed:
                return
            self._learn(held)
            self._show(held)

    def _show_due(self, now: float) -> None:
        """Show lines that have waited long enough, after all earlier lines of the same ranks."""
        which: set[int] = set()
        while self._times and self._times[0][0] <= now:
            due, number = heapq.heappop(self._times)
            held = self._queue.get(number)
            if held is None:
                continue
            if due < held.since + WINDOW and not held.is_bar and not self._is_minority(held.who):
                self._wait(held, held.since + WINDOW)
            else:
                which.add(number)
        for number in which:
            self._learn(self._queue[number])
        if which:
            self._release(0, which)

    def _release(self, who: int, numbers: Iterable[int] = ()) -> None:
        """Show all lines of the ranks `who`, the lines `numbers`, and all that must precede
        them."""
        which = frozenset(numbers)
        last = max(which, default=0)
        for place in range(self._ranks):
            if who >> place & 1:
                last = max(last, self._last[place])
        before: list[SharedLine] = []
        for held in self._queue.values():
            if held.number > last:
                break
            before.append(held)
        due: list[SharedLine] = []
        for held in reversed(before):
            if held.who & who or held.number in which:
                who |= held.who
                due.append(held)
        for held in reversed(due):
            self._show(held)

    def _show(self, held: SharedLine) -> None:
        del self._queue[held.number]
        self._bytes -= len(held.text)
        same = self._by_key[held.key]
        same.remove(held)
        if not same:
            del self._by_key[held.key]
        self._out.append(FoldedLines(held.who, [held.words()], held.is_bar))

    def _is_minority(self, who: int) -> bool:
        count = who.bit_count()
        return count == 1 or count * MINORITY < self._ranks

    def _learn(self, held: SharedLine) -> None:
        """Remember for next time which ranks write such a line."""
        if held.is_bar:
            return
        self._known.pop(held.key, None)
        if held.who.bit_count() == 1:
            self._known[held.key] = held.who.bit_length() - 1
        elif not self._is_minority(held.who):
            self._known[held.key] = COMMON
        _bound(self._known)


def _is_alarm(line: bytes) -> bool:
    low = line.lower()
    return b"error" in low or b"warn" in low


def _bound(memory: dict[bytes, Any]) -> None:
    while len(memory) > MOST_KEYS:
        del memory[next(iter(memory))]
