"""Manages the segments of this node's local ranks: creates, lends, adopts and removes them.

They outlive the ranks, and their pages stay populated: a restarted rank with the same layout gets
the same segment. A named file also outlives this agent. If its folder has no space, anonymous
memory is used instead, which is freed with the agent (and logged).

Everything that touches a disk or gigabytes of memory runs in threads; the loop only reads and
writes words of the segments' control pages. What a segment is needed for is known to
`snapshots.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Final, NamedTuple

from elasticrun.agent.runtime import Once, Tasks, in_thread
from elasticrun.agent.snapshots.folder import (
    DEFAULT_BASE,
    LocalRound,
    Orphans,
    SegmentFile,
    SegmentFolder,
    take,
)
from elasticrun.host.log import logger
from elasticrun.host.system.sandbox import NoThread
from elasticrun.snapshots.shm import memory
from elasticrun.snapshots.shm.layout import MAX_LAYOUT_BYTES, MAX_SIZE, PAGE
from elasticrun.snapshots.shm.memory import NoMemory, size_text
from elasticrun.snapshots.shm.segment import (
    MAX_SLOTS,
    MIN_SLOTS,
    Segment,
    SegmentError,
    Snapshot,
    initialize,
    segment_bytes,
)
from elasticrun.snapshots.shm.throttle import Throttle
from elasticrun.wire import env

OPEN_LIMIT: Final = 5.0
"""Seconds for finding the folder; if that takes longer, no folder is used."""

REMOVE_LIMIT: Final = 10.0
"""Seconds for releasing all segments at the end."""

BACKGROUND: Final = 10
"""What is added to the nice value of a thread that allocates, because ranks train meanwhile. On
Linux the value belongs to the thread, and each allocation has a new one."""


REPLICA_PATIENCE: Final = 30.0
"""Seconds after which the memory of a replica is allocated at full speed; less than REPLICA_LIMIT,
within which the replica must be complete."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The layout and sizes of a segment."""

    layout: int  # Layout.key
    layout_length: int
    slot_bytes: int
    slots: int

    @property
    def nbytes(self) -> int:
        return segment_bytes(self.layout_length, self.slot_bytes, self.slots)

    def why_invalid(self) -> str:
        """Why these sizes are invalid; "" if they are valid."""
        if not MIN_SLOTS <= self.slots <= MAX_SLOTS:
            return f"a segment has {MIN_SLOTS} to {MAX_SLOTS} slots, not {self.slots}"
        if not 0 < self.layout_length <= MAX_LAYOUT_BYTES:
            return f"a layout of {self.layout_length} bytes is invalid"
        if self.slot_bytes % PAGE or not 0 <= self.slot_bytes <= MAX_SIZE // MAX_SLOTS:
            return f"a slot of {self.slot_bytes} bytes is invalid"
        return ""


@dataclass(eq=False)
class Held:
    """A mapped segment: its sizes, its content, and the reasons for keeping it."""

    key: int  # its id for the saver; never reused
    local_rank: int  # -1: a copy of another node's rank
    sizes: Sizes
    content: int  # Layout.content
    path: str  # "" for anonymous memory
    fd: int
    map: mmap.mmap
    segment: Segment
    written: bool = False  # it has had a snapshot, so its layout is written
    pins: dict[int, set[str]] = field(default_factory=dict)  # slot -> reasons
    released: bool = False
    own: bool = False  # its rank has per-rank state
    device: str = ""  # where its rank keeps the tensors
    replica: int = -1  # the rank of another node that it replicates; -1: none

    @property
    def is_cut(self) -> bool:
        """Whether another process has truncated its file. Touching the missing pages would kill
        this agent with SIGBUS."""
        return not self.released and os.fstat(self.fd).st_size < self.sizes.nbytes

    @property
    def is_lost(self) -> bool:
        """Whether it must not be touched."""
        return self.released or self.is_cut

    def why_damaged(self) -> str:
        """Why it cannot be lent again, in a clause; "" if it is intact."""
        if self.is_cut:
            return "another process has truncated its file"
        sizes = self.sizes
        if not self.segment.is_made_for(sizes.layout_length, sizes.slot_bytes, sizes.slots):
            return "another process has overwritten its control page"
        newest = self.find_newest()
        if newest is not None and not self.segment.has_layout(newest.layout):
            return "another process has overwritten its layout"
        return ""

    @property
    def owner(self) -> str:
        """Its owner, for log lines."""
        if self.local_rank >= 0:
            return f"local rank {self.local_rank}"
        return f"rank {self.replica}" if self.replica >= 0 else "another node's rank"

    @property
    def is_temporary(self) -> bool:
        """Whether it is a copy for one restore only."""
        return self.local_rank < 0 and self.replica < 0

    def snapshots(self) -> list[Snapshot]:
        """Its snapshots, the newest last."""
        return [] if self.is_lost else self.segment.snapshots()

    def find(self, round: bytes, step: int) -> Snapshot | None:
        """Its snapshot of (round, step); None if it has none."""
        for snapshot in self.snapshots():
            if snapshot.round == round and snapshot.step == step:
                return snapshot
        return None

    def find_newest(self) -> Snapshot | None:
        """Its newest snapshot; None if it has none."""
        return next(reversed(self.snapshots()), None)

    def pin(self, slot: int, reason: str) -> None:
        if not self.is_lost:
            self.pins.setdefault(slot, set()).add(reason)
            self.segment.pin(slot)

    def unpin(self, reason: str) -> None:
        """Remove this pin reason; a slot without reasons is free."""
        for slot, reasons in self.pins.items():
            if reason in reasons and not self.is_lost:
                reasons.discard(reason)
                self.segment.pin(slot, bool(reasons))

    def is_pinned(self) -> bool:
        return any(self.pins.values())


def unmap(held: Held) -> None:
    """Unmap a segment and close its file; blocks while the kernel frees gigabytes."""
    held.segment.close()
    os.close(held.fd)
    with contextlib.suppress(BufferError):  # unmapped with its last view
        held.map.close()


class Adopted(NamedTuple):
    """What a killed agent of this node has left behind."""

    folder: SegmentFolder
    held: list[Held]
    rounds: list[LocalRound]


class Segments:
    """All segments of this node. Only this class changes `held`, in the loop's thread."""

    def __init__(self, job_id: str, nproc: int, environ: Mapping[str, str]) -> None:
        self._job_id = job_id
        self._nproc = nproc
        self._base = environ.get(env.SHM_DIR, "") or DEFAULT_BASE
        self._orphans = Orphans(self._base, job_id)
        self._folder: SegmentFolder | None = None
        self._no_folder = ""
        self._node = ""
        self._making: asyncio.Task[None] | None = None
        self._keys = count(1)
        self._serials = count(1)
        self._allocating = 0  # bytes being allocated now
        self._allocated = asyncio.Event()
        self._once = Once()
        self._closed = False
        self._tasks = Tasks(logger.error)
        self._to_note: list[LocalRound] = []
        self._noted: list[LocalRound] = []
        self._noting: asyncio.Task[None] | None = None
        self.held: list[Held] = []

    async def open(self, node: str) -> list[LocalRound]:
        """Adopt what a killed agent of this node has left, and remove other jobs' expired folders;
        returns the rounds of the adopted snapshots. If
        there is no folder, one is created when it is needed."""
        self._node = node
        try:
            due, adopted = await in_thread(
                lambda: self._adopt(node), limit=OPEN_LIMIT, name="segments", late=_leave_folder
            )
        except (OSError, TimeoutError) as error:
            self._set_no_folder(error)
            return []
        self._orphans.schedule(due)
        if adopted is None:
            return []
        self._folder, self.held, rounds = adopted
        if self._folder.torn:
            logger.warning("snapshots from before the last reboot are ignored")
        serials = [int(held.path.rpartition("-")[2]) for held in self.held]
        self._serials = count(max(serials, default=0) + 1)
        if self.held:
            sizes = size_text(sum(held.sizes.nbytes for held in self.held))
            logger.info("found snapshots of the previous agent: %s", sizes)
        return rounds

    async def note(self, rounds: list[LocalRound]) -> None:
        """Store what a later agent must know about the rounds and cannot read from the snapshots;
        the last call wins."""
        self._to_note = list(rounds)
        if self._noting is None or self._noting.done():
            self._noting = self._tasks.start(self._note(), "noting the rounds")
        await asyncio.shield(self._noting)

    async def _note(self) -> None:
        while (folder := self._folder) is not None and self._to_note != self._noted:
            self._noted = self._to_note
            note = partial(folder.note, self._noted)
            try:
                await in_thread(note, limit=OPEN_LIMIT, name="segments")
            except (OSError, TimeoutError) as error:
                self._once.log(f"snapshots will not outlive this agent: {error or 'no answer'}")

    def new_key(self) -> int:
        """A number that no segment has used."""
        return next(self._keys)

    async def segment_for(
        self, local_rank: int, sizes: Sizes, content: int, throttle: Throttle, least: int = 0
    ) -> Held:
        """The segment of this local rank for this layout: its previous one, or a new one. If memory
        is short, one with `least` slots (0: no fewer). Raises NoMemory."""
        fewer = replace(sizes, slots=least) if 0 < least < sizes.slots else sizes
        if wrong := sizes.why_invalid() or fewer.why_invalid():
            raise NoMemory(wrong)
        for held in self.held:
            mine = held.local_rank == local_rank and held.sizes in (sizes, fewer)
            if mine and not held.why_damaged():
                held.content = content
                return held
        try:
            self._announce(sizes)
            held = await self._make(local_rank, sizes, content, sizes.nbytes, throttle)
        except NoMemory as error:
            if fewer == sizes or self._closed:
                raise
            self._once.log(
                f"there is memory for only {least} snapshots of a rank: some are skipped while a "
                f"checkpoint is written ({error})"
            )
            held = await self._make(local_rank, fewer, content, fewer.nbytes, throttle)
        self._tasks.start(self._populate(held, throttle), "keeping segments")
        return held

    async def copy_of(self, layout_length: int, slot_bytes: int) -> Held:
        """Memory for a snapshot from another node; only slot 0 has pages. Raises NoMemory."""
        sizes = Sizes(0, layout_length, slot_bytes, MIN_SLOTS)
        if wrong := sizes.why_invalid():
            raise NoMemory(wrong)
        one = sizes.nbytes - (PAGE + slot_bytes)
        return await self._make(-1, sizes, 0, one, Throttle(0))

    async def replica_of(self, rank: int, sizes: Sizes, content: int) -> Held:
        """The segment that replicates this rank of another node: its previous one for this layout,
        or a new one. Raises NoMemory."""
        if wrong := sizes.why_invalid():
            raise NoMemory(wrong)
        for held in self.held:
            if held.replica == rank and held.sizes == sizes and not held.why_damaged():
                held.content = content
                return held
        slots = f"{sizes.slots} x {size_text(sizes.slot_bytes)}"
        words = f"replicas take {slots} of shared memory for each rank of another node"
        self._once.log(words, logging.INFO)
        throttle = Throttle(REPLICA_PATIENCE)
        return await self._make(-1, sizes, content, sizes.nbytes, throttle, rank)

    def drop(self, held: Held) -> None:
        """Release a segment; a process that has mapped it keeps its view."""
        if held in self.held:
            self.held.remove(held)
            held.released = True
            self._tasks.start(_release([held]), "keeping segments")

    async def close(self, *, job_over: bool) -> None:
        """Release all segments and the folder."""
        self._closed = True
        self._orphans.close()
        held, self.held = self.held, []
        for one in held:
            one.released = True
        folder, self._folder = self._folder, None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_release(held), REMOVE_LIMIT)
            if folder is not None:
                await in_thread(
                    lambda: folder.remove(job_over=job_over), limit=REMOVE_LIMIT, name="segments"
                )
        self._tasks.close()

    # ------------------------------------------------------------ creation

    async def _ensure_folder(self) -> None:
        """Create the folder once; concurrent callers wait for it."""
        if self._folder is None and not self._no_folder:
            if self._making is None:
                work = self._make_folder()
                self._making = self._tasks.start(work, "making the folder of snapshots")
            await asyncio.shield(self._making)

    async def _make_folder(self) -> None:
        def work() -> SegmentFolder | None:
            return take(self._base, self._job_id, self._node, make=True)

        def late(folder: SegmentFolder | None) -> None:
            if folder is not None:
                folder.remove(job_over=False)

        try:
            folder = await in_thread(work, limit=OPEN_LIMIT, name="segments", late=late)
        except (OSError, TimeoutError) as error:
            self._set_no_folder(error)
            return
        if folder is not None and self._closed:
            await in_thread(lambda: folder.remove(job_over=False), name="segments")
            return
        self._folder = folder

    def _set_no_folder(self, error: Exception) -> None:
        why = f"{self._base} does not answer"
        if isinstance(error, OSError) and str(error):
            why = f"{self._base}: {error.strerror or error}"
        self._no_folder = f"there is no folder for snapshots ({why})"

    async def _make(
        self,
        local_rank: int,
        sizes: Sizes,
        content: int,
        filled: int,
        throttle: Throttle,
        replica: int = -1,
    ) -> Held:
        named = await self._fits_in_folder(filled)
        self._allocating += filled
        try:
            return await self._allocate(
                named, local_rank, sizes, content, filled, throttle, replica
            )
        finally:
            self._allocating -= filled
            self._allocated.set()

    async def _allocate(
        self,
        named: bool,
        local_rank: int,
        sizes: Sizes,
        content: int,
        filled: int,
        throttle: Throttle,
        replica: int,
    ) -> Held:
        folder = self._folder if named else None
        path = ""
        if folder is not None and max(local_rank, replica) >= 0:  # else no later agent needs it
            path = folder.file(local_rank, sizes.layout, next(self._serials), replica)

        small: list[str] = []

        def work() -> tuple[int, mmap.mmap]:
            os.nice(BACKGROUND)
            if path:
                fd = memory.allocate_file(path, sizes.nbytes, filled, throttle, small.append)
            else:
                fd = memory.allocate_anonymous(
                    "elasticrun", sizes.nbytes, filled, throttle, small.append
                )
            return fd, memory.map_allocated(fd, sizes.nbytes, path)

        def late(taken: tuple[int, mmap.mmap]) -> None:
            """The caller no longer waits: release the memory."""
            if path:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            taken[1].close()
            os.close(taken[0])

        fd, mapped = await in_thread(work, name="segments", late=late)
        for why in small:
            words = f"snapshots are in pages of 4 KiB, which ranks map slowly ({why})"
            self._once.log(words, logging.INFO)
        view, slots = memoryview(mapped), sizes.slots
        initialize(
            view, layout_length=sizes.layout_length, slot_bytes=sizes.slot_bytes, slots=slots
        )
        segment = Segment(view)
        held = Held(
            *(next(self._keys), local_rank, sizes, content, path, fd, mapped, segment),
            replica=replica,
        )
        if self._closed:
            await _release([held])
            raise NoMemory("this agent ends")
        self.held.append(held)
        return held

    async def _fits_in_folder(self, need: int) -> bool:
        """Whether the memory fits into the folder; False: use anonymous memory. Removes the orphans
        of other jobs if it does not fit otherwise. Raises NoMemory.

        Concurrent allocations may or may not be counted in the free space yet, so before a refusal
        this waits until they are complete."""
        await self._ensure_folder()
        removed_orphans = False
        while True:
            self._allocated.clear()
            room, (free, bound) = await in_thread(self._free_space, name="segments")
            taking = self._allocating
            if need + taking <= free and room is not None and need + taking <= room:
                return True
            if taking:
                await self._allocated.wait()
            elif removed_orphans or not await self._orphans.remove_now():
                break
            else:
                removed_orphans = True
        if need > free:
            raise NoMemory(
                f"{size_text(need)} are needed, but {bound} has only {size_text(free)} left"
            )
        where = f"{self._base} has space for {size_text(room or 0)}"
        why = self._no_folder if room is None else where
        self._once.log(
            f"{why}: snapshots are kept in anonymous memory, and do not outlive this agent "
            f"(mount a larger tmpfs, or set {env.SHM_DIR} to another folder)"
        )
        return False

    def _free_space(self) -> tuple[int | None, tuple[int, str]]:
        room = None
        if self._folder is not None:
            with contextlib.suppress(OSError):
                room = memory.available_in(self._base)
        return room, memory.available_memory()

    async def _populate(self, held: Held, throttle: Throttle) -> None:
        """Populate the pages, in parallel with the rank, which populates its own mapping: whichever
        touches a page first has to wait until it is zeroed."""
        fd = os.dup(held.fd)

        def work() -> bool:
            os.nice(BACKGROUND)
            with os.fdopen(fd, "rb"):  # closed in the thread, which may outlive the caller
                return memory.populate(fd, held.sizes.nbytes, throttle)

        try:
            warm = await in_thread(work, name="warm")
        except NoThread:
            os.close(fd)
            warm = False
        if not warm:
            self._once.log("the kernel cannot prefault memory: the first snapshots take longer")

    # ------------------------------------------------------------ adoption

    def _adopt(self, node: str) -> tuple[float | None, Adopted | None]:
        """Remove other jobs' expired folders, and files of ours that cannot be adopted. Returns the
        seconds until the next scan of other jobs' folders, and what this node can adopt."""
        due = self._orphans.remove_expired().due
        folder = take(self._base, self._job_id, node, make=False)
        if folder is None:
            return due, None
        rounds = folder.rounds()
        most = max((one.nproc for one in rounds), default=0)
        found: list[Held] = []
        for file in folder.files():
            held = self._adopted(file) if rounds else None
            if held is not None and file.local_rank < most:
                found.append(held)
                continue
            with contextlib.suppress(OSError):
                os.unlink(file.path)
            if held is not None:
                unmap(held)
        return due, Adopted(folder, found, rounds)

    def _adopted(self, file: SegmentFile) -> Held | None:
        """Map a file that a killed agent has left, and unpin its slots; None if it is not a segment
        with snapshots."""
        try:
            fd = os.open(file.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            mapped = mmap.mmap(fd, os.fstat(fd).st_size)
        except (OSError, ValueError):
            os.close(fd)
            return None
        try:
            segment = Segment(memoryview(mapped))
            found = segment.layout()
            if found.key != file.layout:
                raise SegmentError("another layout")
        except (SegmentError, BufferError):
            os.close(fd)
            return None  # the mapping is freed with its last view
        sizes = Sizes(file.layout, len(found.encode()), segment.slot_bytes, segment.slots)
        held = Held(
            *(next(self._keys), file.local_rank, sizes, found.content, file.path, fd),
            *(mapped, segment, True),
            replica=file.replica,
            own=any(item.own for item in found.items),
        )
        for slot in range(segment.slots):
            segment.pin(slot, False)
        return held

    # ------------------------------------------------------------ helpers

    def _announce(self, sizes: Sizes) -> None:
        slots = f"{sizes.slots} x {size_text(sizes.slot_bytes)}"
        ranks = "the local rank" if self._nproc == 1 else f"each of {self._nproc} local ranks"
        self._once.log(f"snapshots take {slots} of shared memory for {ranks}", logging.INFO)


def _leave_folder(found: tuple[float | None, Adopted | None]) -> None:
    """Leave to a later agent a folder that was found too late."""
    if (adopted := found[1]) is not None:
        for one in adopted.held:
            unmap(one)
        adopted.folder.leave()


async def _release(held: list[Held]) -> None:
    """Unlink and unmap these segments; the kernel takes a while for gigabytes."""

    def work() -> None:
        for one in held:
            if one.path:
                with contextlib.suppress(OSError):
                    os.unlink(one.path)
            unmap(one)

    if held:
        await in_thread(work, name="segments")
