"""Modules and optimizers as parts of the state: canonical names, tensors restored in place.

A module's names are torch's (`get_model_state_dict`: without what DDP and compilers put before
them); they are made here, since torch's own way imports its compiler, which takes a life of a rank
half a second. An optimizer's state stands under the names of its parameters, as
`get_optimizer_state_dict` puts it; that function is not called, since for an optimizer without
state it makes a step of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elasticrun.checkpointing.parts import Nested, Path, StateError, Watch, fitting, unflatten
from elasticrun.dcp.items import local
from elasticrun.dcp.torches import DTensor
from elasticrun.wire.layout import Item, ItemKind

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Names that torch.compile and activation checkpointing put into those of parameters."""


class ModulePart:
    """A module: DDP, fully_shard, tensor parallel, or plain."""

    def __init__(self, name: str, module: nn.Module) -> None:
        """StateError for FSDP1, whose state can be had by collectives alone."""
        for inner in module.modules():
            if type(inner).__name__ == "FullyShardedDataParallel":
                raise StateError(
                    f"{name} is wrapped in FullyShardedDataParallel, whose state_dict communicates "
                    "and so cannot be taken here; use torch.distributed.fsdp.fully_shard, or pass "
                    "a dict of tensors of your own"
                )
        self._name = name
        self.module = module
        self._steady: tuple[Nested, Watch] | None = None
        self._loaded: Nested | None = None

    def steady(self) -> tuple[Nested, Watch] | None:
        """All of it, if every entry of the state dict is the memory of a parameter or buffer."""
        if self._steady is not None and self._steady[1].holds():
            return self._steady
        watch, self._steady = Watch(), None
        for inner in self.module.modules():
            for holder in (inner._parameters, inner._buffers):
                watch.add(holder)
            watch.sizes.append((inner._modules, len(inner._modules)))
        there = zip(watch.pointers, watch.tensors, strict=True)
        known = {(pointer, tensor.shape) for pointer, tensor in there}
        state = state_of(self.module)
        for value in state.values():
            if not isinstance(value, torch.Tensor):
                return None
            part = local(value)
            if (part.data_ptr(), value.shape) not in known and part.numel():
                return None
        self._steady = (state, watch)
        return self._steady

    def loose(self) -> Any:
        """All of it, unless it was found to be steady."""
        return None if self._steady else state_of(self.module)

    def targets(self, saved: Mapping[Path, Item]) -> dict[Path, torch.Tensor]:
        found = self.steady()
        state = found[0] if found else state_of(self.module)
        self._loaded = None if found else state
        for key in state:
            if (key,) not in saved and not _nested(key, saved):
                raise StateError(f"{self._name}.{key} is not in what was saved")
        return {(key,): value for key, value in state.items() if isinstance(value, torch.Tensor)}

    def adopt(self, values: Mapping[Path, Any]) -> None:
        if self._loaded is not None:
            # not above: it brings FSDP and its like with it
            from torch.distributed.checkpoint.state_dict import set_model_state_dict

            set_model_state_dict(self.module, unflatten(values, self._loaded))

    def names(self) -> dict[torch.Tensor, str]:
        """The canonical name of each parameter; of one with several names the first."""
        ddp = _data_parallel(self.module)
        return {p: _canonical(name, ddp) for name, p in self.module.named_parameters()}


def state_of(module: nn.Module) -> Nested:
    """A module's state dict under torch's canonical names."""
    ddp = _data_parallel(module)
    state = module.state_dict()
    if ddp or any(WRAPPERS[0] in name or WRAPPERS[1] in name for name in state):
        return {_canonical(name, ddp): value for name, value in state.items()}
    return dict(state)


def _data_parallel(module: nn.Module) -> set[str]:
    """Where DDP stands in it, as a state dict names that."""
    return {
        _unwrapped(path)
        for path, inner in module.named_modules()
        if isinstance(inner, nn.parallel.DistributedDataParallel)
    }


def _nested(key: str, saved: Mapping[Path, Item]) -> bool:
    """A module's extra state may itself be nested."""
    return any(path[:1] == (key,) for path in saved)


def _unwrapped(path: str) -> str:
    """Without the steps that activation checkpointing leaves out of a state dict's names."""
    return ".".join(step for step in path.split(".") if step != WRAPPERS[1])


def _canonical(name: str, ddp: set[str]) -> str:
    if not ddp and not any(wrapper in name for wrapper in WRAPPERS):
        return name
    kept, walked = [], ""
    for step in _unwrapped(name).split("."):
        if not (step == WRAPPERS[0] or (step == "module" and walked in ddp)):
            kept.append(step)
        walked = f"{walked}.{step}" if walked else step
    return ".".join(kept)


class _Names(dict[torch.Tensor, str]):
    """Parameters' names; StateError for a parameter that has none."""

    def __init__(self, optimizer: str, names: Mapping[torch.Tensor, str]) -> None:
        super().__init__(names)
        self._optimizer = optimizer

    def __missing__(self, parameter: torch.Tensor) -> str:
        raise StateError(
            f"{self._optimizer} has a parameter of shape {tuple(parameter.shape)} that is in none "
            "of the modules any more: where one is replaced, make the optimizer and the "
            "Checkpointer anew"
        )


class OptimizerPart:
    """An optimizer over parameters whose names are known."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, modules: Sequence[ModulePart]):
        """StateError for parameters that are in none of the modules."""
        self._name = name
        self._optimizer = optimizer
        self._modules = modules
        self._pending: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._direct: set[Path] = set()
        names = self._names()
        if not all(p in names for p in self._parameters()):
            raise StateError(f"{name} has parameters that are in none of the modules")

    def _parameters(self) -> Iterable[torch.Tensor]:
        return (p for group in self._optimizer.param_groups for p in group["params"])

    def _names(self) -> dict[torch.Tensor, str]:
        many = len(self._modules) > 1
        return _Names(
            self._name,
            {
                parameter: f"{part._name}.{name}" if many else name
                for part in self._modules
                for parameter, name in part.names().items()
            },
        )

    def steady(self) -> tuple[Nested, Watch]:
        names, watch = self._names(), Watch()
        watch.sizes.append((self._optimizer.state, len(self._optimizer.state)))
        state: dict[str, dict[str, torch.Tensor]] = {}
        for parameter, entries in self._optimizer.state.items():
            watch.add(entries)
            tensors = {k: v for k, v in entries.items() if isinstance(v, torch.Tensor)}
            if tensors:
                state[names[parameter]] = tensors
        return {"state": state}, watch

    def loose(self) -> Any:
        names: dict[torch.Tensor, str] = {}
        rest: dict[str, dict[str, Any]] = {}
        for parameter, entries in self._optimizer.state.items():
            others = {k: v for k, v in entries.items() if not isinstance(v, torch.Tensor)}
            if others:
                names = names or self._names()
                rest[names[parameter]] = others
        return {"state": rest, "param_groups": self._groups()}

    def _groups(self) -> list[dict[str, Any]]:
        key = tuple(map(id, self._parameters()))
        if getattr(self, "_named_for", None) != key:
            names = self._names()
            groups = self._optimizer.param_groups
            self._named = [[names[p] for p in group["params"]] for group in groups]
            self._named_for = key
        return [
            {**{k: v for k, v in group.items() if k != "params"}, "params": named}
            for group, named in zip(self._optimizer.param_groups, self._named, strict=True)
        ]

    # ------------------------------------------------------------ back

    def targets(self, saved: Mapping[Path, Item]) -> dict[Path, torch.Tensor]:
        """State that the optimizer has not made yet is made here, as it was saved."""
        self._pending = {}
        found: dict[Path, torch.Tensor] = {}
        states: dict[str | int, dict[Path, Item]] = {}
        for path, item in saved.items():
            if path[0] == "state" and len(path) > 2 and item.kind is not ItemKind.BYTES:
                states.setdefault(path[1], {})[path[2:]] = item
        names = self._names()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                name = names[parameter]
                for key, item in states.get(name, {}).items():
                    tensor = self._target(group, parameter, str(key[0]), item)
                    found["state", name, *key] = tensor
                    if len(key) == 1:
                        self._pending.setdefault(parameter, {})[str(key[0])] = tensor
        self._direct = {path for path in found if len(path) == 3}
        loose = {path: item for path, item in saved.items() if path[0] == "param_groups"}
        groups = {path[1:]: item for path, item in loose.items()}
        for path, tensor in fitting(self._groups(), groups, in_place=True).items():
            found[("param_groups", *path)] = tensor
        return found

    def _target(
        self, group: dict[str, Any], parameter: torch.Tensor, key: str, item: Item
    ) -> torch.Tensor:
        dtype = getattr(torch, item.dtype)
        now = self._optimizer.state.get(parameter, {}).get(key)
        if isinstance(now, torch.Tensor) and tuple(now.shape) == item.shape and now.dtype == dtype:
            return now
        on_device = key != "step" or group.get("capturable") or group.get("fused")
        if key != "step" and tuple(parameter.shape) == item.shape:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        if isinstance(parameter, DTensor) and item.kind is ItemKind.SHARD:
            raise StateError(
                f"{self._name}'s {key} of a sharded parameter has another shape than the "
                "parameter; make a step of the optimizer before restore(), so that it is there"
            )
        return torch.empty(item.shape, dtype=dtype, device=parameter.device if on_device else "cpu")

    def adopt(self, values: Mapping[Path, Any]) -> None:
        names = self._names()
        others: dict[str | int, dict[Path, Any]] = {}
        for path, value in values.items():
            if path[0] == "state" and path not in self._direct:
                others.setdefault(path[1], {})[path[2:]] = value
        for parameter in self._parameters():
            entries: dict[str, Any] = dict(self._pending.get(parameter, {}))
            if names[parameter] in others:
                entries.update(unflatten(others[names[parameter]], {}))
            if entries:
                self._optimizer.state[parameter] = entries
            else:
                self._optimizer.state.pop(parameter, None)
        self._pending = {}
        groups = {path[1:]: v for path, v in values.items() if path[0] == "param_groups"}
        if groups:
            self._adopt_groups(unflatten(groups, self._groups()))

    def _adopt_groups(self, saved: list[dict[str, Any]]) -> None:
        """By the names of their parameters: groups may stand in another order."""
        for group, now in zip(self._optimizer.param_groups, self._groups(), strict=True):
            wanted = set(now["params"])
            match = [one for one in saved if set(one.get("params", ())) == wanted]
            if not match:
                raise StateError(
                    f"a parameter group of {self._name} has other parameters than were saved"
                )
            group.update({k: v for k, v in match[0].items() if k != "params"})
