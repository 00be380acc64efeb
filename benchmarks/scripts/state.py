"""State of a given size for the benchmarks of snapshots, and warm shared memory to copy it to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import nn

GIB = 1 << 30


class State(nn.Module):
    """A module whose parameters have `gib` GiB in `count` tensors of equal size, uninitialized."""

    def __init__(self, gib: float, count: int) -> None:
        super().__init__()
        each = int(gib * GIB) // count // 4
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(each)) for _ in range(count))

    def fill(self, value: float) -> None:
        """Set every element to this value, which touches every page."""
        with torch.no_grad():
            for weight in self.weights:
                weight.fill_(value)

    def tensors(self) -> list[torch.Tensor]:
        """The parameters' tensors."""
        return [weight.detach() for weight in self.weights]


class Shared:
    """Warm shared memory for tensors like these: the target of the copies that snapshots are
    compared with."""

    def __init__(self, like: list[torch.Tensor]) -> None:
        each = like[0].nbytes
        self.nbytes = each * len(like)
        self.descriptor = os.memfd_create("benchmark")
        os.posix_fallocate(self.descriptor, 0, self.nbytes)
        self.tensors = self.mapped(like)
        self.take(like)
        self.take(like)

    def mapped(self, like: list[torch.Tensor]) -> list[torch.Tensor]:
        """The shared tensors through a fresh mapping, whose page table is empty."""
        path = f"/proc/self/fd/{self.descriptor}"
        whole = torch.UntypedStorage.from_file(path, True, self.nbytes)
        flat = torch.empty(0, dtype=like[0].dtype).set_(whole)
        return list(flat.split(like[0].numel()))

    def take(self, source: list[torch.Tensor]) -> None:
        """Copy these tensors to shared memory, as fast as torch can: the floor of a snapshot's
        stall."""
        torch._foreach_copy_(self.tensors, source)

    def give(self, target: list[torch.Tensor]) -> None:
        """Copy the shared tensors back to these: the floor of a restore."""
        torch._foreach_copy_(target, self.tensors)


def timed(what: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    what()
    return time.perf_counter() - began
