"""Copies between CUDA devices and mapped shared memory: page-locked, and beside training.

CUDA copies at the speed of the bus only to and from page-locked memory; other memory is copied
through a buffer of the driver, a fraction as fast, while the caller waits. Every function here is a
no-op, or falls back to a plain copy, where no tensor is on a CUDA device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch

from elasticrun.snapshots.dcp.items import local
from elasticrun.snapshots.dcp.restoring import copy_all

cuda: Any = torch.cuda  # untyped

PORTABLE: Final = 1
"""cudaHostRegisterPortable: the memory counts as page-locked for every device."""

PIECE: Final = 64 * 1024 * 1024
"""Memory is page-locked between multiples of this address, one piece at a time: meanwhile the
driver may keep the training thread from launching kernels."""

Tensors = list[torch.Tensor]


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The CUDA device of the first tensor on one; None if there is none."""
    return next((one.device for one in tensors if is_on_device(one)), None)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether a device copies this tensor."""
    return tensor.is_cuda


def pieces(begin: int, end: int) -> list[tuple[int, int]]:
    """The range between two addresses, in the pieces that are page-locked one by one."""
    cuts = range(begin // PIECE * PIECE + PIECE, end, PIECE)
    return list(pairwise([begin, *cuts, end]))


class PageLocks:
    """The page-locked pieces of one mapping. They must be released before it is unmapped."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._places: set[int] = set()

    def add(self, begin: int, end: int, device: torch.device) -> bool:
        """Page-lock a piece, unless that was done; False if it is not possible: copies are then
        slower. Blocks while the driver locks the pages. `device`: one that this process uses;
        otherwise CUDA would create a context on another. Not for a thread that launches kernels:
        CUDA keeps an error for each thread, and its next launch would report it."""
        if begin not in self._places:
            with cuda.device(device):
                if int(cuda.cudart().cudaHostRegister(begin, end - begin, PORTABLE)) != 0:
                    return False
            self._places.add(begin)
        return True

    def release(self) -> None:
        """Release all pieces; a no-op in a forked child, which cannot use CUDA."""
        while self._places and os.getpid() == self._pid:
            cuda.cudart().cudaHostUnregister(self._places.pop())


def cut(mapped: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> tuple[Tensors, Tensors]:
    """The same pairs of tensors, cut where one in mapped memory crosses from one piece to another:
    CUDA refuses a copy of memory that is page-locked in part, and promises nothing if it was locked
    in several calls. A pair whose other tensor is not contiguous remains as it is."""
    parts: tuple[Tensors, Tensors] = ([], [])
    for one, other in zip(mapped, others, strict=True):
        if not (is_cut(one) and other.is_contiguous()):
            parts[0].append(one)
            parts[1].append(other)
            continue
        begin = one.data_ptr()
        ranges = pieces(begin, begin + one.nbytes)
        sizes = [(to - at) // one.element_size() for at, to in ranges]
        parts[0].extend(torch.split(one.detach().view(-1), sizes))
        parts[1].extend(torch.split(other.detach().view(-1), sizes))
    return parts


def is_cut(mapped: torch.Tensor) -> bool:
    """Whether a copy of this tensor would cross from one piece to another. One that is not
    contiguous is copied by way of a copy."""
    begin = mapped.data_ptr()
    return begin // PIECE != (begin + mapped.nbytes - 1) // PIECE and mapped.is_contiguous()


def copy_out(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy to shared memory; returns when all data has arrived. Devices copy in parallel."""
    if device_of(sources) is None:
        copy_all(targets, sources)
        return
    copies = Copies()
    copies.start(targets, sources)
    copies.wait()


def copy_in(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy from shared memory to devices; returns when all data has arrived."""
    found = [
        source if target.is_contiguous() or not is_cut(source) else source.clone()  # not locked
        for target, source in zip(targets, sources, strict=True)
    ]
    parts, places = cut(found, targets)
    copy_all(places, parts)


@dataclass(slots=True)
class Copies:
    """The copies of one snapshot that devices carry out."""

    _events: list[tuple[torch.device, Any]] = field(default_factory=list)
    _kept: list[torch.Tensor] = field(default_factory=list)  # memory in use until they are done
    _versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    is_released: bool = False  # whether the optimizers may change the sources
    is_intact: bool = True  # whether no source has changed before that

    def start(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy sources in CPU memory now, and issue the copies from devices: each device uses a
        separate stream, after what its current stream was told to do."""
        devices = {source.device for source in sources if is_on_device(source)}
        for device in devices:
            at = [
                i
                for i, source in enumerate(sources)
                if is_on_device(source) and source.device == device
            ]
            stream = cuda.Stream(device)
            stream.wait_stream(cuda.current_stream(device))
            with cuda.stream(stream):
                own, slot = [sources[i] for i in at], [targets[i] for i in at]
                for i, (one, target) in enumerate(zip(own, slot, strict=True)):
                    if not one.is_contiguous() and is_cut(target):
                        own[i] = one.contiguous()
                copy_all(*cut(slot, own), non_blocking=True)
                event = cuda.Event(blocking=True)  # its waiter must not use a core
                event.record(stream)
            self._events.append((device, event))
        rest = [i for i, source in enumerate(sources) if not is_on_device(source)]
        copy_all([targets[i] for i in rest], [sources[i] for i in rest])

    def start_beside(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        owned: frozenset[int],
    ) -> None:
        """The same for copies that training goes on beside. Tensors on devices whose storage is not
        among `owned` may change at any time, so they are cloned on the device first, or copied
        first and waited for if it has no memory for that."""
        loose = [
            i for i, one in enumerate(sources) if is_on_device(one) and storage_of(one) not in owned
        ]
        current = list(sources)
        try:
            for i in loose:
                current[i] = sources[i].clone()
        except torch.OutOfMemoryError:
            copy_out([targets[i] for i in loose], [sources[i] for i in loose])
            skipped = set(loose)
            targets = [one for i, one in enumerate(targets) if i not in skipped]
            current = [one for i, one in enumerate(sources) if i not in skipped]
        self._versions = [
            (one, one._version) for one in current if storage_of(one) in owned and is_on_device(one)
        ]
        self._kept = [*current, *targets]
        self.start(targets, current)

    def release(self) -> None:
        """Before an optimizer changes the sources: let its device wait for the copies, but not the
        host."""
        if not self.is_released:
            # a CUDA graph that is captured now would not wait when it is replayed
            if self._has_changed() or cuda.is_current_stream_capturing():
                self.is_intact = False
            self.is_released = True
        if self.is_intact:
            for device, event in self._events:
                cuda.current_stream(device).wait_event(event)

    def wait(self) -> bool:
        """Wait until all data has arrived; returns whether it is all of one step. Raises what CUDA
        reports."""
        for _, event in self._events:
            event.synchronize()
        # in this order: the training thread may release them meanwhile, and then change them
        if self._has_changed() and not self.is_released:
            self.is_intact = False
        self._kept = []
        return self.is_intact

    def _has_changed(self) -> bool:
        """Whether a source has changed since the copies were issued."""
        return any(tensor._version != before for tensor, before in self._versions)


class Optimizers:
    """The optimizers of a state. Before one of them changes it, the copies in progress are
    released."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.copies: Copies | None = None
        self._hooks = [one.register_step_pre_hook(self._before_step) for one in optimizers]

    def _before_step(self, *_: object) -> None:
        if self.copies is not None:
            self.copies.release()

    def storages(self) -> frozenset[int]:
        """The storages of what only the optimizers change."""
        return frozenset(map(storage_of, self._tensors()))

    def _tensors(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from map(local, group["params"])
            for entries in optimizer.state.values():
                yield from (local(one) for one in entries.values() if torch.is_tensor(one))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()
