"""The random states of a rank: Python's, numpy's global generator, torch's of the CPU and of every
device that is in use.

All of them are one tensor of bytes, so that they cost a snapshot one item of a fixed length (about
10 kB; a layout that changed would need new memory) and a checkpoint one entry a rank. They are
taken with the snapshot, and put back at the end of a restore.
"""

from __future__ import annotations

import importlib
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from elasticrun.checkpointing.parts import Path, fitting
from elasticrun.wire.layout import Item

NAME: Final = "__rng"
"""Below `__rank3`, beside what `per_rank` was given."""

_HEAD: Final = struct.Struct("<8sHHI")
"""Whose state follows, the number of the device, whether it was the current one, and the bytes."""

_PYTHON: Final = struct.Struct("<625I?d")
"""The words, and the second of two normal numbers that were drawn together, if it is left."""

_NUMPY: Final = struct.Struct("<624Iiid?")
"""The words, the place in them, whether a second number is left, and that; whether there is a state
at all."""

_NUMPY_KIND: Final = "MT19937"

_PYTHON_VERSION: Final = 3
_DEVICES: Final = ("cuda", "xpu", "npu", "mlu", "musa", "hpu")
"""Names of torch's modules of devices; only of those that are there and initialised."""


class RandomPart:
    """The random states as a part of the state of one rank."""

    def __init__(self, remark: Callable[[str], None]) -> None:
        """`remark`: takes a sentence for the operator."""
        self._remark = remark
        self._saved: torch.Tensor | None = None  # what was restored
        self._numpy()  # what is to be said of it is said with the restore

    def steady(self) -> None:
        return None

    def loose(self) -> torch.Tensor:
        return torch.cat(list(self._sections()))

    def targets(self, saved: Mapping[Path, Item]) -> dict[Path, torch.Tensor]:
        return fitting(None, saved, in_place=False)

    def adopt(self, values: Mapping[Path, Any]) -> None:
        self._saved = values[()]

    def put_back(self) -> None:
        """What was restored is what is drawn from now on; nothing where nothing was."""
        if self._saved is None:
            return
        sections = list(_split(self._saved))
        current = {name: int(module.current_device()) for name, module in _devices()}
        before = {name: index for name, index, was_current, _ in sections if was_current}
        for name, index, was_current, state in sections:
            # a rank may have another device than before: its own state goes with it
            if was_current:
                index = current.get(name, index)
            elif index == current.get(name):
                index = before.get(name, index)
            try:
                if name in _SETTERS:
                    _SETTERS[name](state)
                else:
                    _to_device(name, index, state)
            except Exception as error:  # of another torch, say
                self._remark(f"the random state of {name} could not be restored: {error!r:.200}")

    def _sections(self) -> Iterator[torch.Tensor]:
        version, words, left = random.getstate()
        if version == _PYTHON_VERSION:
            packed = _PYTHON.pack(*words, left is not None, left or 0.0)
            yield from _section("python", _tensor(packed))
        if "numpy" in sys.modules:
            yield from _section("numpy", _tensor(self._numpy()))
        yield from _section("torch", torch.get_rng_state())
        for name, module in _devices():
            mine = module.current_device()
            for index in range(module.device_count()):
                state = module.get_rng_state(index).cpu()
                yield from _section(name, state, index, index == mine)

    def _numpy(self) -> bytes:
        numpy_random: Any = sys.modules.get("numpy.random")  # torch loads numpy without it
        if numpy_random is None:
            return bytes(_NUMPY.size)
        state = numpy_random.get_state(legacy=False)
        if (kind := state["bit_generator"]) != _NUMPY_KIND:
            self._remark(f"the state of numpy's global generator, a {kind}, is in no snapshot")
            return bytes(_NUMPY.size)
        words, place = state["state"]["key"].tolist(), state["state"]["pos"]
        return _NUMPY.pack(*words, place, state["has_gauss"], state["gauss"], True)


def _section(
    name: str, state: torch.Tensor, index: int = 0, current: bool = False
) -> Iterator[torch.Tensor]:
    yield _tensor(_HEAD.pack(name.encode(), index, current, state.numel()))
    yield state


def _split(states: torch.Tensor) -> Iterator[tuple[str, int, bool, torch.Tensor]]:
    """Whose each section is, of which device, whether that was the current one, and the state."""
    at = 0
    while at < states.numel():
        tag, index, was_current, length = _HEAD.unpack(bytes(states[at : at + _HEAD.size].tolist()))
        at += _HEAD.size + length
        yield tag.rstrip(b"\0").decode(), index, bool(was_current), states[at - length : at].clone()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _devices() -> Iterator[tuple[str, Any]]:
    """torch's modules of devices that this process uses; it is not made to use one."""
    for name in _DEVICES:
        module = getattr(torch, name, None)
        begun = getattr(module, "is_initialized", None)
        if begun is not None and begun():
            yield name, module


def _to_device(name: str, index: int, state: torch.Tensor) -> None:
    """Does nothing for a device that this node does not have."""
    module: Any = getattr(torch, name, None)
    if module is not None and index < module.device_count():
        module.set_rng_state(state, index)


def _to_python(state: torch.Tensor) -> None:
    *words, is_left, left = _PYTHON.unpack(bytes(state.tolist()))
    random.setstate((_PYTHON_VERSION, tuple(words), left if is_left else None))


def _to_numpy(state: torch.Tensor) -> None:
    *words, place, has_gauss, gauss, is_there = _NUMPY.unpack(bytes(state.tolist()))
    if is_there:
        numpy_random: Any = importlib.import_module("numpy.random")  # it may not be loaded yet
        numpy_random.set_state((_NUMPY_KIND, words, place, has_gauss, gauss))


_SETTERS: Final[dict[str, Callable[[torch.Tensor], None]]] = {
    "python": _to_python,
    "numpy": _to_numpy,
    "torch": torch.set_rng_state,
}
