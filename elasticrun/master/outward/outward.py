"""All that goes out of the master on its own account, as its configuration asks for."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from elasticrun.config import MasterConfig
from elasticrun.core.events import JobOver
from elasticrun.core.sight.picture import IncidentRow, Picture, VerdictRow
from elasticrun.master.outward.incident_files import IncidentFiles
from elasticrun.master.outward.result import result_of
from elasticrun.wire import user_folder

if TYPE_CHECKING:
    from elasticrun.master.outward.notify import Notifier

END_LIMIT: Final = 1.0
"""Seconds that the master's end waits for each of them."""

MAX_WORD: Final = 64
"""Characters of the job's id in the name of its folder."""


class Outward:
    """Files of incidents, events to another program."""

    def __init__(self, config: MasterConfig, *, hosted: bool = False) -> None:
        """`hosted`: an agent has started this master, whose terminal shows what it says."""
        self._notifier: Notifier | None = None
        if config.on_event:
            from elasticrun.master.outward.notify import Notifier  # few jobs ask for it

            self._notifier = Notifier(config.on_event, config.job_id)
        self._told: tuple[int, bool] = (0, False)  # the newest incident, and whether it was over
        self._files = IncidentFiles(_name(config), config.log_dir, tells=hosted)

    @property
    def folder(self) -> str:
        """Where the incidents of this job are; "" nowhere."""
        return str(self._files.folder or "")

    def filed(self, row: IncidentRow) -> None:
        """An incident has begun, goes on or is over."""
        self._files.put(row)
        state = (row.number, row.over)
        if self._notifier is not None and state > self._told:
            self._told = state
            self._notifier.put("incident", incident=msgspec.to_builtins(row))

    def judged(self, verdict: VerdictRow, over: bool) -> None:
        """The job stands still, and why; or it does so no more."""
        if self._notifier is not None:
            self._notifier.put("hang", verdict=msgspec.to_builtins(verdict), over=over)

    def over(self, end: JobOver, found: Picture) -> None:
        """The job has ended, and this is the last of it."""
        self._files.put(result_of(end, found))
        if self._notifier is not None:
            self._notifier.put("end", exit_code=end.exit_code, reason=end.reason)

    def close(self) -> None:
        """Wait a moment for what is under way, the first time; blocks."""
        self._files.close(END_LIMIT)
        notifier, self._notifier = self._notifier, None
        if notifier is not None:
            notifier.close(END_LIMIT)


def _name(config: MasterConfig) -> str:
    """One for all masters of a launch."""
    launch = Path(config.record_dir).name.removeprefix(user_folder.PREFIX) or str(os.getpid())
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', config.job_id)[:MAX_WORD]}-{launch}"
