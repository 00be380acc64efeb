"""What the user of this node reads while the job runs: joins, losses, restarts and long waits.

A wait is logged with its reason and time limit, and with a command that finds the cause if a peer
cannot be reached. A restart is logged in two lines, one when all ranks run again and one when
training continues; if nodes were lost or joined, a line before them gives the cause. Durations and
repeated steps come from the master, so they match its incident. Unknown values are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from elasticrun.agent.runtime import Timer
from elasticrun.config import Launch, Place
from elasticrun.core.events import Note
from elasticrun.core.reasons import (
    MasterUnmet,
    MoreMayJoin,
    NodesNeeded,
    NoMaster,
    Said,
    Unreachable,
    read,
    text,
    unreachable_side,
    what_it_awaits,
)
from elasticrun.core.words import plural, recovery_times
from elasticrun.core.worker.states import ENDINGS, GroupStatus, State
from elasticrun.host.log import LEVELS, NOTICE, logger
from elasticrun.wire.messages import Recovery, Start
from elasticrun.wire.types import Endpoint

NOTHING: Final = "nothing"
"""The source that a rank reports if it restored nothing (wire.snapshots.Restored)."""

LOG_LEAVING_AFTER: Final = 1.0
"""Seconds after which the log says that a leaving node waits for its ranks to save a step. A Ctrl-C
whose step is saved sooner causes a single line, at the end."""

LOG_SOON_AFTER: Final = 3.0
"""Seconds after which a wait for other nodes or for ranks to exit, or a missing master, is
logged."""

LOG_LATE_AFTER: Final = 10.0
"""Seconds after which any other wait is logged."""

LOG_AGAIN_AFTER: Final = 60.0
"""Seconds between log lines about the same wait."""

_ENDS: Final = (State.STOPPING, State.ENDING)

_WAITS: Final = (State.PREPARING, State.JOINED, *_ENDS)


def directed(sentence: str, whom: Unreachable, dial: object = "") -> str:
    """The sentence; if it is about a peer that cannot be reached (`core.reasons.unreachable_side`),
    with the command that finds the cause appended. `dial`: the master's address, if the reader does
    not know it."""
    if whom == "master":
        where = f" --rdzv-endpoint={dial}" if dial else ""
        return f"{sentence}; to find out why, run here: elasticrun doctor{where}"
    if whom == "node":
        return f"{sentence}; to find out why, run on that node: elasticrun doctor"
    return sentence


class RoundLog:
    """Logs starts, restarts and recoveries through `log`. `most`: the value of --max-restarts;
    `several`: the job may have more than one node."""

    def __init__(self, *, most: int, several: bool, log: Callable[[str], None]) -> None:
        self._most = most
        self._several = several
        self._log = log
        self._last: Start | None = None
        self._again = False  # ranks of this node have run before
        self._words = ""  # number and cause of a restart, for the line logged when ranks run
        self._runs = self._trains = False  # already logged for this round
        self._resumed = ""  # where a rank resumed, if not logged yet

    def log_start(self, start: Start) -> None:
        """Log the start of a round, before its ranks start. A restart is logged once its ranks
        run."""
        last, self._last = self._last, start
        size = f"{plural(start.group_world_size, 'node')}, world size {start.info.world_size}"
        self._words, self._resumed = "", ""
        self._runs = self._trains = False
        self._again = last is not None
        if start.round.number == 1:
            if self._several:
                self._log(f"the job starts: {size}")
        elif last is None:
            self._log(f"this node joined: {size}")
        elif start.info.restart_count > last.info.restart_count:
            why = f" ({start.info.why})" if start.info.why else ""
            grown = f", with {size}" if start.info.world_size != last.info.world_size else ""
            self._words = f": restart {start.info.restart_count} of {self._most}{why}{grown}"
        else:
            ended = read(start.info.why, start.info.code) or Said("the ranks were stopped")
            line = f"{text(ended)}; restarting the ranks with {size} (no restart used)"
            self._log(directed(line, unreachable_side(ended)))

    def recovered(self, order: Recovery) -> None:
        """Log how long training was interrupted, as the master has measured it over all nodes."""
        if not self._again or self._last is None or order.round != self._last.round:
            return
        if not self._runs:
            self._runs = True
            self._log(f"{recovery_times(order.restarted, -1.0)}{self._words}")
        if order.first_step > 0.0 and not self._trains:
            self._trains = True
            parts = [recovery_times(-1.0, order.first_step)]
            parts += [self._resumed] if self._resumed else []
            if order.repeated > 0 or (self._resumed and order.repeated == 0):
                parts.append(f"{plural(order.repeated, 'step')} repeated")
            self._log(", ".join(parts))

    def linked_again(self) -> None:
        """Called when the link reconnects while ranks run. A new master does not know how long
        training was interrupted, so a restart that is not logged yet is logged without that."""
        if self._words and not self._runs:
            self._runs = True
            self._log(f"restarted{self._words}")

    def resumed(self, step: int, source: str) -> None:
        """Log where the first rank has resumed, unless that is part of a later line."""
        if self._resumed or (source == NOTHING and not self._again):
            return
        self._resumed = "from the beginning" if source == NOTHING else f"resumed at step {step}"
        if not self._again or self._trains:
            self._log(self._resumed)


class LongWaits:
    """Logs waits that last: one line per reason, and again every LOG_AGAIN_AFTER seconds. `log`
    receives the newest status, which `in_words` renders. A missing master is logged only after
    LOG_SOON_AFTER seconds, because a killed one is usually replaced sooner."""

    def __init__(self, log: Callable[[GroupStatus], None]) -> None:
        self._log = log
        self._absence = Timer()
        self._seen: tuple[State, str] | None = None
        self._status: GroupStatus | None = None
        self._timer = Timer()

    def update(self, status: GroupStatus) -> None:
        """Call with the state machine's status whenever it may have changed."""
        self._status = status
        if not status.master_lost:
            self._absence.cancel()
        if self._seen == (status.state, status.reason):
            return
        self._seen = (status.state, status.reason)
        self._timer.cancel()
        if _is_leaving(status):
            self._timer.after(LOG_LEAVING_AFTER, self._log_wait)
        elif status.state in _WAITS and status.reason:
            quick = status.state in _ENDS or isinstance(status.why, NodesNeeded | MoreMayJoin)
            self._timer.after(LOG_SOON_AFTER if quick else LOG_LATE_AFTER, self._log_wait)

    def noted(self, note: Note, status: GroupStatus, log: Callable[[Note], None]) -> None:
        """Log a note with `log`: at once, or after LOG_SOON_AFTER seconds if a master is missing
        and this node does not end because of it."""
        if isinstance(note.why, NoMaster) and status.state not in ENDINGS:
            self._absence.after(LOG_SOON_AFTER, log, note)
        else:
            log(note)

    def _log_wait(self) -> None:
        if self._status is not None:
            self._log(self._status)
        self._timer.after(LOG_AGAIN_AFTER, self._log_wait)

    def close(self) -> None:
        """Stop logging."""
        self._timer.cancel()
        self._absence.cancel()


class MasterAddress(Protocol):
    """Has the master's address."""

    @property
    def dial(self) -> Endpoint:
        """The address, as far as it is known."""


class OperatorMessages:
    """Logs what the operator reads about a node while its job runs. Lines about the master name its
    address; traces and pages contain the state machine's sentences unchanged."""

    def __init__(self, launch: Launch, place: Place, rendezvous: MasterAddress) -> None:
        self._join_timeout = launch.spec.join_timeout
        self._place = place
        self._rendezvous = rendezvous
        self._waits = LongWaits(self._log_long_wait)
        spec = launch.spec
        self._rounds = RoundLog(most=spec.max_restarts, several=spec.max_nodes > 1, log=notice)

    # ------------------------------------------------------------ the lifecycle of ranks

    def round_began(self, start: Start) -> None:
        self._rounds.log_start(start)

    def ranks_stopping(self) -> None:
        """No-op: the state machine's note gives the reason."""

    def ranks_gone(self, *, done: bool) -> None:
        """No-op: the state machine's note says what follows."""

    def close(self) -> None:
        """Stop logging waits."""
        self._waits.close()

    # ------------------------------------------------------------ other events

    def update(self, status: GroupStatus) -> None:
        """Call with the state machine's status whenever it may have changed."""
        self._waits.update(status)

    def noted(self, note: Note, status: GroupStatus) -> None:
        """Log a note of the state machine, now or later."""
        self._waits.noted(note, status, self._log)

    def recovered(self, order: Recovery) -> None:
        self._rounds.recovered(order)

    def resumed(self, step: int, source: str) -> None:
        self._rounds.resumed(step, source)

    def linked_again(self) -> None:
        self._rounds.linked_again()

    def no_master(self, reason: str) -> None:
        """Warn that no master has answered the first attempts to connect; called once."""
        dial = self._rendezvous.dial
        unmet = MasterUnmet(str(dial), self._join_timeout, reason)
        logger.warning("%s", directed(text(unmet), unreachable_side(unmet), dial))

    def _log(self, note: Note) -> None:
        logger.log(LEVELS.get(note.level, 20), "%s", self.directed(note))

    def directed(self, note: Note) -> str:
        """The note's text for the operator."""
        whom = "" if note.level == "info" else unreachable_side(note.why)
        return directed(note.text, whom, self._rendezvous.dial)

    def _log_long_wait(self, status: GroupStatus) -> None:
        where, dial = self._place, self._rendezvous.dial
        place = f"{where.host}:{where.port}" if where.host else str(dial)  # as the user wrote it
        line = in_words(status, place, time.monotonic())
        notice(directed(line, unreachable_side(status.why), dial))


def notice(text: str) -> None:
    """Log a line for the operator, regardless of the configured log level."""
    logger.log(NOTICE, "%s", text)


def _is_leaving(status: GroupStatus) -> bool:
    """Whether this node is leaving, with ranks that run only until they have saved a step."""
    return status.state is State.RUNNING and status.wait_ends is not None


def in_words(status: GroupStatus, place: str, now: float) -> str:
    """Render a wait as text. `now`: monotonic time, from which the seconds left are computed."""
    left = 0.0 if status.wait_ends is None else status.wait_ends - now
    if _is_leaving(status):
        lost = f"{status.master_lost}; this node leaves"
        limit = f"in {max(left, 0):.0f} s at most; a second signal ends it at once"
        return f"{lost if status.master_lost else status.reason}, {limit}"
    if status.state in _ENDS:
        limit = f"; they are killed in {left:.0f} s" if left > 0 else ""
        return f"{status.reason}: waiting for the ranks to exit{limit}"
    reason = status.reason
    if isinstance(status.why, NodesNeeded | MoreMayJoin):
        reason = f"rendezvous {place}: {what_it_awaits(status.why)}"
    return f"{reason}, {left:.0f} s left" if left > 0 else reason
