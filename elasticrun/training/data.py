"""`ElasticBatchSampler` chooses the samples of each step, independently of the number of ranks."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Final, SupportsIndex

import torch

from elasticrun.training.ranks import rank_and_world_size

_CONFIG: Final = ("samples", "global_batch", "shuffle", "seed", "drop_last")
"""The settings that decide which samples a step uses."""


class ElasticBatchSampler:
    """Batches of indices for `DataLoader(dataset, batch_sampler=sampler)`. The global batch of step
    k is a function of (seed, epoch, k) alone. It has the same samples at every world size, and a
    restored step is an exact position in the data.

    ::

        sampler = ElasticBatchSampler(dataset, global_batch=256, micro_batch=32)
        sampler.total_steps = total = epochs * sampler.steps_per_epoch
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        ckpt = Checkpointer("runs/a", model=model, optim=optimizer, sampler=sampler)
        start = ckpt.restore()
        batches = iter(loader)
        for step in range(start, total):
            for weight in sampler.weights(step):
                x, y = next(batches)
                (weight * loss_fn(model(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step + 1)

    Steps are counted from 0 over all epochs. The last step of an epoch has fewer samples, or is
    left out with `drop_last`. The order of an epoch is a permutation by torch's generator; it takes
    8 bytes of memory per sample and rank.

    The ranks' shares of a global batch differ by one sample at most. A share is split into
    micro-batches of at most `micro_batch` samples (default: one micro-batch), the same number on
    all ranks. `weights` gives the factor for the mean loss of each, so that DDP's averaged gradient
    is the mean over the global batch. If there are not enough samples for all micro-batches, an
    empty one gets a sample of another rank with weight 0.

    One pass over the sampler goes from the current step to the end of its epoch, or to
    `total_steps` if given, and the next pass begins there. The length is that of a whole pass. A
    Checkpointer that has the sampler sets its position at each step. Without one, call `set_step`
    at the start, and after a pass that ended early, because a loader reads ahead.

    `dataset`: the dataset, or its number of samples. `place`: rank and world size; default: those
    of the default process group or else of the environment, at each pass.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        total_steps: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        place: tuple[int, int] | None = None,
    ) -> None:
        """Raises ValueError for a number out of range, TypeError for a dataset without a length."""
        self.samples = _length(dataset)
        self.global_batch = _at_least(1, "global_batch", global_batch)
        self.micro_batch = None if micro_batch is None else _at_least(1, "micro_batch", micro_batch)
        self.total_steps = None if total_steps is None else _at_least(0, "total_steps", total_steps)
        """The step at which a pass ends; may be set later."""
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.seed = _whole("seed", seed)
        self._place = _checked(place)
        whole, rest = divmod(self.samples, self.global_batch)
        self.steps_per_epoch = whole + bool(rest and not self.drop_last)
        if not self.steps_per_epoch:
            raise ValueError(
                f"a dataset of {self.samples} samples has no step of {self.global_batch} samples"
            )
        self._step = 0
        self._order: tuple[int, torch.Tensor] | None = None

    # ------------------------------------------------------------ the place

    @property
    def step(self) -> int:
        """The step at which the next pass begins."""
        return self._step

    @property
    def epoch(self) -> int:
        """The epoch in which the next pass begins."""
        return self._step // self.steps_per_epoch

    def set_step(self, step: int) -> None:
        """Begin the next pass at this step, which is the number of completed steps."""
        self._step = _at_least(0, "step", step)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass in this epoch: at the current step if it is in this epoch, else at
        the epoch's start. Frameworks call it, as they do for torch's DistributedSampler."""
        if _at_least(0, "epoch", epoch) != self.epoch:
            self._step = epoch * self.steps_per_epoch

    # ------------------------------------------------------------ batches

    @property
    def accumulation(self) -> int:
        """Number of micro-batches of this rank in a step with a full global batch."""
        return self._count(min(self.global_batch, self.samples), self._ranks()[1])

    @property
    def batch_size(self) -> int:
        """Raises TypeError: accelerate would split the batches among the ranks again, and silently
        drop samples."""
        raise TypeError(
            "these batches are already this rank's share: use the DataLoader of an "
            "ElasticBatchSampler as it is, without accelerator.prepare()"
        )

    def weights(self, step: int) -> list[float]:
        """The factor for the mean loss of each micro-batch of this rank in `step`."""
        total = len(self._positions(_at_least(0, "step", step)))
        _, world_size = self._ranks()
        return [world_size * len(part) / total for part in self._parts(step)]

    def global_indices(self, step: int) -> list[int]:
        """The indices of all samples of `step`."""
        found = self._positions(_at_least(0, "step", step))
        order = self._epoch_order(step // self.steps_per_epoch)
        indices: list[int] = order[found.start : found.stop].tolist()
        return indices

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's micro-batches of one pass. At its end, the position moves to the next
        pass."""
        end = self._end()
        for step in range(self._step, end):
            indices = self.global_indices(step)
            *others, last = self._parts(step)
            for part in others:
                yield [indices[each] for each in part or (0,)]
            if step + 1 == end:  # before the last batch: no other may be requested
                self._step = end
            yield [indices[each] for each in last or (0,)]

    def __len__(self) -> int:
        """Number of micro-batches of this rank in an epoch, or in all steps up to `total_steps`:
        constant, because frameworks use it as the length of an epoch."""
        return self._batches(self.steps_per_epoch if self.total_steps is None else self.total_steps)

    def batches_until(self, step: int) -> int:
        """Number of micro-batches, out of the `len(self)` of a pass, in its steps up to `step`;
        after the last step of an epoch, all of that epoch's."""
        if self.total_steps is None and step:
            step = (step - 1) % self.steps_per_epoch + 1
        return self._batches(step)

    def _batches(self, steps: int) -> int:
        """Micro-batches of this rank in the first `steps` steps."""
        last = steps // self.steps_per_epoch  # steps that end an epoch, which may be smaller
        ends = last * len(self._parts(self.steps_per_epoch - 1))
        return (steps - last) * self.accumulation + ends

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The settings that decide which samples a step uses. The position itself is the
        Checkpointer's step."""
        return {name: getattr(self, name) for name in _CONFIG}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the steps of the saved training have the same samples; raises ValueError if
        not. Changes nothing."""
        mine = self.state_dict()
        changed = [n for n, value in mine.items() if value != state.get(n)]
        if changed:
            what = ", ".join(f"{n} is {mine[n]!r} and was {state.get(n)!r}" for n in changed)
            raise ValueError(
                f"the sampler's {what}: the restored step would be another position in the data. "
                "Restore "
                "the old value, or use a new folder"
            )

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.state_dict().items())
        return f"{type(self).__name__}({settings}, step={self._step})"

    # ------------------------------------------------------------

    def _ranks(self) -> tuple[int, int]:
        return self._place or rank_and_world_size()

    def _end(self) -> int:
        """The step after the last one of the next pass."""
        if self.total_steps is not None:
            return self.total_steps
        return (self.epoch + 1) * self.steps_per_epoch

    def _positions(self, step: int) -> range:
        """Where a step's samples are in the order of its epoch."""
        start = step % self.steps_per_epoch * self.global_batch
        return range(start, min(start + self.global_batch, self.samples))

    def _count(self, total: int, world_size: int) -> int:
        """Number of micro-batches of each rank for a global batch of `total` samples."""
        largest = -(-total // world_size)
        return 1 if self.micro_batch is None else -(-largest // self.micro_batch)

    def _parts(self, step: int) -> list[range]:
        """Positions of this rank's micro-batches within the global batch."""
        total = len(self._positions(step))
        rank, world_size = self._ranks()
        count = self._count(total, world_size)
        share = _part(range(total), rank, world_size)
        return [_part(share, number, count) for number in range(count)]

    def _epoch_order(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._make_order(epoch))
        return self._order[1]

    def _make_order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.samples)
        # torch's CPU generator uses 32 bits of a seed, and both numbers must affect them
        mixed = hashlib.blake2b(f"{self.seed} {epoch}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(mixed, "big"))
        return torch.randperm(self.samples, generator=generator)


def _part(whole: range, number: int, count: int) -> range:
    """One of `count` contiguous parts whose sizes differ by one at most."""
    size, rest = divmod(len(whole), count)
    start = number * size + min(number, rest)
    return whole[start : start + size + (number < rest)]


def _length(dataset: Sized | int) -> int:
    if isinstance(dataset, Sized):
        return len(dataset)
    if isinstance(dataset, SupportsIndex):
        return operator.index(dataset)
    raise TypeError(
        f"the dataset, a {type(dataset).__name__}, has no length, so a step is not a position in "
        "it; "
        "save the position of a stream with Checkpointer.per_rank()"
    )


def _checked(place: tuple[int, int] | None) -> tuple[int, int] | None:
    if place is None:
        return None
    rank, world_size = (_whole("place", each) for each in place)
    if not 0 <= rank < world_size:
        raise ValueError(f"place is {place}: it must be (rank, world size), with the rank below")
    return rank, world_size


def _at_least(least: int, name: str, value: SupportsIndex) -> int:
    """`value` as an integer. Raises ValueError below `least`."""
    found = _whole(name, value)
    if found < least:
        raise ValueError(f"{name} is {found}; it must be at least {least}")
    return found


def _whole(name: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be a whole number") from None
