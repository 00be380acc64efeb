"""What the user of this node reads while the job runs: who came, what was lost, what it cost, what
is waited for and for how long, and what looks for the cause where somebody cannot be reached.

A restart is one line when the ranks go on (two where nodes came or went: the cause first). "Go on"
is the moment at which a rank has said from which step it goes on; where scripts do not say that,
the moment at which the last rank runs. What is not known is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from elasticrun.agent.runtime import Timer
from elasticrun.core.words import some
from elasticrun.core.worker.states import GroupStatus, State
from elasticrun.wire.messages import Start

_NO_MASTER: Final = ("no master answer", "no job master answer", "does not answer this node")
_NO_NODE: Final = "nothing was heard for"

NOTHING: Final = "nothing"
"""What a rank says that goes on from no step at all (wire.snapshots.Restored)."""

LEAVING: Final = 1.0
"""Seconds after which it is told that a node that is to leave waits for its ranks to save a step: a
Ctrl-C whose step is saved sooner is one line, that of the end."""

SLOW_START: Final = 1.0
"""Seconds from which on it is said how long a restarted script took to its first step."""

SOON: Final = 3.0
"""Seconds after which a wait for other nodes, or for ranks to end, is told."""

LATE: Final = 10.0
"""The same for every other wait."""

AGAIN: Final = 60.0
"""Seconds after which it is told again, if it lasts."""

FOR_NODES: Final = "waiting for nodes: "

LAST_CALL: Final = "last call: "

_ENDS: Final = (State.STOPPING, State.ENDING)

_WAITS: Final = (State.PREPARING, State.JOINED, *_ENDS)


def directed(sentence: str, dial: object = "") -> str:
    """The sentence, with what looks for the cause at its end if it is about somebody who cannot be
    reached. `dial`: where the master is looked for, if that is not known to the reader."""
    if any(words in sentence for words in _NO_MASTER):
        where = f" --rdzv-endpoint={dial}" if dial else ""
        return f"{sentence}; to find out why, run here: elasticrun doctor{where}"
    if _NO_NODE in sentence:
        return f"{sentence}; to find out why, run on that node: elasticrun doctor"
    return sentence


class Story:
    """Call its methods as things happen, with monotonic seconds; `say` gets each line. `most`:
    restarts that the user has given the job."""

    def __init__(self, *, most: int, several: bool, say: Callable[[str], None]) -> None:
        self._most = most
        self._several = several
        self._say = say
        self._last: Start | None = None
        self._broke: tuple[float, int] | None = None  # since when no rank trains, newest step
        self._words = ""  # what a restart costs, for the line that is told when the ranks go on
        self._told = False  # that line, in this life
        self._newest = -1  # step that all ranks had come to, as the master knows
        self._ran: float | None = None  # since when restarted ranks run
        self._grows = False  # nodes came: nothing was lost that would be recovered
        self._tells_steps = False  # ranks here have said from where they go on

    def broke(self, newest: int, now: float) -> None:
        """Ranks have failed here, or are told to stop. `newest`: the newest step that they have
        come to, -1: unknown."""
        since, before = self._broke or (now, -1)
        self._broke = (since, max(before, newest))

    def starts(self, start: Start, now: float) -> None:
        """Ranks of this round are about to be started."""
        last, self._last = self._last, start
        self._newest, self._ran = start.newest, None
        if self._broke is not None and start.down:  # the master knows when that began elsewhere
            self._broke = (min(self._broke[0], now - start.down), self._broke[1])
        self._grows = last is not None and start.world_size > last.world_size
        size = f"{some(start.group_world_size, 'node')}, world size {start.world_size}"
        self._words, self._told = "", False
        if start.round.number == 1:
            if self._several:
                self._say(f"the job starts: {size}")
        elif last is None:
            self._say(f"this node joined: {size}")
        elif start.restart_count > last.restart_count:
            why = f" ({start.why})" if start.why else ""
            grown = f", with {size}" if start.world_size != last.world_size else ""
            self._words = f": restart {start.restart_count} of {self._most}{why}{grown}"
        else:
            why = start.why or "the ranks were stopped"
            then = "; " if ": " in why else ": "
            told = f"{why}{then}restarting the ranks with {size} (no restart used)"
            self._say(directed(told))

    def running(self, now: float) -> None:
        """The last rank of this node runs."""
        self._ran = now if self._last is not None and self._broke is not None else None
        if not self._tells_steps:
            self._tell("restarted", "", now)

    def trains(self, now: float) -> None:
        """A rank of this life has told its first step."""
        ran, self._ran = self._ran, None
        if ran is not None and now - ran >= SLOW_START:
            self._say(f"the script took {now - ran:.1f} s to its first step")

    def resumed(self, step: int, source: str, now: float) -> None:
        """A rank goes on from this step; the first one counts."""
        self._tells_steps = True
        newest = -1 if self._broke is None else max(self._newest, self._broke[1])
        if source != NOTHING:
            again = f"resumed at step {step}"
            again += f", {some(newest - step, 'step')} repeated" if newest >= step else ""
        else:
            again = f"from the beginning, {some(newest, 'step')} repeated" if newest > 0 else ""
        if self._broke is not None or source != NOTHING:
            self._tell("restarted" if self._grows else "recovered", again, now)

    def _tell(self, verb: str, again: str, now: float) -> None:
        """Once in a life of the ranks: that they go on."""
        if self._told:
            return
        words = again
        if self._broke is not None:  # else it is the first life of ranks here
            words = f"{verb} in {now - self._broke[0]:.2f} s{self._words}"
            words += f"; {again}" if again else ""
        self._words, self._broke = "", None
        if words:
            self._told = True
            self._say(words)


class LongWaits:
    """One line per reason that has stood for a while, and one a minute from then on: `say` gets
    the newest picture then, for `in_words`."""

    def __init__(self, say: Callable[[GroupStatus], None]) -> None:
        self._say = say
        self._seen: tuple[State, str] | None = None
        self._status: GroupStatus | None = None
        self._timer = Timer()

    def look(self, status: GroupStatus) -> None:
        """To be called with the brain's picture whenever it may have changed."""
        self._status = status
        if self._seen == (status.state, status.reason):
            return
        self._seen = (status.state, status.reason)
        self.close()
        if _leaves(status):
            self._timer.after(LEAVING, self._tell)
        elif status.state in _WAITS and status.reason:
            quick = status.state in _ENDS or status.reason.startswith((FOR_NODES, LAST_CALL))
            self._timer.after(SOON if quick else LATE, self._tell)

    def _tell(self) -> None:
        if self._status is not None:
            self._say(self._status)
        self._timer.after(AGAIN, self._tell)

    def close(self) -> None:
        """Say no more."""
        self._timer.cancel()


def _leaves(status: GroupStatus) -> bool:
    """It runs on only until its ranks have saved a step."""
    return status.state is State.RUNNING and status.wait_ends is not None


def in_words(status: GroupStatus, place: str, now: float) -> str:
    """What is said of a wait at `now`."""
    left = 0.0 if status.wait_ends is None else status.wait_ends - now
    if _leaves(status):
        lost = f"{status.master_lost}; this node leaves"
        limit = f"in {max(left, 0):.0f} s at most; a second signal ends it at once"
        return f"{lost if status.master_lost else status.reason}, {limit}"
    if status.state in _ENDS:
        limit = f"; killed in {left:.0f} s" if left > 0 else ""
        return f"{status.reason}: waiting for the ranks to end{limit}"
    reason = status.reason.removeprefix(FOR_NODES)
    if reason != status.reason or reason.startswith(LAST_CALL):
        reason = f"rendezvous {place}: {reason}"
    return f"{reason}, {left:.0f} s left" if left > 0 else reason
