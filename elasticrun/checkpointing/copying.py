"""Copies into a rank's own memory at a restore, and what keeps it from being quick.

The ranks of a node have all its cores then, as nothing else is done. Tensors that were never
touched get their pages by the copy, which takes the kernel several times as long as the copy: that
is shared among cores too. The threads live for the copy alone.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from elasticrun.dcp.restoring import copy_all
from elasticrun.wire import env

MOST_THREADS: Final = 8
"""A few fill the memory bus."""

LEAST_BYTES: Final = 32 * 1024 * 1024
"""For one thread: less is copied before a second one has begun."""

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def no_collection() -> Iterator[None]:
    """Python looks for garbage whenever many objects were made; with all of torch in memory that
    takes longer than making them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


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
    pairs: Pairs = list(zip(targets, sources, strict=True))
    here = [pair for pair in pairs if pair[0].device.type == "cpu"]
    count = threads_for(sum(target.nbytes for target, _ in here))
    if count < 2 or len(here) < len(pairs):
        copy_all(targets, sources)
        return
    shares = _shares(here, count)
    errors: list[BaseException] = []

    def work(share: Pairs) -> None:
        try:
            copy_all([target for target, _ in share], [source for _, source in share])
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=work, args=(share,), daemon=True) for share in shares[1:]]
    for thread in others:
        thread.start()
    work(shares[0])
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def _shares(pairs: Pairs, count: int) -> list[Pairs]:
    """Pairs of about equal bytes together; a large one is cut, where its elements are in a row."""
    each = sum(target.nbytes for target, _ in pairs) // count + 1
    shares: list[Pairs] = [[]]
    left = each
    for target, source in pairs:
        while target.nbytes > left and _in_a_row(target, source):
            cut = max(1, left // target.element_size())
            if cut >= target.numel():
                break
            target, source = target.detach().view(-1), source.view(-1)
            shares[-1].append((target[:cut], source[:cut]))
            target, source = target[cut:], source[cut:]
            shares.append([])
            left = each
        shares[-1].append((target, source))
        left -= target.nbytes
        if left <= 0:
            shares.append([])
            left = each
    return [share for share in shares if share]


def _in_a_row(target: torch.Tensor, source: torch.Tensor) -> bool:
    return target.is_contiguous() and source.is_contiguous() and target.shape == source.shape
