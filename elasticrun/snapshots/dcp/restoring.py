"""Assembles the chunks that a rank needs from snapshots of any number of ranks.

Shards are offered one by one. A saved chunk that several ranks hold counts once. A needed chunk is
covered when the sizes of the pieces found for it add up to its size. Callers copy only once
everything is covered, so a rank never continues with half a state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from elasticrun.snapshots.shm.layout import Item, Layout


class RestoreError(ValueError):
    """The saved state does not match the state to restore."""


class Move(NamedTuple):
    """An order to copy a block from tensor `at` (in layout order) of shard `source` to the wanted
    item number `want`. `from_` and `to`: the block's offsets in them; `lengths`: its sizes, () for
    the whole tensor."""

    want: int
    source: int
    at: int
    from_: tuple[int, ...] = ()
    to: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


_UNTOUCHED: Final = -1


class Cover:
    """Tracks which parts of the needed items were found, and the moves that copy them."""

    def __init__(self, wants: Sequence[Item], values: Iterable[str] = ()) -> None:
        """`wants`: chunks of tensors; `values`: names of opaque values."""
        self._wants = wants
        self._named: dict[str, list[int]] = {}
        for want, item in enumerate(wants):
            self._named.setdefault(item.fqn, []).append(want)
        # number of elements not found yet; complete items are removed
        self._left = {w: _UNTOUCHED for w, item in enumerate(wants) if 0 not in item.sizes}
        self._seen: dict[int, list[Chunk]] = {}
        self._unfound = set(values)
        self.moves: list[Move] = []
        self.values: dict[str, tuple[int, int]] = {}  # by name: shard, position in its table

    @property
    def missing(self) -> list[str]:
        """Names of items that are missing or incomplete."""
        return sorted({self._wants[want].fqn for want in self._left} | self._unfound)

    @property
    def whole(self) -> bool:
        return not self._unfound and not self._left

    def offer(self, source: int, layout: Layout) -> None:
        """Plan to take what is still needed from one shard; `source` identifies it. Raises
        RestoreError if a tensor has another shape, or saved chunks overlap."""
        for place, item in enumerate(layout.values):
            if item.fqn in self._unfound:
                self._unfound.remove(item.fqn)
                self.values[item.fqn] = (source, place)
        for index, item in enumerate(layout.tensors):
            for want in self._named.get(item.fqn, ()):
                wanted = self._wants[want]
                if (wanted is item or _same(wanted, item)) and self._seen.get(want) is None:
                    # the whole chunk at once, as in a rank's own shard
                    if self._left.pop(want, None) is not None:
                        self.moves.append(Move(want, source, index))
                else:
                    self._use_part(want, wanted, source, index, item)

    def _use_part(self, want: int, wanted: Item, source: int, index: int, item: Item) -> None:
        """Plan to take the part of a wanted item that this chunk covers, if any."""
        if item.shape != wanted.shape:
            raise RestoreError(
                f"{item.fqn} was saved with shape {item.shape} and is now {wanted.shape}"
            )
        left = self._left.get(want, 0)
        chunk, seen = (item.offsets, item.sizes), self._seen.get(want, [])
        if not left or chunk in seen:
            return
        block = overlap(chunk, (wanted.offsets, wanted.sizes))
        if block is None:
            return
        if any(overlap(chunk, other) is not None for other in seen):
            raise RestoreError(f"two saved chunks of {item.fqn} overlap")
        self._seen[want] = [*seen, chunk]
        begin, lengths = block
        left = (math.prod(wanted.sizes) if left == _UNTOUCHED else left) - math.prod(lengths)
        if left:
            self._left[want] = left
        else:
            del self._left[want]
        self.moves.append(
            Move(
                *(want, source, index),
                tuple(b - o for b, o in zip(begin, item.offsets, strict=True)),
                tuple(b - o for b, o in zip(begin, wanted.offsets, strict=True)),
                lengths,
            )
        )


def _same(one: Item, other: Item) -> bool:
    """Whether both are the same chunk of tensors of the same shape."""
    return (one.shape, one.offsets, one.sizes) == (other.shape, other.offsets, other.sizes)


Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def overlap(one: Chunk, other: Chunk) -> Chunk | None:
    """The intersection of two chunks of a tensor; None if it is empty."""
    begin = tuple(map(max, zip(one[0], other[0], strict=True)))
    ends = (
        min(a + n, b + m) for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True)
    )
    lengths = tuple(end - at for end, at in zip(ends, begin, strict=True))
    return (begin, lengths) if all(n > 0 for n in lengths) else None


BlockCopier = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


def copy(
    moves: Sequence[Move],
    shards: Mapping[int, Sequence[torch.Tensor]],
    wanted: Sequence[torch.Tensor],
    copier: BlockCopier | None = None,
) -> None:
    """Perform the moves: from the tensors of each shard, in layout order, into the wanted ones.
    Dtypes are converted as in DCP. `copier`: copies a list of sources into a list of targets."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for move in moves:
        target, source = wanted[move.want], shards[move.source][move.at]
        if move.lengths:
            target = _block(target, move.to, move.lengths)
            source = _block(source, move.from_, move.lengths)
        targets.append(target)
        sources.append(source)
    (copier or copy_all)(targets, sources)


def copy_all(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False
) -> None:
    """Copy each source into its target; in a single call if this torch supports that."""
    together = getattr(torch, "_foreach_copy_", None)  # public alternative: one copy_ per tensor
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
