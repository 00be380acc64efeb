"""A small language model, trained without snapshots, with elasticrun's, and with a prototype.

The prototype copies into page-locked shared memory on a side stream while the next step computes.
Blocks of a few seconds of each way follow each other in two rounds, so that drift affects all.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpu.results import CUDA, NCCL, emit, in_gib, median, trying
from elasticrun.training import Checkpointer

HOME: Final = torch.device("cuda:0" if CUDA else "cpu")
BLOCK_SECONDS: Final = 2.5 if CUDA else 1.0
ROUNDS: Final = 2
WIDTH, DEPTH, WORDS, BATCH, LENGTH = (1024, 6, 12000, 16, 512) if CUDA else (64, 2, 500, 4, 32)
ALIGNMENT: Final = 512

cuda: Any = torch.cuda  # untyped


def wait_for_device() -> None:
    if CUDA:
        cuda.synchronize()


class Mapping:
    """Unnamed shared memory with all its pages mapped. It is not limited by the size of /dev/shm.
    `seconds` has the duration of each call."""

    def __init__(self, size: int) -> None:
        self.seconds: dict[str, float] = {}
        self._pieces: list[int] = []
        file = os.memfd_create("gpu-check")
        try:
            began = time.monotonic()
            os.posix_fallocate(file, 0, size)
            self.seconds["allocated"] = time.monotonic() - began
            began = time.monotonic()
            self._map = mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self.seconds["mapped"] = time.monotonic() - began
        finally:
            os.close(file)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def register(self, piece: int = 1 << 62) -> None:
        """Page-lock it, in pieces of this many bytes."""
        began, at, size = time.monotonic(), self.bytes.data_ptr(), self.bytes.numel()
        for offset in range(0, size if CUDA else 0, piece):
            length = min(piece, size - offset)
            if error := int(cuda.cudart().cudaHostRegister(at + offset, length, 0)):
                raise RuntimeError(f"cudaHostRegister: error {error} at {offset >> 20} MiB")
            self._pieces.append(at + offset)
        self.seconds["page-locked"] = time.monotonic() - began

    def unregister(self) -> None:
        began = time.monotonic()
        while self._pieces:
            if error := int(cuda.cudart().cudaHostUnregister(self._pieces.pop())):
                raise RuntimeError(f"cudaHostUnregister: error {error}")
        self.seconds["released"] = time.monotonic() - began

    def seconds_in_words(self) -> str:
        return ", ".join(f"{name} in {took:.3g} s" for name, took in self.seconds.items())

    def views(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A tensor in this memory for each of these, one after the other."""
        found, at = [], 0
        for one in like:
            found.append(self.bytes[at : at + one.nbytes].view(one.dtype).view(one.shape))
            at += aligned(one.nbytes)
        return found


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Prototype:
    """Takes snapshots by copies that overlap training: the host only issues them, and the
    optimizer's next step waits for them on the device."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor], slots: int = 2
    ) -> None:
        self._tensors, self._number = tensors, 0
        size = sum(aligned(one.nbytes) for one in tensors)
        self.mappings = [Mapping(size) for _ in range(slots)]
        for mapping in self.mappings:
            mapping.register()
        self._slots = [mapping.views(tensors) for mapping in self.mappings]
        self._done: list[Any] = [None] * slots
        self._pending: Any = None
        self._side: Any = cuda.Stream() if CUDA else None
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, *_: object) -> None:
        if self._pending is not None:
            cuda.current_stream().wait_event(self._pending)
        self._pending = None

    def take(self, *, host_waits: bool = False) -> list[torch.Tensor]:
        """Issue the copies of one snapshot; returns its tensors."""
        slot = self._number % len(self._slots)
        self._number += 1
        if self._done[slot] is not None:
            self._done[slot].synchronize()  # here its commit word would be written
        if CUDA:
            self._side.wait_stream(cuda.current_stream())
        with cuda.stream(self._side):  # without a stream this has no effect
            for target, source in zip(self._slots[slot], self._tensors, strict=True):
                target.copy_(source, non_blocking=True)
        if CUDA:
            self._pending = self._done[slot] = cuda.Event()
            self._pending.record(self._side)
            if host_waits:
                self._pending.synchronize()
        return self._slots[slot]

    def release(self) -> None:
        wait_for_device()
        for mapping in self.mappings:
            mapping.unregister()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, WIDTH // 64, 4 * WIDTH, 0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(self.words(tokens)) @ self.words.weight.T
        return found


class Training:
    """The model, its optimizer, and one batch on the device."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model().to(HOME)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5, fused=CUDA)
        self._tokens = torch.randint(WORDS, (BATCH, LENGTH), device=HOME)
        for _ in range(8):
            self.step()

    def step(self) -> None:
        with torch.autocast(HOME.type, torch.bfloat16):
            logits = self.model(self._tokens).flatten(0, 1).float()
            loss = nn.functional.cross_entropy(logits, self._tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and optimizer state on the device."""
        found: list[torch.Tensor] = [one.detach() for one in self.model.parameters()]
        rows = self.optimizer.state.values()
        return found + [one for row in rows for one in row.values() if one.device == HOME]


class Way(NamedTuple):
    """A way to train: a snapshot by `save(step)` after every so many steps (0: none)."""

    every: int
    save: Callable[[int], None]


NO_SNAPSHOTS: Final = "no snapshots"
OFTEN: Final = {"10 steps": 10, "step": 1}


def compare(training: Training, ways: dict[str, Way]) -> None:
    """Measure steps per second of each way, and how long each snapshot holds up the host."""
    plain = {NO_SNAPSHOTS: Way(0, lambda _: None)}
    rates: dict[str, list[float]] = {name: [] for name in plain | ways}
    stalls: dict[str, list[float]] = {name: [] for name in plain | ways}
    step = 0
    for _ in range(ROUNDS):
        for name, way in (plain | ways).items():
            rate, held_up, step = block(training, way, step)
            rates[name].append(rate)
            stalls[name] += held_up
    base = sum(rates[NO_SNAPSHOTS])
    for name, found in rates.items():
        slower = 100 * (1 - sum(found) / base)
        median(name, found, "steps/s", f"{slower:.1f} % slower")
        if stalls[name]:
            some_of(f"{name}: the host is held up", stalls[name])


def block(training: Training, way: Way, step: int) -> tuple[float, list[float], int]:
    """One block: steps per second, the seconds of each save, the last step. The device is waited
    for only before the clock starts and before it stops."""
    wait_for_device()
    began, first, stalls = time.monotonic(), step, []
    while time.monotonic() - began < BLOCK_SECONDS or step % 10:
        training.step()
        step += 1
        if way.every and step % way.every == 0:
            before = time.monotonic()
            way.save(step)
            stalls.append(time.monotonic() - before)
    wait_for_device()
    return (step - first) / (time.monotonic() - began), stalls, step


def some_of(name: str, samples: list[float]) -> None:
    """Write the median of samples, with about ten of them in order of size."""
    listed = sorted(samples)[:: len(samples) // 9 + 1]
    median(name, listed, "s", f"{len(samples)} in all, some in order of size:")


def with_checkpointer(training: Training, folder: str) -> None:
    """Compare with elasticrun's snapshots as they are."""
    saver = Checkpointer(
        folder, model=training.model, optim=training.optimizer, every_steps=1,
        persist_every_seconds=None,
    )  # fmt: skip
    began, alone = time.monotonic(), list[float]()
    saver.restore()
    emit("restore() of nothing", time.monotonic() - began, "s")

    def save(step: int) -> None:
        wait_for_device()  # step() would wait for the device anyhow; the copy is what is measured
        before, skipped = time.monotonic(), saver.stats.skipped
        saver.step(step)
        if saver.stats.skipped == skipped:
            alone.append(time.monotonic() - before)

    ways = {f"Checkpointer, every {often}": Way(every, save) for often, every in OFTEN.items()}
    compare(training, ways)
    some_of("step() with a snapshot, the device idle before", alone)
    stats = saver.stats
    counts = (stats.snapshots, stats.skipped, stats.failed)
    good = stats.snapshots > 2 and not stats.failed
    emit("snapshots taken, skipped, failed", str(counts), "", stats.error, good)
    saver.close()


def with_prototype(training: Training) -> None:
    """Compare page-locked slots, with a host that waits and with copies that overlap."""
    tensors = training.tensors()
    saver = Prototype(training.optimizer, tensors)
    with trying("the overlapped copy is of one step"):
        before = [one.clone() for one in tensors]
        slot = saver.take()
        training.step()  # changes all of them
        wait_for_device()
        same = all(torch.equal(one, two.cpu()) for one, two in zip(slot, before, strict=True))
        moved = not torch.equal(before[0], tensors[0])
        note = f"training has moved on meanwhile: {moved}"
        emit("the overlapped copy is of one step", same, "", note, same and moved)

    def save(host_waits: bool) -> Callable[[int], None]:
        def take(_: int) -> None:
            saver.take(host_waits=host_waits)

        return take

    names = {"page-locked, the host waits": True, "page-locked, overlapped": False}
    compare(
        training,
        {
            f"{name}, every {often}": Way(every, save(host_waits))
            for name, host_waits in names.items()
            for often, every in OFTEN.items()
        },
    )
    saver.release()
    emit("a slot", None, "", saver.mappings[0].seconds_in_words())


def run(way: str, folder: str) -> None:
    """The job of the parts `train` and `overlap`."""
    dist.init_process_group(NCCL)
    training = Training()
    size = in_gib(sum(one.nbytes for one in training.tensors()))
    peak = in_gib(cuda.max_memory_allocated()) if CUDA else 0.0
    emit("state of the model and Adam", size, "GiB", f"at most {peak:.3g} GiB of the device in use")
    if way == "train":
        with_checkpointer(training, folder)
    else:
        with_prototype(training)
    dist.destroy_process_group()
