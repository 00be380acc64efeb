"""Composes what the master writes or sends unasked: run folder, events, TensorBoard, last words."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from elasticrun.config import MasterConfig
from elasticrun.core.events import FoundSlow, JobOver, Note
from elasticrun.core.sight.picture import IncidentRow, Picture, VerdictRow
from elasticrun.host.runs.layout import RunResult
from elasticrun.host.runs.opening import OpenRun, RunRefused
from elasticrun.master.outward.record import (
    last_words,
    name_of,
    open_again,
    open_fresh,
    open_placed,
    result_of,
    run_folder_path,
)
from elasticrun.master.outward.run_files import RunFiles
from elasticrun.wire.messages import Metrics

if TYPE_CHECKING:
    from elasticrun.master.outward.notify import Notifier
    from elasticrun.master.outward.tensorboard import TensorBoard

END_LIMIT: Final = 1.0
"""Seconds that the master's exit waits for each of: TensorBoard, the events."""

RESULT_LIMIT: Final = 4.0
"""Seconds that it waits for the run folder, on a busy machine or disk: without its result the job
counts as lost."""

OPEN_LIMIT: Final = 30.0
"""Seconds for opening the run folder that the user named."""


class Outward:
    """Writes the run folder and sends events to another program."""

    def __init__(self, config: MasterConfig, *, hosted: bool = False) -> None:
        """`hosted`: an agent started this master, and shows its log on the user's terminal."""
        self._config = config
        self._hosted = hosted
        self._notifier = self._make_notifier(name_of(config))
        self._tensorboard: TensorBoard | None = None
        self._sent_state = (0, False)  # the newest incident, and whether it was over
        self._files = RunFiles(partial(open_fresh, config, hosted), config.log_dir, logs=hosted)
        self._run: OpenRun | None = None  # the run folder that the user named
        self._is_first_step = False  # the next step is the job's first one
        self._result: RunResult | None = None  # for the last-words file

    async def open(self, *, is_successor: bool) -> str:
        """Open the run folder that the user named, if any. Returns a sentence if its job has
        already succeeded and is not to run again; else "". Raises RunRefused if it is unusable.

        `is_successor`: an earlier master of this job used the folder, so ranks may be running. Then
        nothing is refused; an unusable folder is retried at each write."""
        config, folder = self._config, self._config.launch.run.folder
        self._is_first_step = not is_successor
        if not folder:
            return ""
        if is_successor:
            again = partial(open_again, config, self._hosted)
            self._files = RunFiles(again, config.log_dir, logs=self._hosted)
            return ""
        try:
            async with asyncio.timeout(OPEN_LIMIT):
                found = await asyncio.to_thread(open_placed, config, self._hosted)
        except TimeoutError:
            raise RunRefused(f"{folder} has not answered for {OPEN_LIMIT:g} s") from None
        except OSError as wrong:
            raise RunRefused(f"--run-dir: {folder} cannot be used: {wrong}") from None
        if isinstance(found, str):
            return found
        self._run = run = found
        self._notifier = self._make_notifier(run.job.name)
        self._files = RunFiles(lambda: run, config.log_dir, logs=self._hosted)
        return ""

    def _make_notifier(self, name: str) -> Notifier | None:
        """A notifier, with `name` as the job's name in its events; None if not configured."""
        if not self._config.launch.on_event:
            return None
        from elasticrun.master.outward.notify import Notifier  # late: few jobs use it

        return Notifier(self._config.launch.on_event, self._config.identity.job_id, name)

    @property
    def run_folder(self) -> str:
        """The path of the job's run folder, which may not exist yet; "": this user can have
        none."""
        return run_folder_path(self._config)

    @property
    def job_name(self) -> str:
        """The job's name for people."""
        return self._run.job.name if self._run is not None else name_of(self._config)

    def close_files(self) -> None:
        """The job had already ended: write nothing into the run folder from now on."""
        self._files.close(0.0)

    def start(self) -> None:
        """Create the run folder and start TensorBoard, now that the master serves."""
        self._files.create()
        if logdir := self._config.launch.run.tensorboard:
            from elasticrun.master.outward.tensorboard import TensorBoard

            self._tensorboard = TensorBoard(
                logdir, self._config.status_host, self._files.tensorboard
            )

    def formed(self, endpoint: str) -> None:
        """Add to the job's record what is known at its first round; `endpoint`: host and port of
        this master."""
        self._files.formed(endpoint)

    def noted(self, note: Note) -> None:
        """Write a note to `events.jsonl`."""
        self._files.noted(note)

    def metrics(self, report: Metrics) -> None:
        """Write metrics of rank 0 to `progress.csv`."""
        self._files.metrics(report)

    def stepped(self, number: int, step: int) -> None:
        """Write that training has reached this step in round `number`, if rank 0 reports no
        metrics."""
        self._files.stepped(number, step)
        if self._is_first_step:
            self._is_first_step = False
            self._files.began(step)

    def filed(self, row: IncidentRow) -> None:
        """Write an incident that has started, changed, or is over; send it when it starts and when
        it is over."""
        self._files.filed(row)
        state = (row.number, row.over)
        if self._notifier is not None and state > self._sent_state:
            self._sent_state = state
            self._notifier.put("incident", incident=msgspec.to_builtins(row))

    def judged(self, verdict: VerdictRow, over: bool) -> None:
        """Send the verdict on a hang, or (`over`) that the hang is over."""
        if self._notifier is not None:
            self._notifier.put("hang", verdict=msgspec.to_builtins(verdict), over=over)

    def slow(self, found: FoundSlow) -> None:
        """Send that a node is slow but stays in the job."""
        if self._notifier is not None:
            self._notifier.put("slow", node=found.node, sentence=found.sentence)

    def over(self, end: JobOver, found: Picture) -> None:
        """Write and send the job's result; the last event of a job."""
        self._result = result = result_of(end, found)
        self._files.over(result)
        if self._notifier is not None:
            self._notifier.put("end", exit_code=end.exit_code, reason=end.reason)

    def close(self) -> None:
        """Write the last-words file, wait for pending work within its limits, and stop. Blocks;
        idempotent."""
        result, self._result = self._result, None
        if self._config.last_words and result is not None:
            with contextlib.suppress(OSError):
                Path(self._config.last_words).write_bytes(last_words(result))
        self._files.close(RESULT_LIMIT)
        if self._run is not None:
            self._run.close()
        if self._tensorboard is not None:
            self._tensorboard.close(END_LIMIT)
        notifier, self._notifier = self._notifier, None
        if notifier is not None:
            notifier.close(END_LIMIT)
