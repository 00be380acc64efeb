"""A small language model, trained without snapshots, with snapshots that the host waits for, and
with snapshots that are copied while the next step computes.

Blocks of a few seconds of each way follow each other in two rounds, so that drift affects all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from benchmarks.gpu.results import CUDA, NCCL, emit, in_gib, median, trying
from elasticrun.training import Checkpointer

HOME: Final = torch.device("cuda:0" if CUDA else "cpu")
BLOCK_SECONDS: Final = 2.5 if CUDA else 1.0
ROUNDS: Final = 2
WIDTH, DEPTH, WORDS, BATCH, LENGTH = (1024, 6, 12000, 16, 512) if CUDA else (64, 2, 500, 4, 32)

cuda: Any = torch.cuda  # untyped


def wait_for_device() -> None:
    if CUDA:
        cuda.synchronize()


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


def compare(training: Training, ways: dict[str, Way]) -> int:
    """Measure steps per second of each way, and how long each snapshot holds up the host. Returns
    the last step."""
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
    return step


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


def with_checkpointer(training: Training, folder: str, overlap: bool) -> None:
    """Compare with elasticrun's snapshots, which the host waits for or which overlap training."""
    saver = Checkpointer(
        folder, model=training.model, optim=training.optimizer, every_steps=1,
        persist_every_seconds=None, overlap=overlap,
    )  # fmt: skip
    name = "overlapped" if overlap else "the host waits"
    began, alone = time.monotonic(), list[float]()
    saver.restore()
    emit(f"{name}: restore() of nothing", time.monotonic() - began, "s")

    def save(step: int) -> None:
        if not overlap:
            wait_for_device()  # step() would wait for the device anyhow; the copy is measured
        before, skipped = time.monotonic(), saver.stats.skipped
        saver.step(step)
        if saver.stats.skipped == skipped:
            alone.append(time.monotonic() - before)

    ways = {f"{name}, every {often}": Way(every, save) for often, every in OFTEN.items()}
    last = compare(training, ways)
    some_of(f"{name}: step() with a snapshot", alone)
    with trying(f"{name}: a snapshot is of one step while training goes on"):
        is_of_one_step(training, saver, last + 1, name)
    stats = saver.stats
    counts = (stats.snapshots, stats.skipped, stats.failed)
    good = stats.snapshots > 2 and not stats.failed
    emit(f"{name}: snapshots taken, skipped, failed", str(counts), "", stats.error, good)
    saver.close()


def is_of_one_step(training: Training, saver: Checkpointer, step: int, name: str) -> None:
    """Take a snapshot, train on, and compare what is in memory with the state of its step."""
    before = [one.clone().cpu() for one in training.tensors()]
    wait_for_device()
    saver.step(step)
    training.step()  # changes all of them
    moved = not torch.equal(before[0], training.tensors()[0].cpu())
    taker: Any = saver._backend
    mapped, layout = taker._taker._mapped, taker._taker._layout
    taker._taker._settle(60)
    newest = mapped.segment.snapshots()[-1]
    found = mapped.tensors(newest.slot, layout)
    saved = {(one.dtype, one.shape, hash_of(one)) for one in found}
    same = all((one.dtype, one.shape, hash_of(one)) in saved for one in before)
    note = f"of step {newest.step}, wanted {step}; training has moved on meanwhile: {moved}"
    good = same and moved and newest.step == step
    emit(f"{name}: a snapshot is of one step while training goes on", same, "", note, good)


def hash_of(tensor: torch.Tensor) -> int:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return xxhash.xxh3_64_intdigest(flat.numpy().tobytes())


def run(folder: str) -> None:
    """The job of the part `overlap`."""
    dist.init_process_group(NCCL)
    training = Training()
    size = in_gib(sum(one.nbytes for one in training.tensors()))
    peak = in_gib(cuda.max_memory_allocated()) if CUDA else 0.0
    emit("state of the model and Adam", size, "GiB", f"at most {peak:.3g} GiB of the device in use")
    for overlap in (False, True):
        with_checkpointer(training, folder, overlap)
    dist.destroy_process_group()
