"""`Checkpointer`: the interface for training scripts. It decides when to save."""

from __future__ import annotations

import contextlib
import difflib
import gc
import inspect
import json
import operator
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Literal, TypeVar

from elasticrun.snapshots.dcp.garbage import no_collection
from elasticrun.snapshots.shm.segment import MAX_SLOTS, MIN_SLOTS
from elasticrun.snapshots.storage.folder import MAX_STEP, Folder
from elasticrun.snapshots.storage.writing import StorageError
from elasticrun.training import work
from elasticrun.training.checkpointing.agent_connection import (
    REQUESTED_LIMIT,
    AgentConnectionError,
    ConflictError,
    agent_address,
    costs,
)
from elasticrun.training.checkpointing.backends import AgentBackend, CheckpointBackend, TorchBackend
from elasticrun.training.checkpointing.capture import SaveOutcome
from elasticrun.training.checkpointing.pace import (
    AUTO,
    DueSnapshot,
    Every,
    Pace,
    Schedule,
    interval_of,
)
from elasticrun.training.checkpointing.parts import StateError, why_no_state
from elasticrun.training.checkpointing.restore_choice import (
    CorruptError,
    ExchangeError,
    NotAgreed,
    RankExchange,
    RankOptions,
    StepNotAvailable,
)
from elasticrun.training.checkpointing.state import OnResize, TrainingState
from elasticrun.training.ranks import rank_and_world_size
from elasticrun.wire import env

PERSIST_EVERY: Final = 1800.0
"""Default seconds between two checkpoints."""

BUSY_LIMIT: Final = 60.0
"""Seconds that a snapshot waits for a slot with on_busy="wait"."""

PERSIST_LIMIT: Final = 10.0
"""Seconds that a snapshot for a checkpoint waits for a slot. It waits, because the checkpoint fails
if one rank skips its snapshot.
"""

MOST_SHOWN: Final = 4
"""Maximum number of arguments in an example."""

NEVER: Final = 1 << 62
"""A number of steps that is never reached."""

T = TypeVar("T")

_instances = count()


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints are kept: the newest `last` (0: all), and permanently those of every
    `every`-th step (0: none)."""

    last: int = 3
    every: int = 0

    def __post_init__(self) -> None:
        if not (type(self.last) is type(self.every) is int and self.last >= 0 and self.every >= 0):
            raise ValueError(
                f"Keep(last={self.last!r}, every={self.every!r}) is invalid: both must be whole "
                "numbers of at least 0"
            )


@dataclass(slots=True)
class Stats:
    """Statistics about this rank's saves in this process."""

    snapshots: int = 0  # taken
    skipped: int = 0  # no slot was free: the previous step may be incomplete elsewhere
    failed: int = 0
    persists: int = 0  # snapshots for checkpoints
    stall: float = 0.0  # duration of the newest snapshot in seconds
    source: str = ""  # where the restore came from: memory, storage, nothing
    error: str = ""  # of the newest failure


class Checkpointer:
    """Takes snapshots of a training's state in memory, writes checkpoints to `folder`, and
    restores.

    ::

        seen = {"tokens": 0}
        ckpt = Checkpointer("runs/a", model=model, optim=optimizer, seen=seen, every_steps=10)
        start = ckpt.restore()
        for step in range(start, total):
            train_step(...)
            ckpt.step(step + 1)

    Every rank creates one with the same arguments and calls the same methods at the same steps.
    With an agent, none of the methods is a collective. The state is passed by name: a Module
    (plain, DDP, fully_shard, tensor parallel; FSDP1 is refused, because collectives are needed to
    get its state), its Optimizer, anything with `state_dict` and `load_state_dict`, a tensor
    (overwritten), or a dict (refilled in place). Pass plain values in a dict: `state={"tokens":
    0}`. The dict `state` may also contain objects with a `state_dict`: `state={"m": m}` equals
    `m=m`. An ElasticBatchSampler begins at the restored step. This rank's random states are
    included. Checkpoints are plain torch.distributed.checkpoint ones, under these names.

    A failed save never ends the training: it is counted in `stats` and reported to the operator,
    unless `strict_save` is set. Without an agent nothing is kept in memory, and torch's own save
    writes the checkpoints: under torchrun in the background, with a separate process group for its
    collectives; in plain python without a process group, synchronously.

    Args:
        folder: A path or a URL; default: `checkpoints` in the job's run folder (`--run-dir`).
        every_steps: Interval of snapshots. Without it and `every_seconds`, snapshots take at most
            1 % of the time.
        every_seconds: The same in seconds.
        persist_every_steps: Interval of checkpoints. If it and `persist_every_seconds` are None,
            checkpoints are written only after failures and by `save_now`.
        persist_every_seconds: The same in seconds.
        slots: Number of snapshots that fit in memory (2 to 4), or "auto": 3 with checkpoints or
            replicas, if there is enough memory, so that snapshots continue while one is being
            written or copied; else 2.
        on_busy: Skip a snapshot while its slot is in use, or wait for it, at most one minute.
        verify: Compare a checkpoint with its hashes before loading it; the ranks share that work.
        replicas: 1 keeps every part of the state in the memory of two nodes, so that one of them
            may be lost. Parts that two nodes hold anyway (DDP) are not copied. It needs two more
            slots on each node. With `slots=2` the next snapshot waits until the last one is copied.
        rng: Include the random states in a snapshot.
        weights_only: Snapshots and checkpoints are only unpickled to plain values, tensors and
            types registered by torch.serialization.add_safe_globals.
        overlap: CUDA devices copy a snapshot while training continues, and an optimizer's next
            `step` waits for that on the device. Use it only if the state is changed by nothing but
            the `step` of these optimizers; buffers and other tensors are cloned on the device.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        persist_every_steps: int | None = None,
        persist_every_seconds: float | None = PERSIST_EVERY,
        keep: Keep | None = None,
        slots: Literal["auto"] | int = "auto",
        on_busy: Literal["skip", "wait"] = "skip",
        verify: bool = True,
        strict_save: bool = False,
        replicas: int = 0,
        rng: bool = True,
        weights_only: bool = True,
        overlap: bool = False,
        **state: Any,
    ) -> None:
        """Raises ValueError for an invalid or unknown option, ConflictError if this process already
        has a Checkpointer of another state."""
        _refuse_invalid_state(state)
        pace = interval_of("every", every_steps, every_seconds)
        if persist_every_steps is not None and persist_every_seconds == PERSIST_EVERY:
            persist_every_seconds = None  # the other option overrides the default
        persists = interval_of("persist_every", persist_every_steps, persist_every_seconds)
        flags = {"verify": verify, "strict_save": strict_save, "rng": rng}
        _refuse_invalid_options(
            *(keep, slots, on_busy, replicas),
            {**flags, "weights_only": weights_only, "overlap": overlap},
        )
        if not state:
            raise ValueError("there is no state: pass it by name, as in Checkpointer(..., model=m)")
        rank, world_size = rank_and_world_size()
        wanted, least = _slots_to_request(slots, persists, replicas)
        keep = keep or Keep()
        url = os.fspath(_default_folder() if folder is None else folder)
        url = url if "://" in url else os.path.abspath(os.path.expanduser(url))
        where = Folder(url)
        if why := where.unfit:
            raise ValueError(why)
        self._setting = RankOptions(
            *(where, rank, world_size, wanted, keep.last, keep.every, verify, replicas),
            least_slots=least,
            weights_only=weights_only,
            overlap=overlap,
        )
        self._state = TrainingState(state, rank, rng, weights_only)
        self._every: Every = AUTO if pace is None else pace
        self._persist_every = persists
        self._busy = BUSY_LIMIT if on_busy == "wait" else 0.0
        self._strict = strict_save
        self._backend: CheckpointBackend | None = None
        self._exchange: RankExchange | None = None
        self._schedule: Schedule | None = None
        self._stalls: list[float] = []
        self._remarked: set[str] = set()
        self._skipped_since_persist = 0  # snapshots skipped since the last checkpoint
        self._last = -1  # the last step of the training
        self.stats = Stats()
        self._owner = _Owner(os.getpid(), self._setting.folder.url, frozenset(state))
        self._is_closed = self._saves = False
        self._successor = ""  # why this one is unusable, if it is
        _claim_process(self)

    def per_rank(self, name: str, value: Any, on_resize: OnResize | None = None) -> None:
        """Add state of this rank alone, such as its data loader or its own generator. Call it
        before `restore`. After a change of the number of ranks, old states do not map to new ranks:
        then `on_resize` receives the states of all old ranks, by rank (None for a lost one).
        Without `on_resize` the value is left unchanged."""
        if self._backend is not None:
            raise RuntimeError("call per_rank() before restore() and step()")
        if why := why_no_state(value):
            raise StateError(f"{name} {why}")
        if not (on_resize is None or callable(on_resize)):
            raise StateError(f"on_resize is {on_resize!r}; it must be a function or None")
        self._state.add_own(name, value, on_resize)

    def restore(self) -> int:
        """Restore the newest state that is available to all ranks, from memory or else from
        storage. Return its step, 0 if there is nothing.

        Also maps the pages for the next snapshot (about 80 ms per GiB). When restoring from
        storage, the ranks wait for each other to confirm that the checkpoint is valid; if one finds
        it corrupt, all use the previous one.

        Raises RuntimeError, ValueError or StorageError if the state cannot be restored: the script
        has changed, memory is insufficient, or storage does not respond. A valid checkpoint is then
        left unchanged."""
        if self._schedule is not None:
            raise RuntimeError("call restore() once, before the first step()")
        work.refuse_restore()
        began = time.monotonic()
        backend, exchange = self._open()
        self._check_options_agree(exchange)
        try:
            with no_collection():
                step = backend.restore(exchange)
                if backend.source == "nothing":
                    _refuse_trained_state()
                if backend.source != "memory":  # what is in memory was saved by this training
                    self._state.check_loadable()
        except (StorageError, CorruptError, NotAgreed, StepNotAvailable) as wrong:
            raise wrong.with_traceback(None) from None  # the message is enough: drop the traceback
        self._start_schedule(step)
        self.stats.source = backend.source
        self._state.set_step(step)
        self._state.put_back_rng()
        work.resumed(step, with_agent=backend.snapshots, is_known=backend.knows_used)
        for text in dict.fromkeys(self._state.remarks):
            backend.remark(text)
        costs.add_restore(time.monotonic() - began)
        return step

    def _check_options_agree(self, exchange: RankExchange) -> None:
        """Compare the options that all ranks must share with rank 0's. With different ones no step
        would be complete on all ranks, or too many checkpoints would be removed. Raises
        ConflictError."""
        setting = self._setting
        mine = {
            "every": repr(self._every),
            "persist_every": repr(self._persist_every),
            "keep": repr(Keep(setting.keep_last, setting.keep_every)),
            "replicas": repr(setting.replicas),
        }
        if setting.rank == 0:
            exchange.publish("options", json.dumps(mine))
            return
        first: dict[str, str] = json.loads(exchange.wait_for("options"))
        differing = [f"{n}={v} and {first.get(n)}" for n, v in mine.items() if v != first.get(n)]
        if differing:
            raise ConflictError(
                f"the Checkpointers of ranks {setting.rank} and 0 differ: {', '.join(differing)}. "
                "Give all ranks the same options"
            )

    def restore_rng(self) -> None:
        """Restore the random states once more, if any were restored. Call it if the script has
        drawn random numbers since `restore` that an uninterrupted training would not draw at this
        step. Creating a data loader's iterator draws one."""
        self._state.put_back_rng()

    def _open(self) -> tuple[CheckpointBackend, RankExchange]:
        if self._successor:
            raise ConflictError(self._successor)
        if self._backend is None or self._exchange is None:
            self._backend, round_name = self._choose_backend()
            prefix = f"elasticrun/{round_name}/{next(_instances)}"
            self._exchange = RankExchange(prefix, self._setting.world_size)
        return self._backend, self._exchange

    def _choose_backend(self) -> tuple[CheckpointBackend, str]:
        """The backend, and a name for this incarnation of the ranks."""
        place = agent_address()
        ours = bool(place) or env.PROGRESS in os.environ
        why = "this process was not started by elasticrun"
        if ours:
            why = "the agent has given this process no address for snapshots"
        if place:
            try:
                backend = AgentBackend(self._setting, self._state, place)
                _owners_by_pid.setdefault(self._owner.pid, (self._owner,))
                return backend, backend.round_name
            except AgentConnectionError as error:
                why = str(error)
        if self._setting.rank == 0 or ours:  # the other ranks may have an agent
            warnings.warn(
                f"elasticrun: {why}, so nothing is kept in memory; torch's own save writes "
                "the checkpoints",
                stacklevel=4,
            )
        round_name = f"{os.environ.get(env.RUN_ID, '')}/{os.environ.get(env.RESTART_COUNT, '')}"
        return TorchBackend(self._setting, self._state), round_name

    def _start_schedule(self, step: int) -> None:
        backend, _ = self._open()
        every: Every | None = self._every if backend.snapshots else self._persist_every
        # without an agent and without checkpoints there is nothing to do
        self._set_pace(Pace(every or NEVER, self._persist_every, step), step)
        self._last = step

    def _set_pace(self, pace: Pace, step: int) -> None:
        _, exchange = self._open()
        self._schedule = Schedule(pace, exchange, self._setting.rank, time.monotonic(), step)

    def _ensure_started(self, number: int) -> tuple[CheckpointBackend, Schedule]:
        """The backend and the schedule; also initializes them if the script did not call `restore`
        and starts with `number`. Raises StateError for state that cannot be saved, before anything
        is saved."""
        if self._schedule is None:
            self._state.check_loadable()
        if not self._saves:
            _refuse_to_share(self)
            self._saves = True
        backend, _ = self._open()
        if self._schedule is None:
            backend.started_at(number - 1)
            self._start_schedule(number - 1)
        assert self._schedule is not None
        return backend, self._schedule

    def step(self, number: int, *, healthy: bool = True) -> None:
        """Training has completed step `number`: take a snapshot if one is due. `healthy=False` (for
        example, the loss is NaN) skips it; all ranks must pass the same. Raises ValueError for an
        invalid number, and StateError at the first step for state that cannot be saved."""
        number = _valid_step(number)
        backend, schedule = self._ensure_started(number)
        if number < self._last:  # e.g. counted per epoch: such steps are never due
            self._remark_once(
                "step() got a lower number than before: nothing is saved until steps exceed all "
                "earlier ones; count steps over the whole training, not per epoch"
            )
        self._last = max(self._last, number)
        self._state.set_step(number)
        with contextlib.suppress(Exception):  # errors are reported when a snapshot is due
            backend.prepare()  # from now on this node can save on request, and leave
        backend.note_step(number)
        due = schedule.due(number)
        requested = self._guarded(lambda: backend.is_save_requested(number))
        saved = False
        if healthy and requested:
            saved = self._try_save(backend, DueSnapshot(number, True), REQUESTED_LIMIT)
        elif healthy and due is not None:
            self._try_save(backend, due, max(self._busy, PERSIST_LIMIT if due.persist else 0.0))
        if due is not None:
            stall = min(self._stalls, default=0.0)
            self._guarded(lambda: schedule.advance(time.monotonic(), due, stall))
        costs.note_step(number)
        if requested:
            self._guarded(lambda: backend.report_requested_save(number, saved=saved))

    def save_now(self, number: int) -> bool:
        """Take a snapshot of step `number` and have it written to storage, regardless of the
        schedule. Return False if it could not be taken. Call it on every rank at the same step.
        Raises ValueError for an invalid number."""
        number = _valid_step(number)
        backend, _ = self._ensure_started(number)
        return self._try_save(backend, DueSnapshot(number, True), BUSY_LIMIT)

    def _try_save(self, backend: CheckpointBackend, due: DueSnapshot, wait: float) -> bool:
        def save() -> SaveOutcome:
            work.mark(due.step)  # before the snapshot is taken: it counts only with its mark
            return backend.save(due.step, due.persist, wait)

        began = time.monotonic()
        outcome = self._guarded(save, is_reported=backend.snapshots)
        costs.add_save(time.monotonic() - began, taken=outcome is SaveOutcome.TAKEN)
        if outcome is not SaveOutcome.TAKEN:
            work.note_skipped(due.step)
        if outcome is None:
            error = self.stats.error
            with contextlib.suppress(
                AgentConnectionError
            ):  # the agent notices a lost connection anyway
                backend.report_failed(due.step, due.persist, error)
            return False
        if outcome is SaveOutcome.PREPARING:  # the first snapshot is taken once there is memory
            return False
        if outcome is SaveOutcome.BUSY:
            self.stats.skipped += 1
            self._skipped_since_persist += 1
            self._guarded(lambda: backend.report_skipped(self.stats.skipped))
            if due.persist:
                why = f"no slot was free for {wait:.0f} s"
                self._guarded(lambda: backend.report_failed(due.step, True, why))
            return False
        self.stats.stall = time.monotonic() - began
        self._stalls = [*self._stalls[-2:], max(self.stats.stall, backend.copy_seconds)]
        if backend.snapshots or due.persist:
            self.stats.snapshots += backend.snapshots
            self.stats.persists += due.persist
        if due.persist:
            count, self._skipped_since_persist = self._skipped_since_persist, 0
            # once per process; `stats.skipped` and the job's status count all
            if count and count == self.stats.skipped:
                many = "1 snapshot" if count == 1 else f"{count} snapshots"
                backend.remark(
                    f"skipped {many} before step {due.step}: no slot was free "
                    "(raise slots=, or set on_busy='wait')"
                )
        return True

    def _guarded(self, act: Callable[[], T], *, is_reported: bool = False) -> T | None:
        """Return the result of `act`, or None if it raises: a failure does not end the training,
        unless `strict_save` is set. `is_reported`: the job's master names all ranks for which it
        fails in one line."""
        try:
            return act()
        except Exception as error:  # a user's state_dict may raise anything
            self.stats.failed += 1
            self.stats.error = str(error) or repr(error)
            is_cut_off = isinstance(error, AgentConnectionError | ExchangeError)
            if is_cut_off or not is_reported:
                what = "snapshot" if self._backend is None or self._backend.snapshots else "save"
                self._remark_once(f"a {what} failed: {self.stats.error}")
            if is_cut_off:
                # agreement and handover are no longer possible
                self._remark_once("no more snapshots are taken until the ranks restart")
                self._set_pace(Pace(NEVER, None, 0), 0)
            if self._strict:
                raise
            return None

    def _remark_once(self, text: str) -> None:
        """Report each sentence once, and at most 32 of them."""
        if self._backend is not None and text not in self._remarked and len(self._remarked) < 32:
            self._remarked.add(text)
            self._backend.remark(text)

    def close(self) -> None:
        """Wait for torch's save in progress and release this process's resources; snapshots stay in
        the agent's memory. A pending signal that was deferred ends the process here."""
        self._is_closed = True
        if self._backend is not None:
            self._guarded(self._backend.close)


@dataclass(frozen=True, slots=True)
class _Owner:
    """Identifies whose snapshots a Checkpointer takes: the state with these names in this
    process."""

    pid: int
    url: str
    names: frozenset[str]


_made: Final[weakref.WeakSet[Checkpointer]] = weakref.WeakSet()
_owners_by_pid: Final[dict[int, tuple[_Owner]]] = {}
"""By pid: the owner of the state that the agent holds. A forked child has another pid."""


def _refuse_trained_state() -> None:
    """Raise StateError if objects that an earlier round has trained would start from step 0."""
    recovery = sys.modules.get("elasticrun.training.recovery")
    if recovery is not None and recovery.keeps_trained_state():
        raise StateError(
            "the snapshot that the ranks were to restore cannot be used, and this process keeps "
            "objects that an earlier round has trained: a new process starts without them"
        )


def is_unrestored() -> bool:
    """Whether this process has a Checkpointer that has neither restored nor saved a step."""
    mine = (one for one in _made if one._owner.pid == os.getpid() and not one._is_closed)
    return any(one._schedule is None for one in mine)


def end_round() -> None:
    """Close every Checkpointer of this process, because its process groups are about to be
    destroyed. The next ones are numbered from 0, as in the new processes with which they agree."""
    global _instances
    for one in list(_made):
        if one._owner.pid == os.getpid() and not one._is_closed:
            one.close()
    _instances = count()


def _claim_process(new: Checkpointer) -> None:
    """Make `new` the Checkpointer of this process. With an agent, a process has one state for its
    lifetime: the agent's memory holds it for this rank, and a restart restores it. A new
    Checkpointer of the same state replaces the old one, for a script that runs again in one
    process. Raises ConflictError."""
    _made.add(new)
    if not agent_address():
        return
    mine = new._owner
    _refuse(new, lambda: [*_owners_by_pid.get(mine.pid, ()), *(one._owner for one in _others(new))])
    for one in _others(new):
        one._successor = (
            f"a newer Checkpointer of the same names in {mine.url} has replaced this "
            "one. If these are two states, pass both to one Checkpointer under different names"
        )
        if isinstance(one._backend, AgentBackend):
            one.close()


def _refuse_to_share(new: Checkpointer) -> None:
    """Raise ConflictError if another Checkpointer of this process saves a different state into the
    same folder, even without an agent: each would replace the other's checkpoints."""

    def savers() -> list[_Owner]:
        return [o._owner for o in _others(new) if o._saves and o._owner.url == new._owner.url]

    _refuse(new, savers)


def _others(new: Checkpointer) -> list[Checkpointer]:
    """The other open Checkpointers of this process."""
    pid = new._owner.pid
    return [o for o in _made if o is not new and o._owner.pid == pid and not o._is_closed]


def _refuse(new: Checkpointer, owners: Callable[[], list[_Owner]]) -> None:
    """Raise ConflictError if one of these owners has another state."""
    mine = new._owner

    def rival() -> _Owner | None:
        return next((one for one in owners() if one != mine), None)

    if rival():
        gc.collect()  # drop unreferenced Checkpointers, which cannot conflict
    if found := rival():
        _made.discard(new)
        one, other = (", ".join(sorted(each.names)) for each in (found, mine))
        # advice first: folders may be long, and summaries are truncated
        raise ConflictError(
            "use one Checkpointer per process: pass all state to it under different names, as "
            f"in Checkpointer(folder, {_distinct(found, mine)}): this process has a Checkpointer "
            f"of {one} in {found.url}, so there cannot be one of {other} in {mine.url}"
        )


def _distinct(one: _Owner, other: _Owner) -> str:
    """Example arguments for one Checkpointer with the state of both."""
    shared = one.names & other.names
    names = sorted([*(one.names ^ other.names), *(f"{n}{i}" for n in shared for i in (1, 2))])
    more = [] if len(names) <= MOST_SHOWN else ["..."]
    return ", ".join([*(f"{name}=..." for name in names[:MOST_SHOWN]), *more])


def _refuse_invalid_state(given: Mapping[str, Any]) -> None:
    """Raise StateError for an argument that cannot be state, such as a misspelled option."""
    for name, value in given.items():
        why = why_no_state(value)
        if not why:
            continue
        parameters = inspect.signature(Checkpointer).parameters.values()
        named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        near = [one for one in named if one.startswith(f"{name}_")]
        if near := near or difflib.get_close_matches(name, named, n=1):
            raise StateError(
                f"Checkpointer has no option {name} ({value!r:.100}): did you mean "
                f"{' or '.join(near)}?"
            )
        raise StateError(f"{name} {why}")


def _refuse_invalid_options(
    keep: object, slots: object, on_busy: object, replicas: object, flags: Mapping[str, object]
) -> None:
    """Raise ValueError for invalid options."""
    if slots != "auto" and not (type(slots) is int and MIN_SLOTS <= slots <= MAX_SLOTS):
        raise ValueError(f'slots is {slots!r}; it must be "auto", or {MIN_SLOTS} to {MAX_SLOTS}')
    if replicas not in (0, 1):
        raise ValueError(f"replicas is {replicas!r}; it must be 0 or 1")
    if on_busy not in ("skip", "wait"):
        raise ValueError(f'on_busy is {on_busy!r}; it must be "skip" or "wait"')
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be True or False")
    if not isinstance(keep, Keep | None):
        raise ValueError(f"keep is {keep!r}; it must be a Keep, as in keep=Keep(last=3)")


def _slots_to_request(
    slots: Literal["auto"] | int, persist_every: float | int | None, replicas: int
) -> tuple[int, int]:
    """Number of slots to request, and the minimum that is acceptable; 0: no fewer."""
    if slots != "auto":
        return slots, 0
    return (3, MIN_SLOTS) if persist_every is not None or replicas else (MIN_SLOTS, 0)


def _valid_step(number: int) -> int:
    """The number of a step. Raises ValueError."""
    try:
        found = operator.index(number)
    except TypeError:
        found = -1
    if not 0 <= found < MAX_STEP:
        raise ValueError(f"{number!r} is not a step: steps are whole numbers from 0")
    return found


def _default_folder() -> str:
    """The default folder for checkpoints. Raises ValueError without a run folder."""
    run = os.environ.get(env.RUN_FOLDER)
    if not run:
        raise ValueError("Checkpointer() needs a folder, unless the job was started with --run-dir")
    return os.path.join(run, "checkpoints")
