"""When the master ends: the outcome is told, nobody comes any more, or its owner is gone.

over       every attached agent has hung up, or `linger` seconds later; agents whose stream is
           broken at that moment are still dialling, so then `linger` is waited out
alone      no agent for `lost` seconds (a master started by hand waits for its first for ever)
lifeline   at its EOF: at once, or with `outlive` when no agent is attached any more
signal     SIGTERM or SIGINT to a master that was started by hand
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable
from typing import Final

from elasticrun.config import EXIT_OK, EXIT_SAVED, REATTACH_GRACE
from elasticrun.core.events import JobOver
from elasticrun.core.rounds.failures import Ending, code_of

OWNER_GONE: Final = 0.5
"""Seconds without an agent after the owner's death: its own stream breaks at that moment."""


class Lifetime:
    """Holds the one timer that may end the master, and the future that says with what."""

    def __init__(
        self,
        *,
        linger: float,
        lost: float,
        hosted: bool,
        outlive: bool = False,
        dialling: Callable[[], bool] = lambda: False,
        several: Callable[[], bool] = lambda: False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        """Exit code and the sentence for the log."""
        self._linger = linger
        self._lost = lost
        self._outlive = outlive
        self._dialling = dialling
        self._several = several
        self._attached = 0
        self._outcome: JobOver | None = None
        self._missed = False
        self._hosted = hosted
        self._orphan = False
        self._timer: asyncio.TimerHandle | None = None
        if hosted:
            self._alone()

    def counted(self, attached: int) -> None:
        """So many agents are attached now."""
        self._attached = attached
        if self._outcome is not None:
            if not attached and not self._missed and not self._dialling():
                self._end(self._code(self._outcome), self._outcome.reason)
        elif attached:
            self._arm(None)
        else:
            self._alone()

    def over(self, outcome: JobOver) -> None:
        """The job's outcome is known and has been told to those who are attached."""
        if self._outcome is None and not self._missed:
            self._finish(outcome)

    def _finish(self, outcome: JobOver) -> None:
        self._outcome = outcome
        self._arm(self._linger, self._code(outcome), outcome.reason)
        self.counted(self._attached)

    def was_over(self, outcome: JobOver) -> None:
        """The job had ended when this master began. Whether its agents know, only they can say:
        they have the whole of `linger` to dial. A master started by hand goes on telling it to
        whoever comes, until it is ended by hand."""
        self._missed = True
        if self._hosted:
            self._finish(outcome)

    @property
    def is_over(self) -> bool:
        """Whether the job's outcome is known."""
        return self._outcome is not None

    @property
    def state(self) -> str:
        """How the job stands at the end of its master, in a word (`wire.run_folder.Ended`)."""
        if self._outcome is None:
            return "lost"
        return {EXIT_OK: "done", EXIT_SAVED: "saved"}.get(self._outcome.exit_code, "failed")

    def is_orphan(self, lifeline_fd: int) -> bool:
        """Whether the agent that started this master has gone: a last look at its lifeline."""
        if self._orphan or lifeline_fd < 0:
            return self._orphan
        poller = select.poll()
        poller.register(lifeline_fd, select.POLLIN)
        return bool(poller.poll(0)) and not os.read(lifeline_fd, 1)

    def _code(self, outcome: JobOver) -> int:
        """A hosted master that saw its job to the end has done its own work, however that was."""
        return EXIT_OK if self._hosted else outcome.exit_code

    def owner_gone(self) -> None:
        """The lifeline has reached its end."""
        self._orphan = True
        if not self._outlive:
            self._end(EXIT_OK, "the agent that started this master has ended")
            return
        if not self._attached:
            self._alone()

    def signalled(self, signum: int, name: str) -> None:
        """A person ends a master that was started by hand."""
        self._end(128 + signum, f"received {name}")

    def _alone(self) -> None:
        if self._outcome is not None or self._missed:
            return
        if self._orphan:
            # Other nodes, if there ever were any, may only have lost their streams for a moment.
            wait = REATTACH_GRACE if self._several() else OWNER_GONE
            self._arm(wait, EXIT_OK, "the agent that started this master and all others have gone")
        else:
            code = code_of(Ending.TOO_FEW)
            self._arm(self._lost, code, f"no agent for {self._lost:g} s")

    def _arm(self, after: float | None, code: int = 0, reason: str = "") -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if after is not None:
            self._timer = self._loop.call_later(after, self._end, code, reason)

    def _end(self, code: int, reason: str) -> None:
        self._arm(None)
        if not self.done.done():
            self.done.set_result((code, reason))
