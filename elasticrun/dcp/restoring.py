"""Which pieces of which snapshots make up the chunks that a rank needs, at any number of ranks.

Shards are offered one after the other. A saved chunk that several ranks hold counts once. What is
needed is covered when the volumes of what was found add up to its own; only then is anything
copied, so that a rank never goes on with half of a state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from elasticrun.wire.layout import Item, Layout


class RestoreError(ValueError):
    """The saved state does not fit what is wanted; a sentence."""


@dataclass(frozen=True, slots=True)
class Move:
    """Copy a block: from tensor `index` (in layout order) of shard `source` to the wanted item
    `want`; first elements in each, and lengths, by dimension."""

    want: int
    source: int
    index: int
    from_: tuple[int, ...]
    to: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(slots=True)
class _Need:
    item: Item
    left: int  # elements not yet found
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)


class Cover:
    """What is needed, and how much of it has been found. RestoreError for shapes that differ, and
    for saved chunks that lie over each other."""

    def __init__(self, wants: Sequence[Item], values: Iterable[str] = ()) -> None:
        """`wants`: chunks of tensors; `values`: names of opaque values."""
        self._needs = [_Need(item, math.prod(item.sizes)) for item in wants]
        self._unfound = set(values)
        self.moves: list[Move] = []
        self.values: dict[str, tuple[int, int]] = {}  # name: shard, place in its table

    @property
    def missing(self) -> list[str]:
        """Names of what is not, or not wholly, there."""
        return sorted({need.item.fqn for need in self._needs if need.left} | self._unfound)

    @property
    def whole(self) -> bool:
        return not self._unfound and not any(need.left for need in self._needs)

    def offer(self, source: int, layout: Layout) -> None:
        """Take what is needed of one shard, which is known as `source`."""
        for place, item in enumerate(layout.values):
            if item.fqn in self._unfound:
                self._unfound.remove(item.fqn)
                self.values[item.fqn] = (source, place)
        tensors: dict[str, list[tuple[int, Item]]] = {}
        for index, item in enumerate(layout.tensors):
            tensors.setdefault(item.fqn, []).append((index, item))
        for want, need in enumerate(self._needs):
            for index, item in tensors.get(need.item.fqn, ()):
                self._take(want, need, source, index, item)

    def _take(self, want: int, need: _Need, source: int, index: int, item: Item) -> None:
        chunk = (item.offsets, item.sizes)
        if (need.item is item or _same(need.item, item)) and not need.seen:
            if need.left:  # all of it at once, as a rank finds it in its own shard
                need.seen.append(chunk)
                need.left, nowhere = 0, (0,) * len(item.sizes)
                self.moves.append(Move(want, source, index, nowhere, nowhere, item.sizes))
            return
        if item.shape != need.item.shape:
            raise RestoreError(
                f"{item.fqn} was saved with shape {item.shape} and is now {need.item.shape}"
            )
        if not need.left or chunk in need.seen:
            return
        block = overlap(chunk, (need.item.offsets, need.item.sizes))
        if block is None:
            return
        if any(overlap(chunk, other) is not None for other in need.seen):
            raise RestoreError(f"two saved chunks of {item.fqn} lie over each other")
        need.seen.append(chunk)
        begin, lengths = block
        need.left -= math.prod(lengths)
        self.moves.append(
            Move(
                *(want, source, index),
                tuple(b - o for b, o in zip(begin, item.offsets, strict=True)),
                tuple(b - o for b, o in zip(begin, need.item.offsets, strict=True)),
                lengths,
            )
        )


def _same(one: Item, other: Item) -> bool:
    """Whether they are the same chunk of tensors of one shape."""
    return (one.shape, one.offsets, one.sizes) == (other.shape, other.offsets, other.sizes)


Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def overlap(one: Chunk, other: Chunk) -> Chunk | None:
    """What two chunks of a tensor have in common, None for nothing."""
    begin = tuple(map(max, zip(one[0], other[0], strict=True)))
    ends = (
        min(a + n, b + m) for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True)
    )
    lengths = tuple(end - at for end, at in zip(ends, begin, strict=True))
    return (begin, lengths) if all(n > 0 for n in lengths) else None


Carry = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


def copy(
    moves: Sequence[Move],
    shards: Mapping[int, Sequence[torch.Tensor]],
    wanted: Sequence[torch.Tensor],
    carry: Carry | None = None,
) -> None:
    """Carry the moves out: from the tensors of each shard, in layout order, into the wanted ones.
    Types are converted as DCP converts them. `carry`: copies all targets from their sources."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for move in moves:
        target, source = wanted[move.want], shards[move.source][move.index]
        if move.lengths != tuple(target.shape) or move.lengths != tuple(source.shape):
            target, source = (
                _block(target, move.to, move.lengths),
                _block(source, move.from_, move.lengths),
            )
        targets.append(target)
        sources.append(source)
    (carry or copy_all)(targets, sources)


def copy_all(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False
) -> None:
    """Copy tensor by tensor, in one call where torch has it."""
    together = getattr(torch, "_foreach_copy_", None)  # the public way is one copy_ for each
    with torch.no_grad():
        if together is not None and targets:
            together(list(targets), list(sources), non_blocking=non_blocking)
            return
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=non_blocking)


def _block(tensor: torch.Tensor, begin: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
    for axis, (at, length) in enumerate(zip(begin, lengths, strict=True)):
        tensor = tensor.narrow(axis, at, length)
    return tensor


def names_of(layouts: Iterable[Layout]) -> dict[str, Item]:
    """One item for each name in these layouts: a tensor's shape and type, or an opaque value."""
    found: dict[str, Item] = {}
    for layout in layouts:
        for item in layout.items:
            found.setdefault(item.fqn, item)
    return found
