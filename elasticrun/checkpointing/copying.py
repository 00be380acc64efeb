"""Copies into a rank's own memory at a restore, and what keeps it from being quick.

The ranks of a node have all its cores then, as nothing else is done. Tensors that were never
touched get their pages by the copy, which takes the kernel several times as long as the copy: that
is shared among cores too. The threads live for the copy alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from elasticrun.dcp.restoring import copy_all
from elasticrun.wire import env

MOST_THREADS: Final = 8
"""A few fill the memory bus."""

LEAST_BYTES: Final = 32 * 1024 * 1024
"""For one thread: less is copied before a second one has begun."""

SHARES: Final = 8
"""Of what one thread copies: who is through takes another one, so that all end together."""

LEAST_SHARE: Final = 4 * 1024 * 1024
"""Bytes; of smaller ones the handing out takes longer."""

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def threads_for(nbytes: int) -> int:
    """How many threads this rank copies so many bytes with: its share of the node's cores."""
    try:
        local = max(1, int(os.environ.get(env.LOCAL_WORLD_SIZE, "1")))
    except ValueError:
        local = 1
    cores = len(os.sched_getaffinity(0)) // local
    return max(1, min(MOST_THREADS, cores, nbytes // LEAST_BYTES))


def copy_in(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensor by tensor; what lies in this machine's memory by several threads. Whatever torch
    raises."""
    here = all(target.is_cpu for target in targets)
    sizes = [target.nbytes for target in targets] if here else []
    count = threads_for(sum(sizes))
    if count < 2:
        copy_all(targets, sources)
        return
    each = max(LEAST_SHARE, sum(sizes) // (count * SHARES) + 1)
    todo = iter(_shares(zip(targets, sources, sizes, strict=True), each))  # the threads share it
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for share in todo:
                copy_all([target for target, _ in share], [source for _, source in share])
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=work, daemon=True) for _ in range(count - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def _shares(sized: Iterable[tuple[torch.Tensor, torch.Tensor, int]], each: int) -> list[Pairs]:
    """Pairs of about `each` bytes together; a large one is cut, where its elements are in a row."""
    shares: list[Pairs] = [[]]
    left = each
    for target, source, nbytes in sized:
        while nbytes > left and _in_a_row(target, source):
            cut = max(1, left // target.element_size())
            if cut >= target.numel():
                break
            target, source = target.detach().view(-1), source.view(-1)
            shares[-1].append((target[:cut], source[:cut]))
            target, source = target[cut:], source[cut:]
            nbytes = target.nbytes
            shares.append([])
            left = each
        shares[-1].append((target, source))
        left -= nbytes
        if left <= 0:
            shares.append([])
            left = each
    return [share for share in shares if share]


def _in_a_row(target: torch.Tensor, source: torch.Tensor) -> bool:
    return target.is_contiguous() and source.is_contiguous() and target.shape == source.shape
