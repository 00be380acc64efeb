"""The last words of a failed job, in torchrun's layout, because people and tools search for it.

What is different is the content (docs/torchrun.md): the root cause is the whole
job's, found by the master, not the local failure with the smallest whole second; and ranks that
were killed because another one had failed are not listed as failures.

What the user reads when a job ends: torchrun's summary, or one sentence.

The story of a job as its user reads it on this node: who came, what was lost, what it cost.

A restart is one line when the ranks go on (two where nodes came or went: the cause first). "Go on"
is the moment at which a rank has said from which step it goes on; where scripts do not say that,
the moment at which the last rank runs. What is not known is left out.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final

from elasticrun.agent.runtime import in_thread
from elasticrun.agent.workers.events import EventLog
from elasticrun.agent.workers.exits import signal_name, write_own, write_own_words
from elasticrun.agent.workers.ranks import directed
from elasticrun.config import EXIT_FINAL, EXIT_OK, EXIT_SAVED, AgentConfig
from elasticrun.core.events import Exit
from elasticrun.core.rounds.failures import is_alike
from elasticrun.core.words import some
from elasticrun.operator_log import StderrWriter, last_word, logger
from elasticrun.wire.messages import Failure, FailureKind, Start

HEADLINE: Final = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
"""How Python shows torchrun's exception; the blank is followed by the line break below."""

NO_OTHERS: Final = "  <NO_OTHER_FAILURES>"
MAX_WIDTH: Final = 60
"""Borders are as wide as the longest line, and no wider than this."""


def child_failed(name: str, failures: Sequence[Failure], root: Failure) -> str:
    """The whole text: headline and `format_failures`. `name` is the script as the user gave it."""
    return HEADLINE + format_failures(name, failures, root)


def format_failures(name: str, failures: Sequence[Failure], root: Failure) -> str:
    """What `str()` of torch's ChildFailedError gives for the same failures (it begins with a line
    break). `root` is shown apart and may be, but need not be, among `failures`."""
    alike = [f for f in failures if f != root and is_alike(f, root)]
    shown = [f for f in failures if f == root or f.kind is not FailureKind.STOPPED]
    shown = [f for f in shown if f not in alike]
    if root not in shown:
        shown.insert(0, root)
    title = f"{name} FAILED"
    blocks = [_block(index, failure) for index, failure in enumerate(shown)]
    width = max(len(line) for text in (title, *blocks) for line in text.split("\n"))
    border, rule = "=" * min(width, MAX_WIDTH), "-" * min(width, MAX_WIDTH)
    place = shown.index(root)
    others = blocks[:place] + blocks[place + 1 :]
    if alike:
        others.append(f"  the same on {ranks(sorted(f.rank for f in alike))}")
    return "\n".join(
        (
            "",
            border,
            title,
            rule,
            "Failures:",
            *(others or [NO_OTHERS]),
            rule,
            "Root Cause (first observed failure):",
            blocks[place],
            border,
        )
    )


def ranks(numbers: Sequence[int]) -> str:
    """`rank 1`, `ranks 1 and 2`, `ranks 1, 2 and 5`."""
    *most, last = map(str, numbers)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _block(index: int, failure: Failure) -> str:
    signal_text = f" ({signal_name(failure.exitcode)})" if failure.exitcode < 0 else ""
    if signal_text == " (<N/A>)":
        signal_text = ""
    moment = datetime.fromtimestamp(failure.time_us // 1_000_000)  # noqa: DTZ006 (for people here)
    text = failure.traceback.replace("\n", "\n  ") or failure.message
    return "\n".join(
        (
            f"[{index}]:",
            f"  time      : {moment.isoformat(sep='_')}",
            f"  host      : {failure.host}",
            f"  rank      : {failure.rank} (local_rank: {failure.local_rank})",
            f"  exitcode  : {failure.exitcode} (pid: {failure.pid}) {signal_text}",
            f"  error_file: {failure.error_file or '<N/A>'}",
            f"  traceback : {text}",
        )
    )


FILE_LIMIT: Final = 2.0
"""Seconds for our own error file; the disk may hang."""

TELL_LIMIT: Final = 20.0
"""Seconds that a frozen terminal may hold up the end; everything else is done by then."""


EVENTS_LIMIT: Final = 2.0
"""Seconds for the last events, which quote error files."""


async def events(
    log: EventLog, start: Start | None, pids: Mapping[int, int], outcome: Exit, seconds: float
) -> None:
    """The agent's last events, one for each rank of its last round and one of its own."""
    own = [failure for failure in outcome.failures if failure.pid in pids.values()]
    ok, now_ms = outcome.code == EXIT_OK, time.time_ns() // 10**6

    def record() -> None:
        log.ended(start, pids, own, succeeded=ok, run_seconds=seconds, now_ms=now_ms)

    with contextlib.suppress(TimeoutError):
        await in_thread(record, limit=EVENTS_LIMIT, name="events")


async def tell(
    config: AgentConfig, outcome: Exit, writer: StderrWriter, limit: float, *, ran: bool
) -> None:
    """Print the outcome and write the launcher's own error file, if it was given one; `limit`
    seconds for a frozen terminal. `ran`: ranks were started here."""
    if outcome.code == EXIT_OK:
        if not ran:  # a spare; or a second job at the endpoint of the first, by mistake
            logger.warning("no rank was started here: the job ended without needing this node")
        logger.info("the job is over: %s", outcome.reason)
        writer.flush(1.0)
        return
    with contextlib.suppress(TimeoutError, OSError):
        await in_thread(lambda: _error_file(outcome), limit=FILE_LIMIT, name="own-error-file")
    if outcome.failures:
        root = outcome.failures[0]
        if outcome.reason:
            logger.error("%s", directed(outcome.reason))
        if outcome.code == EXIT_FINAL:
            logger.error("ended with 93: another try cannot help")
        if not config.called:
            writer.write(child_failed(config.entry.target, outcome.failures, root) + "\n")
    elif not config.called:
        last_word(sentence(outcome))
    await in_thread(lambda: writer.flush(limit), name="flush")


def sentence(outcome: Exit) -> str:
    """The reason in one sentence, for an end that no rank caused."""
    if outcome.signum:
        name = signal.Signals(outcome.signum).name
        ended = f"ended by {name} ({outcome.signum}); the ranks have been shut down"
        saved = outcome.code == EXIT_SAVED
        return f"{ended}, and the step that all have saved is in storage" if saved else ended
    return directed(outcome.reason) or f"ended with exit code {outcome.code}"


def _error_file(outcome: Exit) -> None:
    if outcome.failures:
        write_own(outcome.failures[0], os.environ)
    else:
        kind = "SignalException" if outcome.signum else "RuntimeError"
        write_own_words(kind, sentence(outcome), time.time_ns() // 1000, os.environ)


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
