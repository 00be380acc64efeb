"""What the user reads when a job ends: torchrun's summary, or one sentence."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from typing import Final

from elasticrun.agent.directions import directed
from elasticrun.agent.errorfiles import write_own, write_own_words
from elasticrun.agent.events import EventLog
from elasticrun.agent.summary import child_failed
from elasticrun.agent.threads import in_thread
from elasticrun.config import EXIT_FINAL, EXIT_OK, EXIT_SAVED, AgentConfig
from elasticrun.core.effects import Exit
from elasticrun.operator_log import StderrWriter, last_word, logger
from elasticrun.wire.messages import Start

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
