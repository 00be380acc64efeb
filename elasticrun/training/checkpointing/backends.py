"""The two backends of a Checkpointer: with an agent, and with torch alone.

With an agent: snapshots in shared memory, checkpoints written by the node's saver. With torch alone
(torchrun, plain python): checkpoints by torch's asynchronous save, in folders with the same names.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from elasticrun.snapshots.shm.segment import NONE, VERSION
from elasticrun.snapshots.storage.manifest import ManifestError
from elasticrun.snapshots.storage.timeline import PERIODIC, restorable_steps, surplus
from elasticrun.snapshots.storage.writing import StorageError
from elasticrun.training.checkpointing.agent_connection import (
    WHOLE_LIMIT,
    AgentConnection,
    AgentConnectionError,
    Departure,
)
from elasticrun.training.checkpointing.capture import SaveOutcome, SnapshotTaker
from elasticrun.training.checkpointing.parts import StateError
from elasticrun.training.checkpointing.restore import BadShard, MemoryRestore
from elasticrun.training.checkpointing.restore_choice import (
    RankExchange,
    RankOptions,
    RestoreChoice,
)
from elasticrun.training.checkpointing.state import TrainingState
from elasticrun.wire.snapshots import (
    CannotRestore,
    RankHere,
    Remark,
    Restored,
    Resume,
    SaveFailed,
    Skipped,
)

END_LIMIT: Final = 60.0
"""Seconds that a rank waits to be killed, after it has reported that it cannot continue."""


class CheckpointBackend:
    """A backend, for one process of a rank. Methods that are not overridden are no-ops."""

    snapshots: bool  # whether it takes snapshots in memory beside checkpoints
    source = "nothing"  # where the state was restored from
    copy_seconds = 0.0  # that the newest snapshot took beside training
    knows_used = True  # whether it is known what work was used by the restored step

    def restore(self, exchange: RankExchange) -> int:
        """Restore; return the step from which training continues, 0 if there is nothing to
        restore."""
        raise NotImplementedError

    def started_at(self, step: int) -> None:
        """Note that training starts at this step without a restore."""

    def save(self, step: int, persist: bool, wait: float) -> SaveOutcome:
        """Save; anything but TAKEN means that the save was skipped."""
        raise NotImplementedError

    def prepare(self, *, wait: bool = False) -> None:
        """Prepare memory for a snapshot of the current state; later calls only continue that.
        `wait`: until it is ready."""

    def note_step(self, step: int) -> None:
        """Note that training has reached this step."""

    def is_save_requested(self, step: int) -> bool:
        """Whether a leaving node requires this step to be saved; call once a step. A pending signal
        may end the process here."""
        return False

    def report_requested_save(self, step: int, *, saved: bool) -> None:
        """Report whether the required save succeeded. This process may end here."""

    def report_skipped(self, count: int) -> None:
        """Report the number of saves skipped in this process."""

    def report_failed(self, step: int, persist: bool, reason: str) -> None:
        """Report that the snapshot of this step failed, so that nothing waits for it."""

    def remark(self, text: str) -> None:
        """Report one sentence to the operator."""
        warnings.warn(f"elasticrun: {text}", stacklevel=2)

    def close(self) -> None:
        """Release all resources; this process may end here."""
        raise NotImplementedError


class AgentBackend(CheckpointBackend):
    """The backend with an agent."""

    snapshots = True

    def __init__(self, setting: RankOptions, state: TrainingState, place: str) -> None:
        """Connect to the agent. Raises AgentConnectionError if there is none at `place`,
        ConflictError if it refuses this rank."""
        self._setting = setting
        self._state = state
        self._connection = AgentConnection(place)
        here = RankHere(
            *(VERSION, self._connection.local_rank, setting.rank, setting.world_size),
            *(setting.folder.url, setting.keep_last, setting.keep_every, setting.replicas),
        )
        self._resume, _ = self._connection.request(here, Resume)
        present = self._resume.present
        self.round_name = f"{present.term}.{present.number}.{present.nonce}"
        self._taker = SnapshotTaker(
            *(self._connection, state, setting.slots, present),
            least=setting.least_slots,
            overlap=setting.overlap,
        )
        self._departure = Departure(self._connection, self._resume.put_off)
        self._prepared = False

    def restore(self, exchange: RankExchange) -> int:
        skip = self._resume.skip
        if skip.storage_from >= 0 > skip.all_but and self._setting.rank == 0:
            self.remark(
                f"checkpoints of step {skip.storage_from} and later ones are used last, because "
                "training was rewound"
            )
        choice = RestoreChoice(
            *(self._setting, exchange, self.remark, self._resume.step, skip),
        )
        source, step = choice.restore(self._state)
        if source == "memory":
            self._restore_from_memory()
        self.source = source
        self._departure.resume_from(step)
        used = self._used_by(step) if source == "storage" and self._setting.rank == 0 else ""
        self.knows_used = used is not None
        self._connection.send(Restored(step, source, used=used or ""))
        if source != "nothing":
            try:
                self.prepare(wait=True)
            except StateError as error:  # training can continue without snapshots
                self.remark(str(error))
        return step

    def _used_by(self, step: int) -> str | None:
        """What the checkpoint says about work that was handed out by its step; None if it says
        nothing."""
        try:
            made = self._setting.folder.manifest(step)
        except (ManifestError, OSError):  # without verify=True the state is good enough
            return None
        return None if made is None else made.used

    def prepare(self, *, wait: bool = False) -> None:
        if not self._prepared:
            self._prepared = True
            self._taker.prepare(wait=wait)
        else:
            self._taker.collect()

    def _restore_from_memory(self) -> None:
        recall = MemoryRestore(self._connection, self._state, self._resume)
        try:
            recall.run(self._setting.world_size)
        except BadShard as error:
            self._connection.send(CannotRestore(error.rank, error.reason[:1000]))
            self._connection.wait_for_close(END_LIMIT)
            raise RuntimeError(
                f"step {self._resume.step} cannot be restored from memory: {error.reason}"
            ) from error
        self._taker.capacity_hint = recall.values_capacity
        self._taker.spare = recall.kept

    def started_at(self, step: int) -> None:
        self._departure.resume_from(step)
        self._connection.send(Restored(step, self.source, looked=False))

    def save(self, step: int, persist: bool, wait: float) -> SaveOutcome:
        outcome = self._taker.take(step, persist=persist, wait=wait)
        self.copy_seconds = self._taker.copy_seconds
        return outcome

    def note_step(self, step: int) -> None:
        self._taker.note_step(step)

    def is_save_requested(self, step: int) -> bool:
        return self._departure.reach_step(self._taker.requested_step, step)

    def report_requested_save(self, step: int, *, saved: bool) -> None:
        self._departure.report_save(step, saved=saved)
        if self._departure.is_ending:
            answered = self._departure.answered
            if saved:  # slower ranks still need this rank, to reach this step
                self._taker.wait_until_whole(step, answered, WHOLE_LIMIT)
            if self._taker.requested_step in (NONE, answered):  # otherwise another save is required
                self._departure.exit_by_signal()

    def report_skipped(self, count: int) -> None:
        self._connection.send(Skipped(count))

    def report_failed(self, step: int, persist: bool, reason: str) -> None:
        self._connection.send(SaveFailed(step, persist, reason[:1000]))

    def remark(self, text: str) -> None:
        try:
            self._connection.send(Remark(text[:1000]))
        except AgentConnectionError:
            super().remark(text)

    def close(self) -> None:
        try:
            self._taker.close()
        finally:
            self._departure.close()
            self._connection.close()


class _AllRanksPlanner(DefaultSavePlanner):
    """A planner that raises instead of saving one rank's part as the whole state.

    torch saves one rank's state as if it were complete if the process group is destroyed before the
    background save begins. `failure`: this rank has no state to save. The rank takes part anyway,
    to report the failure; otherwise the other ranks would match this save with its next one."""

    def __init__(self, world_size: int, failure: str = "") -> None:
        super().__init__()
        self._world_size = world_size
        self._failure = failure

    def create_local_plan(self) -> SavePlan:
        if self._failure:
            raise StateError(self._failure)
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if len(all_plans) != self._world_size:
            raise StateError("the process group was destroyed")
        return super().create_global_plan(all_plans)


@dataclass(slots=True)
class _PendingSave:
    """One save in progress. `reported`: its failure has been reported already."""

    step: int
    future: Any
    reported: bool


class TorchBackend(CheckpointBackend):
    """The backend with torch alone."""

    snapshots = False

    def __init__(self, setting: RankOptions, state: TrainingState) -> None:
        self._setting = setting
        self._state = state
        self._pending: list[_PendingSave] = []
        weakref.finalize(self, _finish_pending_saves, self._pending)
        self._group: Any = None  # created by the first save

    def restore(self, exchange: RankExchange) -> int:
        self.source, step = RestoreChoice(self._setting, exchange, self.remark).restore(self._state)
        return step

    def save(self, step: int, persist: bool, wait: float) -> SaveOutcome:
        """Write a checkpoint, in the background if there is a process group. Raises StorageError
        also if the previous save has failed; this one starts nevertheless, as on the other
        ranks."""
        if not persist:
            return SaveOutcome.TAKEN
        before = self._finish_pending()
        if dist.is_initialized():
            self._save_in_background(step)
        elif self._setting.world_size > 1:
            raise StateError("there is no process group: call init_process_group before step()")
        else:
            try:
                save(
                    self._state.whole(),
                    checkpoint_id=self._setting.folder.path(step),
                    no_dist=True,
                )
            except CheckpointException as error:  # not an Exception
                raise StorageError(_failure_sentence(step, error)) from error
            self._retain()
        if before:
            raise StorageError(before)
        return SaveOutcome.TAKEN

    def _save_in_background(self, step: int) -> None:
        if self._group is None:
            # A separate group: the save runs concurrently with training and its collectives.
            self._group = dist.new_group(backend="gloo")
        try:
            self._start_save(step, self._state.whole())
        except Exception as error:  # raised by a user's state_dict, or for lack of memory
            self._start_save(step, {}, f"{error!r:.300}")
            raise

    def _start_save(self, step: int, state: dict[str, Any], failure: str = "") -> None:
        planner = _AllRanksPlanner(self._setting.world_size, failure)
        path = self._setting.folder.path(step)
        future = async_save(state, checkpoint_id=path, process_group=self._group, planner=planner)
        self._pending.append(_PendingSave(step, future, reported=bool(failure)))

    def _finish_pending(self) -> str:
        """Wait for the save in progress; return a sentence about a failure, "" if there is none."""
        failed = ""
        while self._pending:
            saving = self._pending.pop()
            try:
                saving.future.result()
            except (Exception, CheckpointException) as error:  # torch raises many types
                failed = failed if saving.reported else _failure_sentence(saving.step, error)
                continue
            try:
                self._retain()
            except (OSError, StorageError) as error:
                failed = str(error)
        return failed

    def _retain(self) -> None:
        """On rank 0: remove checkpoints that need not be kept any more."""
        if self._setting.rank != 0 or not self._setting.keep_last:
            return
        done = [(step, PERIODIC) for step in restorable_steps(self._setting.folder.survey())]
        last, every = self._setting.keep_last, self._setting.keep_every
        for step in surplus(done, last=last, every=every):
            self._setting.folder.remove(step)

    def remark(self, text: str) -> None:
        if self._setting.rank == 0:
            super().remark(text)

    def close(self) -> None:
        """Wait for the save in progress. Raises StorageError if it has failed."""
        if failed := self._finish_pending():
            raise StorageError(failed)


def _failure_sentence(step: int, error: BaseException) -> str:
    """The message about a failed save by torch, with the rank."""
    why = f"{error!r:.300}"
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = min(error.failures.items(), key=lambda one: one[0])
        why = f"rank {rank}: {str(first) or repr(first):.300}"
    return f"the checkpoint of step {step} was not written ({why})"


def _finish_pending_saves(running: list[_PendingSave]) -> None:
    """When the process or the Checkpointer ends, wait for a save in progress and warn if it fails.
    A save needs the process group, which the script may have destroyed by then."""
    while running:
        saving = running.pop()
        try:
            saving.future.result(timeout=END_LIMIT)
        except (Exception, CheckpointException) as error:  # torch raises many types
            if saving.reported:
                continue
            warnings.warn(
                f"elasticrun: the checkpoint of step {saving.step} was not finished "
                f"({error!r:.200}): call the Checkpointer's close() before destroy_process_group()",
                stacklevel=2,
            )
