"""The end of an agent: its shutdown steps within one time limit, and the summary for the user.

A failed step does not prevent the next one. The user reads torchrun's failure summary, which people
and tools search for, or one sentence.

The content differs from torchrun's (docs/torchrun.md). The root cause is that of the whole job,
found by the master, not the local failure with the smallest timestamp in whole seconds. Ranks that
were killed because another rank had failed are not listed as failures.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

from elasticrun.agent.job_log import directed
from elasticrun.agent.runtime import awaited, in_thread
from elasticrun.agent.workers.events import EventLog
from elasticrun.agent.workers.exits import read_error_file, signal_name, write_own, write_own_words
from elasticrun.config import EXIT_FAILED, EXIT_FINAL, EXIT_OK, EXIT_SAVED
from elasticrun.core.events import Exit
from elasticrun.core.reasons import Saved, code as code_of_reason, is_by_operator, unreachable_side
from elasticrun.core.rounds.failures import ended_before, is_alike, what_happened
from elasticrun.host.log import NOTICE, log_last_word, logger
from elasticrun.host.runs.last_word import LastWord, write
from elasticrun.host.system.sweep import kill_leftovers
from elasticrun.wire import env
from elasticrun.wire.messages import Failure, FailureKind, Start

if TYPE_CHECKING:
    from elasticrun.agent.context import NodeContext
    from elasticrun.agent.logs.output import RankOutput
    from elasticrun.agent.workers.ranks import Ranks

HEADLINE: Final = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
"""How Python shows torchrun's exception; a line break follows the space."""

HOW_TO_RESTART: Final = "0 is the default, as under torchrun; --max-restarts=3 allows 3 restarts"
"""The last line of a failed job whose user did not set --max-restarts, if a restart may help."""

NOT_SAVED: Final = (
    "the last steps may not be saved: the same command continues from the newest checkpoint"
)
HOW_TO_CONTINUE: Final = "run the same command again to continue from it"

NO_OTHERS: Final = "  <NO_OTHER_FAILURES>"
MAX_WIDTH: Final = 60
"""Borders are as wide as the longest line, at most this."""

FILE_LIMIT: Final = 2.0
"""Seconds for writing our own error file; the disk may hang."""

PRINT_LIMIT: Final = 20.0
"""Seconds that a frozen terminal may delay the exit; all other steps are done by then."""

EVENTS_LIMIT: Final = 2.0
"""Seconds for writing the last events, which quote error files."""

TOTAL_LIMIT: Final = 20.0
"""Seconds for all steps together. Waits for others are excluded: processes left by finished ranks
get their grace period, and output is shown as long as somebody reads it. After a death signal
nothing is excluded, because the sender will SIGKILL us (Kubernetes after 30 s in all)."""

KILLED_AFTER: Final = 29.0
"""Seconds after a death signal by which shutdown should be complete, unless SIGNALLED_LIMIT allows
more."""

SIGNALLED_LIMIT: Final = 4.0
"""Minimum seconds for shutdown after a death signal. A user who gives ranks a longer grace period
has to let the sender of the signal wait this much longer before it kills the agent."""

LEAST_STEP_TIME: Final = 1.0
"""Seconds that a step always gets, even when the steps before it have used up the limit."""

SHOW_PATIENCE: Final = 5.0
"""Seconds without a reader, or without a response from the disk, until output is dropped."""

SHOW_LIMIT: Final = 10.0
"""Seconds for showing output after a death signal."""


def child_failed(name: str, failures: Sequence[Failure], root: Failure) -> str:
    """The whole text: headline and `format_failures`. `name` is the script as the user gave it."""
    return HEADLINE + format_failures(name, failures, root)


def format_failures(name: str, failures: Sequence[Failure], root: Failure) -> str:
    """The same text as `str()` of torch's ChildFailedError for these failures (it starts with a
    line break). `root` is shown separately; it may be among `failures`."""
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
        others.append(
            f"  {name_ranks(sorted(f.rank for f in alike))}: same exception as the root cause"
        )
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


def name_ranks(numbers: Sequence[int]) -> str:
    """`rank 1`, `ranks 1 and 2`, `ranks 1, 2 and 5`."""
    *most, last = map(str, numbers)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _block(index: int, failure: Failure) -> str:
    signal_text = f" ({signal_name(failure.exitcode)})" if failure.exitcode < 0 else ""
    if signal_text == " (<N/A>)":
        signal_text = ""
    when = failure.time_us // 1_000_000 or int(time.time())  # a hang has no time: use now
    at = datetime.fromtimestamp(when)  # noqa: DTZ006 (for people here)
    if who := ended_before(failure):
        who += " had exited with 0 before"
    before = f"{who} this:\n  " if who and failure.traceback else ""
    message = f"{who}; {failure.message}" if who else failure.message
    text = before + failure.traceback.replace("\n", "\n  ") or message
    return "\n".join(
        (
            f"[{index}]:",
            f"  time      : {at.isoformat(sep='_')}",
            f"  host      : {failure.host}",
            f"  rank      : {failure.rank} (local_rank: {failure.local_rank})",
            f"  exitcode  : {failure.exitcode} (pid: {failure.pid}) {signal_text}",
            f"  error_file: {failure.error_file or '<N/A>'}",
            f"  traceback : {text}",
        )
    )


async def write_last_events(
    log: EventLog, start: Start | None, pids: Mapping[int, int], outcome: Exit
) -> None:
    """Write the agent's last events: one for each rank of its last round and one for the agent."""
    own = [failure for failure in outcome.failures if failure.pid in pids.values()]
    ok, now_ms, seconds = outcome.code == EXIT_OK, time.time_ns() // 10**6, log.seconds
    # torchrun reports a failed agent when its run raises anything but a ChildFailedError
    its_own = bool(outcome.signum) or not (ok or outcome.failures)
    why = outcome_sentence(outcome) if its_own else ""

    def record() -> None:
        log.write_ended(
            *(start, pids, own), succeeded=ok, run_seconds=seconds, now_ms=now_ms, agent_failure=why
        )

    with contextlib.suppress(TimeoutError):
        await in_thread(record, limit=EVENTS_LIMIT, name="events")


async def print_outcome(
    node: NodeContext,
    outcome: Exit,
    limit: float,
    *,
    ran: bool,
    folder: str = "",
) -> None:
    """Print the outcome. After a failure, also write the launcher's own error file and its last
    word, where configured.

    `limit`: seconds for a frozen terminal. `ran`: ranks were started here. `folder`: where
    checkpoints are, "" if unknown."""
    launch, writer = node.launch, node.writer
    if outcome.code == EXIT_OK:
        if not ran:  # a spare node, or by mistake a second job at the first one's endpoint
            logger.warning("no rank was started here: the job ended without needing this node")
        logger.info("the job is over: %s", outcome.reason)
        writer.flush(1.0)
        return
    with contextlib.suppress(TimeoutError, OSError):
        await in_thread(lambda: _error_file(outcome), limit=FILE_LIMIT, name="own-error-file")
    with contextlib.suppress(TimeoutError):
        await in_thread(lambda: write(last_word_of(outcome)), limit=FILE_LIMIT, name="last-word")
    if outcome.failures:
        root = outcome.failures[0]
        if not node.called:
            writer.write(child_failed(launch.entry.target, outcome.failures, root) + "\n")
        if outcome.reason:
            logger.error("%s", directed(outcome.reason, unreachable_side(outcome.why)))
        if outcome.code == EXIT_FINAL and root.kind is not FailureKind.FINAL:  # it says so itself
            logger.error("exit code 93: do not retry this job")
        by_default = not (node.called or launch.spec.max_restarts)
        set_by_user = "max_restarts" in launch.master.sources
        unset = by_default and outcome.code == EXIT_FAILED and not set_by_user
        if unset and not await _cannot_load(root):
            logger.error("%s", HOW_TO_RESTART)
    elif not node.called:
        fine = outcome.code == EXIT_SAVED
        log_last_word(outcome_sentence(outcome, folder), NOTICE if fine else logging.ERROR)
    await in_thread(lambda: writer.flush(limit), name="flush")


def outcome_sentence(outcome: Exit, folder: str = "") -> str:
    """The reason in one sentence, for an end that no rank caused; `folder`: where checkpoints
    are."""
    where = f" in {folder}" if folder else ""
    if outcome.signum:
        name = signal.Signals(outcome.signum).name
        ended = f"ended by {name} ({outcome.signum}); the ranks have been shut down"
        if outcome.code != EXIT_SAVED:
            return f"{ended}; {NOT_SAVED}{where}" if folder else ended
        step = f"step {outcome.saved}" if outcome.saved >= 0 else "the last step"
        return f"{ended}; {step} is saved{where}: {HOW_TO_CONTINUE}"
    reason = directed(outcome.reason, unreachable_side(outcome.why))
    if isinstance(outcome.why, Saved) and is_by_operator(outcome.why):
        return f"{reason}{where}: {HOW_TO_CONTINUE}"
    return reason or f"ended with exit code {outcome.code}"


def last_word_of(outcome: Exit) -> LastWord:
    """The outcome as a record that programs read."""
    code = code_of_reason(outcome.why)
    if not outcome.failures:
        return LastWord(outcome_sentence(outcome), reason=code)
    root = outcome.failures[0]
    own = next(filter(str.strip, reversed(root.traceback.splitlines())), "") or root.message
    message = own.strip() or what_happened(root)
    text = f"rank {root.rank} on {root.host}: {message}"
    return LastWord(text, root.rank, root.host, code)


async def _cannot_load(root: Failure) -> bool:
    """Whether this node knows that Python cannot load the program or a module of it: another
    attempt would fail in the same way."""
    try:
        found = await in_thread(
            lambda: read_error_file(root.error_file), limit=FILE_LIMIT, name="error-file"
        )
    except TimeoutError:
        return False
    return found.cannot_load


def _error_file(outcome: Exit) -> None:
    if outcome.failures:
        write_own(outcome.failures[0], os.environ)
    else:
        kind = "SignalException" if outcome.signum else "RuntimeError"
        write_own_words(kind, outcome_sentence(outcome), time.time_ns() // 1000, os.environ)


class ShutdownSteps:
    """The shutdown steps. A step that fails or times out is logged, and the next one runs."""

    def __init__(self) -> None:
        self._until = math.inf
        self._signalled: float | None = None
        self._hurried = False
        self._patience: asyncio.Timeout | None = None  # of a wait for other processes

    @property
    def has_begun(self) -> bool:
        """Whether shutdown has begun."""
        return self._until < math.inf

    def note_death_signal(self) -> None:
        """Note when the first death signal arrived; later ones do not count."""
        if self._signalled is None:
            self._signalled = time.monotonic()

    def hurry(self) -> None:
        """Stop waiting for other processes, because a death signal has arrived during shutdown."""
        self._hurried = True
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(0.0)

    def start(self) -> None:
        """Start the time limit, or restart it."""
        now = time.monotonic()
        self._until = now + TOTAL_LIMIT
        if self._signalled is not None:
            self._until = min(
                self._until, max(now + SIGNALLED_LIMIT, self._signalled + KILLED_AFTER)
            )

    def time_for(self, limit: float) -> float:
        """Seconds that a step with this limit may still take; at least LEAST_STEP_TIME, or `limit`
        if that is less."""
        return min(limit, max(LEAST_STEP_TIME, self._until - time.monotonic()))

    def run_now(self, what: str, work: Callable[[], object]) -> None:
        """Run a step that does not wait."""
        try:
            work()
        except Exception:
            logger.exception("%s failed", what)

    async def run_step(self, what: str, work: Awaitable[object], limit: float | None) -> None:
        """Run a step with `limit` seconds at most; None: it has its own limit."""
        limit = None if limit is None else self.time_for(limit)
        try:
            await asyncio.wait_for(work, limit)
        except TimeoutError:
            logger.error("%s did not finish within %.3g s; giving up", what, limit)
        except Exception:
            logger.exception("%s failed", what)

    async def end_descendants(self, ranks: Ranks, grace: float, linger: float) -> None:
        """Processes left by finished ranks may run for `linger` seconds; then they get SIGTERM, and
        SIGKILL `grace` seconds later. `hurry` ends the wait."""
        await self._until_hurried(ranks.clear(grace, linger), linger + grace + 1.0)

    async def show_output(self, output: RankOutput, *, hurried: bool) -> None:
        """Show the ranks' output as long as somebody reads it. After a death signal (`hurried`: it
        has already arrived) the output gets SHOW_LIMIT seconds at most, and a disk that does not
        respond SHOW_PATIENCE more."""
        work = in_thread(lambda: output.close(SHOW_PATIENCE), name="show")
        showing = awaited(work, "showing output")
        if not hurried:
            await self._until_hurried(asyncio.shield(showing), None)
        if not showing.done():
            limit = self.time_for(SHOW_LIMIT) if hurried else SHOW_LIMIT
            output.hurry(limit)
            await asyncio.wait({showing}, timeout=limit + SHOW_PATIENCE)
        if not showing.done():
            showing.cancel()
            logger.error("the rest of the output is not shown: the disk does not respond")
            return
        showing.result()

    async def _until_hurried(self, work: Awaitable[object], limit: float | None) -> None:
        """Wait for `work`, a death signal, or `limit` seconds."""
        patience = self._patience = asyncio.timeout(0.0 if self._hurried else limit)
        try:
            async with patience:
                await work
        except TimeoutError:
            if not patience.expired():
                raise  # raised by the work
        finally:
            self._patience = None


async def end_callers_ranks(caller: str, pids: Iterable[int], limit: float) -> None:
    """End the ranks of a caller of elastic_launch: they are not our descendants, and the caller may
    be dead. `caller`: the value of their variable wire.env.CALLER. Returns after `limit` seconds at
    the latest."""
    mark = f"{env.CALLER}={caller}".encode()
    named = tuple(pids)
    with contextlib.suppress(TimeoutError):
        await in_thread(lambda: kill_leftovers(named, mark, limit), limit=limit, name="sweep")
