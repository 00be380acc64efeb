"""A node leaves: a rank's part in it.

All ranks save the first step from the one on that the agent has written into the segment's
`save_at`; each finds that out by itself, at a step that is the same for all. A rank that was past
it already says so.

Where a scheduler signals every process, the signal comes to the rank too. It is *put off*: the rank
ends by it at its next step, once the step that is asked for is saved, or after WORD_LIMIT without a
word of one. So only where the script has left the signal alone. A second one is obeyed at once, but
for a SIGTERM that Slurm says twice. The agent knows who puts signals off, and does not wait for
them when it ends a rank itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from elasticrun.checkpointing.line import Line, LineError
from elasticrun.shm.segment import NONE
from elasticrun.wire.snapshots import Missed, PutsOff
from elasticrun.wire.types import SAID_AGAIN

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
        self._handler = self._caught  # a method is another object each time it is looked up
        self._is_hooked = False
        self._came = 0
        self._at = 0.0
        self._is_due = False
        self.holder: object = None
        """Who asked last; whoever was before is not to take it back."""

    def install(self, signals: Iterable[int]) -> tuple[int, ...]:
        """Put these off from now on, but for those that the script has a handler for; which."""
        if not _is_main_thread():
            return ()
        if not self._is_hooked:
            self._is_hooked = True
            os.register_at_fork(after_in_child=self._forked)
        wanted = set(signals)
        for signum in wanted - _handled():
            if signal.getsignal(signum) == signal.SIG_DFL:
                signal.signal(signum, self._handler)
                self._signals.add(signum)
        return tuple(sorted(self._signals & wanted))

    def taken_over(self) -> bool:
        """Whether the script has made a handler of its own for one of them since the last look."""
        taken = {one for one in self._signals if signal.getsignal(one) is not self._handler}
        self._signals -= taken
        return bool(taken)

    @property
    def signals(self) -> tuple[int, ...]:
        """Those that are put off."""
        return tuple(sorted(self._signals))

    @property
    def waits(self) -> float | None:
        """Seconds for which a signal has been put off, None if there is none."""
        return time.monotonic() - self._at if self._came else None

    def obey(self) -> None:
        """End by the signal that came; from another thread than the main one, as a second one."""
        signum = self._came
        self._is_due = True
        if _is_main_thread():
            self._came = 0  # a handler that the script has made since may go on
        self.restore()
        # to the process, not to this thread: Linux gives it to the main one, and what that waits in
        # is interrupted
        os.kill(os.getpid(), signum)

    def restore(self) -> None:
        """Signals do what they did before."""
        if not _is_main_thread():
            return
        for signum in self._signals:
            if signal.getsignal(signum) is self._handler:
                signal.signal(signum, signal.SIG_DFL)
        self._signals.clear()

    def _forked(self) -> None:
        """In a child: what has come was for its parent."""
        self.restore()
        self._came = 0

    def _caught(self, signum: int, frame: Any) -> None:
        if self._came and (self._is_due or not self._is_said_again(signum)):
            self._came = signum
            self.obey()
        elif not self._came:
            self._came, self._at, self._is_due = signum, time.monotonic(), False

    def _is_said_again(self, signum: int) -> bool:
        """Whether this is no second signal: Slurm says SIGTERM twice, at a time limit."""
        same = signum == signal.SIGTERM == self._came
        return same and time.monotonic() - self._at < SAID_AGAIN


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _handled() -> set[int]:
    """Signals that this process has a handler for. Python knows of its own alone: faulthandler and
    a JVM make theirs without it."""
    with suppress(OSError, ValueError), open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigCgt:"):
                mask = int(line.split()[1], 16)
                return {signum for signum in range(1, 65) if mask >> (signum - 1) & 1}
    return set()


_put_off = PutOff()
"""Of this process, whichever Checkpointer it has."""


class Departure:
    """What one rank does when its node, or another one, leaves."""

    def __init__(self, line: Line, signals: Iterable[int], put_off: PutOff = _put_off) -> None:
        """`signals`: those to put off."""
        self._line = line
        self._put_off = put_off
        self._last = NONE  # the newest step
        self.answered = NONE
        """The step that was asked for last, and saved or missed."""
        self._is_saved = False
        self._by_itself = False  # nobody has asked for what is saved now
        put_off.holder = self
        if mine := put_off.install(signals):
            line.say(PutsOff(mine))

    def goes_on_from(self, step: int) -> None:
        """Training goes on from this step."""
        self._last = step

    def is_asked(self, asked: int, step: int) -> bool:
        """Whether this step is to be saved, whatever is due. `asked`: the segment's word."""
        before, self._last = self._last, step
        self._by_itself = False
        if self._put_off.taken_over():
            self._line.say(PutsOff(self._put_off.signals))
        is_ahead = asked not in (NONE, self.answered)
        if is_ahead and asked <= step:
            self.answered, self._is_saved, is_ahead = asked, False, False
            if before < asked:
                return True
            self._line.say(Missed(asked, step))
        waits = self._put_off.waits
        if waits is None or is_ahead:
            return False
        if self._is_saved:
            self._put_off.obey()
        self._by_itself = waits >= WORD_LIMIT
        return self._by_itself

    def answer(self, step: int, *, saved: bool) -> None:
        """What was asked for is saved, or could not be: then another step is named."""
        self._is_saved = saved
        if not saved and not self._by_itself:
            self._line.say(Missed(self.answered, step))

    @property
    def is_ending(self) -> bool:
        """Whether a signal was put off until now."""
        return self._put_off.waits is not None and (self._is_saved or self._by_itself)

    def end(self) -> None:
        """End by the signal that was put off."""
        self._put_off.obey()

    def close(self) -> None:
        """No step comes any more: signals are as before, and one that was put off is obeyed."""
        if self._put_off.holder is not self:
            return
        if self._put_off.signals:
            with suppress(LineError):
                self._line.say(PutsOff(()))
        if self._put_off.waits is not None:
            self._put_off.obey()
        self._put_off.restore()
