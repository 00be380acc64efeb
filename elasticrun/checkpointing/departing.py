"""A node leaves: a rank's part in it.

All ranks save the first step from the one on that the agent has written into the segment's
`save_at`; each finds that out by itself, at a step that is the same for all. A rank that was past
it already says so.

Where a scheduler signals every process, the signal comes to the rank too. It is *put off*: the rank
ends by it at its next step, once the step that is asked for is saved, or after WORD_LIMIT without a
word of one. So only where the script has left the signal alone. A second one is obeyed at once. The
agent knows who puts signals off, and does not wait for them when it ends a rank itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

from elasticrun.checkpointing.line import Line
from elasticrun.wire.segment import NONE
from elasticrun.wire.snapshots import Missed, PutsOff

ASKED_LIMIT: Final = 5.0
"""Seconds that a snapshot which is asked for waits for a slot."""

WHOLE_LIMIT: Final = 5.0
"""Seconds that a rank which ends by a signal waits until all others have saved the same step."""

WORD_LIMIT: Final = 5.0
"""Seconds in which the agent says what is to be saved before a rank ends by a signal."""


class PutOff:
    """Signals that do not end this process at once. In its main thread only, and not in processes
    that are forked from it."""

    def __init__(self) -> None:
        self._signals: set[int] = set()
        self._came = 0
        self._at = 0.0

    def install(self, signals: Iterable[int]) -> tuple[int, ...]:
        """Put these off from now on, but for those that the script has a handler for; which."""
        if threading.current_thread() is not threading.main_thread():
            return ()
        if not self._signals:
            os.register_at_fork(after_in_child=self.restore)
        for signum in signals:
            if signal.getsignal(signum) == signal.SIG_DFL:
                signal.signal(signum, self._caught)
                self._signals.add(signum)
        return tuple(sorted(self._signals.intersection(signals)))

    @property
    def waits(self) -> float | None:
        """Seconds for which a signal has been put off, None if there is none."""
        return time.monotonic() - self._at if self._came else None

    def obey(self) -> None:
        """End by the signal that came."""
        signum = self._came
        self.restore()
        signal.raise_signal(signum)

    def restore(self) -> None:
        """Signals do what they did before."""
        for signum in self._signals:
            if signal.getsignal(signum) == self._caught:
                signal.signal(signum, signal.SIG_DFL)
        self._signals.clear()

    def _caught(self, signum: int, frame: Any) -> None:
        again = self._came != 0
        self._came = signum
        if again:
            self.obey()
        self._at = time.monotonic()


_put_off = PutOff()
"""Of this process, whichever Checkpointer it has."""


class Departure:
    """What one rank does when its node, or another one, leaves."""

    def __init__(self, line: Line, signals: Iterable[int], put_off: PutOff = _put_off) -> None:
        """`signals`: those to put off."""
        self._line = line
        self._put_off = put_off
        self._last = NONE  # the newest step
        self._answered = NONE  # the step that was asked for last, and saved or missed
        self._is_saved = False
        if mine := put_off.install(signals):
            line.say(PutsOff(mine))

    def goes_on_from(self, step: int) -> None:
        """Training goes on from this step."""
        self._last = step

    def is_asked(self, asked: int, step: int) -> bool:
        """Whether this step is to be saved, whatever is due. `asked`: the segment's word."""
        before, self._last = self._last, step
        if asked not in (NONE, self._answered) and asked <= step:
            self._answered = asked
            self._is_saved = False
            if before < asked:
                return True
            self._line.say(Missed(asked, step))
        waits = self._put_off.waits
        if waits is None:
            return False
        if self._is_saved:
            self._put_off.obey()
        return asked in (NONE, self._answered) and waits >= WORD_LIMIT

    def answer(self, asked: int, step: int, *, saved: bool) -> None:
        """What was asked for is saved, or could not be."""
        self._is_saved = saved
        if not saved and asked != NONE:
            self._line.say(Missed(asked, step))

    @property
    def is_ending(self) -> bool:
        """Whether a signal was put off until now."""
        return self._put_off.waits is not None

    def end(self) -> None:
        """End by the signal that was put off."""
        self._put_off.obey()
