"""`Checkpointer`: what a training script says, and when it is done."""

from __future__ import annotations

import contextlib
import difflib
import gc
import inspect
import json
import operator
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Literal, TypeVar

import torch.distributed as dist

from elasticrun.snapshots.dcp.garbage import no_collection
from elasticrun.snapshots.shm.segment import MAX_SLOTS, MIN_SLOTS
from elasticrun.snapshots.storage.folder import MAX_STEP, Folder
from elasticrun.snapshots.storage.writing import StorageError
from elasticrun.training.checkpointing.backends import AgentWay, TorchWay, Way
from elasticrun.training.checkpointing.choosing import (
    Board,
    BoardError,
    NotAgreed,
    NotThere,
    RankOptions,
    SpoiledError,
)
from elasticrun.training.checkpointing.line import (
    ASKED_LIMIT,
    ConflictError,
    LineError,
    costs,
    own_place,
)
from elasticrun.training.checkpointing.pace import AUTO, Due, Every, Pace, Schedule, chosen
from elasticrun.training.checkpointing.parts import StateError, why_no_state
from elasticrun.training.checkpointing.state import OnResize, TrainingState
from elasticrun.wire import env

PERSIST_EVERY: Final = 1800.0
"""Seconds from one checkpoint to the next, where nothing is said."""

BUSY_LIMIT: Final = 60.0
"""Seconds that a snapshot waits for a slot with on_busy="wait"."""

PERSIST_LIMIT: Final = 10.0
"""Seconds that one waits which is to be written out: were one rank to skip it, none could be."""

MOST_SHOWN: Final = 4
"""Arguments that an example shows."""

NEVER: Final = 1 << 62
"""Steps to a snapshot that does not come."""

T = TypeVar("T")

_instances = count()


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints stay: the newest `last` (0: all), and those of every `every`-th step (0:
    none) for good."""

    last: int = 3
    every: int = 0

    def __post_init__(self) -> None:
        if not (type(self.last) is type(self.every) is int and self.last >= 0 and self.every >= 0):
            raise ValueError(
                f"Keep(last={self.last!r}, every={self.every!r}) counts no checkpoints"
            )


@dataclass(slots=True)
class Stats:
    """What has become of this rank's saves in this life."""

    snapshots: int = 0  # taken
    skipped: int = 0  # no slot was free: the step before is not known to be whole everywhere
    failed: int = 0
    persists: int = 0  # snapshots that were to be written out
    stall: float = 0.0  # seconds that the newest one took
    source: str = ""  # where the restore came from: memory, storage, nothing
    error: str = ""  # of the newest that failed


class Checkpointer:
    """The state of a training: its snapshots in memory, its checkpoints in `folder`, its restore.

    ::

        seen = {"tokens": 0}
        ckpt = Checkpointer("runs/a", model=model, optim=optimizer, seen=seen, every_steps=10)
        start = ckpt.restore()
        for step in range(start, total):
            train_step(...)
            ckpt.step(step + 1)

    Every rank makes one, with the same arguments, and calls the same methods at the same steps;
    with an agent none of them is a collective. The state is given by name: a Module (plain, DDP,
    fully_shard, tensor parallel; FSDP1 is refused, since its state can only be had by collectives),
    its Optimizer, anything with `state_dict` and `load_state_dict`, a tensor (overwritten), or a
    dict (refilled in place), which is where plain values go: `state={"tokens": 0}`. In the dict
    `state` objects with a `state_dict` may stand too: `state={"m": m}` is `m=m`. This rank's random
    states are part of it. Checkpoints are plain ones of torch.distributed.checkpoint, under
    these names.

    A save that fails never ends the training: it is counted in `stats` and the operator is told,
    unless `strict_save` is set. Without an agent nothing is kept in memory, and torch's own save
    writes the checkpoints: in the background under torchrun, where its collectives have a process
    group of their own, and at once in plain python without a group.

    `folder`: a path or a URL; without one `checkpoints` in the job's run folder (`--run-dir`).
    `every_steps` or `every_seconds`: from one snapshot to the next; with neither, at most one
    hundredth of the time goes into them. `persist_every_steps` or `persist_every_seconds`: the same
    for checkpoints; None for both: none but after failures and by `save_now`. `slots`: snapshots
    that have room in memory (2 to 4), or "auto": 3 where checkpoints or replicas are made, if there
    is room, so that snapshots are taken meanwhile; else 2. `on_busy`: whether to skip a snapshot
    while its slot is still needed, or to wait for it, a minute at most. `verify`: compare a
    checkpoint with its hashes before it is loaded; the ranks share that work. `replicas`: 1 keeps
    every part of the state in the memory of two nodes, so that one may be lost; what two hold
    anyway (DDP) is not copied. It takes two slots more on each node, and a snapshot is only
    followed by others once it was copied (`slots`: 3). `rng`: the random states are part of a
    snapshot. `weights_only`: nothing but plain values, tensors and what torch.serialization's
    add_safe_globals has named is made of the bytes of snapshots and checkpoints."""

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
        **state: Any,
    ) -> None:
        """ValueError for what cannot be, and for an option that there is not. ConflictError where
        this process has a Checkpointer of another state already."""
        _refuse_what_is_no_state(state)
        pace = chosen("every", every_steps, every_seconds)
        if persist_every_steps is not None and persist_every_seconds == PERSIST_EVERY:
            persist_every_seconds = None  # the default gives way
        persists = chosen("persist_every", persist_every_steps, persist_every_seconds)
        flags = {"verify": verify, "strict_save": strict_save, "rng": rng}
        _check(keep, slots, on_busy, replicas, {**flags, "weights_only": weights_only})
        if not state:
            raise ValueError("there is no state: pass it by name, as in Checkpointer(..., model=m)")
        rank, world_size = _place()
        wanted, least = _slots(slots, persists, replicas)
        keep = keep or Keep()
        url = os.fspath(_own_folder() if folder is None else folder)
        url = url if "://" in url else os.path.abspath(os.path.expanduser(url))
        where = Folder(url)
        if why := where.unfit:
            raise ValueError(why)
        self._setting = RankOptions(
            *(where, rank, world_size, wanted, keep.last, keep.every, verify, replicas),
            least_slots=least,
            weights_only=weights_only,
        )
        self._state = TrainingState(state, rank, rng, weights_only)
        self._every: Every = AUTO if pace is None else pace
        self._persist_every = persists
        self._busy = BUSY_LIMIT if on_busy == "wait" else 0.0
        self._strict = strict_save
        self._way: Way | None = None
        self._board: Board | None = None
        self._schedule: Schedule | None = None
        self._stalls: list[float] = []
        self._told: set[str] = set()
        self._left_out = 0  # snapshots skipped since the last that was to be written out
        self._last = -1  # step that training was at
        self.stats = Stats()
        self._owner = _Owner(os.getpid(), self._setting.folder.url, frozenset(state))
        self._is_closed = self._saves = False
        self._successor = ""  # why this one is of no use any more
        _take_place(self)

    def per_rank(self, name: str, value: Any, on_resize: OnResize | None = None) -> None:
        """State of this rank alone: its data loader, a generator of its own. To be said before
        `restore`. At another number of ranks nobody can say whose it was: then `on_resize` is given
        the states of all old ranks, by rank (None for one that is lost), or without it the value is
        left as it is."""
        if self._way is not None:
            raise RuntimeError("per_rank() comes before restore() and step()")
        if why := why_no_state(value):
            raise StateError(f"{name} {why}")
        if not (on_resize is None or callable(on_resize)):
            raise StateError(f"on_resize is {on_resize!r}; it may be a function")
        self._state.add_own(name, value, on_resize)

    def restore(self) -> int:
        """Put the newest state back that all ranks can have: from memory, else from storage. The
        step that it is of, 0 if there is nothing.

        The pages of the next snapshot are mapped here too (about 80 ms a GiB).
        From storage the ranks wait for each other's word that the checkpoint is whole; where one
        finds it spoiled, all take the one before.

        RuntimeError, ValueError or StorageError, in a sentence, if what is there cannot be put
        back: the script has changed, memory has no room, storage does not answer. A checkpoint that
        is whole stays as it is then."""
        if self._schedule is not None:
            raise RuntimeError("restore() comes once, before the first step()")
        began = time.monotonic()
        self._state.vouch()
        way, board = self._open()
        self._agree(board)
        try:
            with no_collection():
                step = way.resume(board)
        except (StorageError, SpoiledError, NotAgreed, NotThere) as wrong:
            raise wrong.with_traceback(None) from None  # a sentence: how it came about is in it
        self._begin(step)
        self.stats.source = way.source
        self._state.put_back_rng()
        for text in dict.fromkeys(self._state.remarks):
            way.remark(text)
        costs.restored(time.monotonic() - began)
        return step

    def _agree(self, board: Board) -> None:
        """Compare the options on which all ranks must agree with rank 0's: with others no step is
        ever whole on all ranks, or more is removed than some want. ConflictError."""
        setting = self._setting
        mine = {
            "every": repr(self._every),
            "persist_every": repr(self._persist_every),
            "keep": repr(Keep(setting.keep_last, setting.keep_every)),
            "replicas": repr(setting.replicas),
        }
        if setting.rank == 0:
            board.say("options", json.dumps(mine))
            return
        first: dict[str, str] = json.loads(board.hear("options"))
        differing = [f"{n}={v} and {first.get(n)}" for n, v in mine.items() if v != first.get(n)]
        if differing:
            raise ConflictError(
                f"the Checkpointers of ranks {setting.rank} and 0 differ: {', '.join(differing)}. "
                "Give all ranks the same options"
            )

    def restore_rng(self) -> None:
        """Put the random states of the restore back once more, if there were any: where the script
        has drawn numbers since that it does not draw in the middle of a training. A data loader's
        iterator does, when it is made."""
        self._state.put_back_rng()

    def _open(self) -> tuple[Way, Board]:
        if self._successor:
            raise ConflictError(self._successor)
        if self._way is None or self._board is None:
            self._way, life = self._choose_way()
            prefix = f"elasticrun/{life}/{next(_instances)}"
            self._board = Board(prefix, self._setting.world_size)
        return self._way, self._board

    def _choose_way(self) -> tuple[Way, str]:
        """The way, and what names this life of the ranks."""
        place = own_place()
        ours = bool(place) or env.PROGRESS in os.environ
        why = "this was not started by elasticrun"
        if ours:
            why = "the agent has given this process no place for snapshots"
        if place:
            try:
                way = AgentWay(self._setting, self._state, place)
                _spoken.setdefault(self._owner.pid, (self._owner,))
                return way, way.life
            except LineError as error:
                why = str(error)
        if self._setting.rank == 0 or ours:  # the other ranks may well have an agent
            warnings.warn(
                f"elasticrun: {why}, so nothing is kept in memory; torch's own save writes "
                "the checkpoints",
                stacklevel=4,
            )
        life = f"{os.environ.get(env.RUN_ID, '')}/{os.environ.get(env.RESTART_COUNT, '')}"
        return TorchWay(self._setting, self._state), life

    def _begin(self, step: int) -> None:
        way, _ = self._open()
        every: Every | None = self._every if way.snapshots else self._persist_every
        # with no agent and nothing to be written there is nothing to do
        self._go_by(Pace(every or NEVER, self._persist_every, step), step)
        self._last = step

    def _go_by(self, pace: Pace, step: int) -> None:
        _, board = self._open()
        self._schedule = Schedule(pace, board, self._setting.rank, time.monotonic(), step)

    def _begun(self, number: int) -> tuple[Way, Schedule]:
        """What saves, and when, also where the script restored nothing and begins with `number`.
        StateError for state that cannot be saved, before anything is."""
        if self._schedule is None:
            self._state.vouch()
        if not self._saves:
            _refuse_to_share(self)
            self._saves = True
        way, _ = self._open()
        if self._schedule is None:
            way.fresh(number - 1)
            self._begin(number - 1)
        assert self._schedule is not None
        return way, self._schedule

    def step(self, number: int, *, healthy: bool = True) -> None:
        """Training has done step `number`: take a snapshot if one is due. `healthy=False` (a loss
        that is no number, say) leaves it out; all ranks must be of one mind. ValueError for a
        number that no step has, and at the first step for state that cannot be saved."""
        number = _step(number)
        way, schedule = self._begun(number)
        if number < self._last:  # counted anew with every epoch, say: such steps are never due
            self._tell(
                "a step came that is below an earlier one: nothing is saved until steps are above "
                "all earlier ones; count them over the whole training, not over an epoch"
            )
        self._last = max(self._last, number)
        with contextlib.suppress(Exception):  # what is in the way is told when a snapshot is due
            way.prepare()  # from now on this node can be asked to save, and leave
        way.note(number)
        due = schedule.due(number)
        asked = self._guarded(lambda: way.is_asked(number))
        saved = False
        if healthy and asked:
            saved = self._attempt(way, Due(number, True), ASKED_LIMIT)
        elif healthy and due is not None:
            self._attempt(way, due, max(self._busy, PERSIST_LIMIT if due.persist else 0.0))
        if due is not None:
            stall = min(self._stalls, default=0.0)
            self._guarded(lambda: schedule.advance(time.monotonic(), due, stall))
        costs.stepped(number)
        if asked:
            self._guarded(lambda: way.answer(number, saved=saved))

    def save_now(self, number: int) -> bool:
        """Take a snapshot of step `number` and have it written out, whatever is due. False if it
        could not be taken. Every rank calls it at the same step. ValueError for a number that no
        step has."""
        number = _step(number)
        way, _ = self._begun(number)
        return self._attempt(way, Due(number, True), BUSY_LIMIT)

    def _attempt(self, way: Way, due: Due, wait: float) -> bool:
        began = time.monotonic()
        took = self._guarded(lambda: way.save(due.step, due.persist, wait))
        costs.saved(time.monotonic() - began, taken=bool(took))
        if took is None:
            error = self.stats.error
            with contextlib.suppress(LineError):  # without a line the agent knows by itself
                way.failed(due.step, due.persist, error)
            return False
        if not took:
            self.stats.skipped += 1
            self._left_out += 1
            self._guarded(lambda: way.skipped(self.stats.skipped))
            if due.persist:
                why = f"no slot was free for {wait:.0f} s"
                self._tell(f"step {due.step} was not written out: {why}")
                self._guarded(lambda: way.failed(due.step, True, why))
            return False
        self.stats.stall = time.monotonic() - began
        self._stalls = [*self._stalls[-2:], self.stats.stall]
        if way.snapshots or due.persist:
            self.stats.snapshots += way.snapshots
            self.stats.persists += due.persist
        if due.persist:
            count, self._left_out = self._left_out, 0
            # once in a life of the ranks; `stats.skipped` and the job's status count them all
            if count and count == self.stats.skipped:
                way.remark(
                    f"{count} snapshots were skipped before step {due.step}, since no slot was "
                    "free (Checkpointer's slots= gives them more, on_busy= has them wait)"
                )
        return True

    def _guarded(self, act: Callable[[], T]) -> T | None:
        """What `act` returns, None if it fails: that does not end the training."""
        try:
            return act()
        except Exception as error:  # a user's state_dict may raise anything
            self.stats.failed += 1
            self.stats.error = str(error) or repr(error)
            what = "snapshot" if self._way is None or self._way.snapshots else "save"
            self._tell(f"a {what} failed: {self.stats.error}")
            if isinstance(error, LineError | BoardError):
                # nothing more can be agreed upon, or handed over
                self._tell("no more snapshots are taken in this life of the ranks")
                self._go_by(Pace(NEVER, None, 0), 0)
            if self._strict:
                raise
            return None

    def _tell(self, text: str) -> None:
        """Each sentence once, and not too many."""
        if self._way is not None and text not in self._told and len(self._told) < 32:
            self._told.add(text)
            self._way.remark(text)

    def close(self) -> None:
        """Let go of the memory, and end what torch still writes. Snapshots stay."""
        self._is_closed = True
        if self._way is not None:
            self._guarded(self._way.close)


@dataclass(frozen=True, slots=True)
class _Owner:
    """Whose snapshots a Checkpointer takes: the state of these names in this process."""

    pid: int
    url: str
    names: frozenset[str]


_made: Final[weakref.WeakSet[Checkpointer]] = weakref.WeakSet()
_spoken: Final[dict[int, tuple[_Owner]]] = {}
"""By pid: whose state the agent was given. A forked child has a pid of its own."""


def _take_place(new: Checkpointer) -> None:
    """With an agent a process has one state, for good: that is what memory holds of its rank, and
    what a restart restores. Another Checkpointer of the same state takes the place of the first: a
    script that runs again in one process. ConflictError."""
    _made.add(new)
    if not own_place():
        return
    mine = new._owner
    _refuse(new, lambda: [*_spoken.get(mine.pid, ()), *(one._owner for one in _others(new))])
    for one in _others(new):
        one._successor = (
            f"a newer Checkpointer of the same names in {mine.url} has taken the place of this "
            "one. If these are two states, give both to one Checkpointer under different names"
        )
        if isinstance(one._way, AgentWay):
            one.close()


def _refuse_to_share(new: Checkpointer) -> None:
    """Without an agent too, no two of different states may save into one folder: each would replace
    the other's checkpoints. ConflictError."""

    def savers() -> list[_Owner]:
        return [o._owner for o in _others(new) if o._saves and o._owner.url == new._owner.url]

    _refuse(new, savers)


def _others(new: Checkpointer) -> list[Checkpointer]:
    """Open ones of this process."""
    pid = new._owner.pid
    return [o for o in _made if o is not new and o._owner.pid == pid and not o._is_closed]


def _refuse(new: Checkpointer, owners: Callable[[], list[_Owner]]) -> None:
    """Where one of these has another state. ConflictError."""
    mine = new._owner

    def rival() -> _Owner | None:
        return next((one for one in owners() if one != mine), None)

    if rival():
        gc.collect()  # what nobody has any more is no rival
    if found := rival():
        _made.discard(new)
        one, other = (", ".join(sorted(each.names)) for each in (found, mine))
        # what to do comes first: folders may be long, and a summary shows so many characters
        raise ConflictError(
            "one process has one Checkpointer: give all state to one, under different names, as "
            f"in Checkpointer(folder, {_distinct(found, mine)}): this process has a Checkpointer "
            f"of {one} in {found.url}, so there can be none of {other} in {mine.url}"
        )


def _distinct(one: _Owner, other: _Owner) -> str:
    """Arguments by which one Checkpointer could have the state of both."""
    shared = one.names & other.names
    names = sorted([*(one.names ^ other.names), *(f"{n}{i}" for n in shared for i in (1, 2))])
    more = [] if len(names) <= MOST_SHOWN else ["..."]
    return ", ".join([*(f"{name}=..." for name in names[:MOST_SHOWN]), *more])


def _refuse_what_is_no_state(given: Mapping[str, Any]) -> None:
    """Among what was given by name. A typo in an option is none, either. StateError."""
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


def _check(
    keep: object, slots: object, on_busy: object, replicas: object, flags: Mapping[str, object]
) -> None:
    """ValueError for options that cannot be."""
    if slots != "auto" and not (type(slots) is int and MIN_SLOTS <= slots <= MAX_SLOTS):
        raise ValueError(f'slots is {slots!r}; it may be "auto", or {MIN_SLOTS} to {MAX_SLOTS}')
    if replicas not in (0, 1):
        raise ValueError(f"replicas is {replicas!r}; it may be 0 or 1")
    if on_busy not in ("skip", "wait"):
        raise ValueError(f'on_busy is {on_busy!r}; it may be "skip" or "wait"')
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it may be True or False")
    if not isinstance(keep, Keep | None):
        raise ValueError(f"keep is {keep!r}; it may be a Keep, as in keep=Keep(last=3)")


def _slots(
    slots: Literal["auto"] | int, persist_every: float | int | None, replicas: int
) -> tuple[int, int]:
    """How many to ask for, and how many will do; 0: no fewer."""
    if slots != "auto":
        return slots, 0
    return (3, MIN_SLOTS) if persist_every is not None or replicas else (MIN_SLOTS, 0)


def _step(number: int) -> int:
    """The number of a step. ValueError."""
    try:
        found = operator.index(number)
    except TypeError:
        found = -1
    if not 0 <= found < MAX_STEP:
        raise ValueError(f"step {number!r} is none: steps are counted from 0, in whole numbers")
    return found


def _own_folder() -> str:
    """Where checkpoints are where nobody has said so. ValueError without a run folder."""
    run = os.environ.get(env.RUN_FOLDER)
    if not run:
        raise ValueError("Checkpointer() needs a folder, or a job that is started with --run-dir")
    return os.path.join(run, "checkpoints")


def _place() -> tuple[int, int]:
    """Rank and world size."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get(env.RANK, "0")), int(os.environ.get(env.WORLD_SIZE, "1"))
