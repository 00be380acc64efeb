"""The story of a job as its user reads it on this node: who came, what was lost, what it cost.

A restart is one line when the ranks go on (two where nodes came or went: the cause first). "Go on"
is the moment at which a rank has said from which step it goes on; where scripts do not say that,
the moment at which the last rank runs. What is not known is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from elasticrun.agent.directions import directed
from elasticrun.core.wording import some
from elasticrun.wire.messages import Start

NOTHING: Final = "nothing"
"""What a rank says that goes on from no step at all (wire.snapshots.Restored)."""


class Story:
    """Call its methods as things happen; `say` gets each line. `most`: restarts that the user has
    given the job; `newest`: the newest step that ranks of this node have come to, -1: unknown."""

    def __init__(
        self,
        *,
        most: int,
        several: bool,
        say: Callable[[str], None],
        newest: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._most = most
        self._several = several
        self._say = say
        self._newest = newest
        self._clock = clock
        self._last: Start | None = None
        self._broke: tuple[float, int] | None = None  # since when no rank trains, newest step
        self._words = ""  # what a restart costs, for the line that is told when the ranks go on
        self._told = False  # that line, in this life
        self._grows = False  # nodes came: nothing was lost that would be recovered
        self._tells_steps = False  # ranks here have said from where they go on

    def broke(self) -> None:
        """Ranks have failed here, or are told to stop."""
        since, newest = self._broke or (self._clock(), -1)
        self._broke = (since, max(newest, self._newest()))

    def starts(self, start: Start) -> None:
        """Ranks of this round are about to be started."""
        last, self._last = self._last, start
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

    def running(self) -> None:
        """The last rank of this node runs."""
        if not self._tells_steps:
            self._tell("restarted", "")

    def resumed(self, step: int, source: str) -> None:
        """A rank goes on from this step; the first one counts."""
        self._tells_steps = True
        newest = -1 if self._broke is None else self._broke[1]
        if source != NOTHING:
            again = f"resumed at step {step}"
            again += f", {some(newest - step, 'step')} repeated" if newest >= step else ""
        else:
            again = f"from the beginning, {some(newest, 'step')} repeated" if newest > 0 else ""
        if self._broke is not None or source != NOTHING:
            self._tell("restarted" if self._grows else "recovered", again)

    def _tell(self, verb: str, again: str) -> None:
        """Once in a life of the ranks: that they go on."""
        if self._told:
            return
        words = again
        if self._broke is not None:  # else it is the first life of ranks here
            words = f"{verb} in {self._clock() - self._broke[0]:.2f} s{self._words}"
            words += f"; {again}" if again else ""
        self._words, self._broke = "", None
        if words:
            self._told = True
            self._say(words)
