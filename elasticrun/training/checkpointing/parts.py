"""The parts of a user's state: how each is read, watched and restored.

A part's *steady* tensors are those of the model and the optimizer. They are looked up once and
restored in place, as long as they stay the same objects in the same memory. *Loose* state (a
Stateful's state, a dict, learning rates) is read again at every snapshot.

A module's names are torch's (`get_model_state_dict`: without the prefixes of DDP and compilers).
They are computed here, because torch's function imports its compiler, which takes half a second in
each rank. An optimizer's state is keyed by the names of its parameters, as in
`get_optimizer_state_dict`. That function is not called, because it steps an optimizer that has no
state yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, eq
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from elasticrun.snapshots.dcp.items import flatten, local
from elasticrun.snapshots.shm.layout import Item, ItemKind

Path = tuple[str | int, ...]
Nested = dict[str, Any]

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Names that torch.compile and activation checkpointing insert into those of parameters."""

_SHAPE = attrgetter("shape")


class StateError(ValueError):
    """State that cannot be saved or restored. The message is for the script's author."""


@dataclass(slots=True)
class TensorWatch:
    """Detects whether tensors have changed: the same objects, with the same memory and shape."""

    sizes: list[tuple[Mapping[Any, Any], int]] = field(default_factory=list)
    places: list[tuple[Mapping[Any, Any], Any]] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    pointers: list[int] = field(default_factory=list)
    _strides: list[tuple[int, ...]] = field(default_factory=list)
    _shapes: list[tuple[int, ...]] = field(default_factory=list)
    _sharded: bool = False  # some are sharded: their local parts are watched

    def add(self, holder: Mapping[Any, Any]) -> None:
        """Watch a container and the tensors directly in it."""
        self.sizes.append((holder, len(holder)))
        for key, value in holder.items():
            if isinstance(value, torch.Tensor):
                part = value
                if isinstance(value, DTensor):
                    part, self._sharded = local(value), True
                self.places.append((holder, key))
                self.tensors.append(value)
                self.pointers.append(part.data_ptr())
                self._strides.append(part.stride())
                self._shapes.append(part.shape)

    def is_unchanged(self) -> bool:
        for holder, size in self.sizes:
            if len(holder) != size:
                return False
        for (holder, key), tensor in zip(self.places, self.tensors, strict=True):
            if holder.get(key) is not tensor:
                return False
        parts = self.tensors
        if self._sharded:
            parts = [local(one) if isinstance(one, DTensor) else one for one in parts]
        # Runs at every snapshot on thousands of tensors: `map` takes half the time of a loop.
        return (
            all(map(eq, map(torch.Tensor.data_ptr, parts), self.pointers))
            and all(map(eq, map(torch.Tensor.stride, parts), self._strides))
            and all(map(eq, map(_SHAPE, parts), self._shapes))
        )


class StatePart(Protocol):
    """One named part of the state."""

    def steady(self) -> tuple[Nested, TensorWatch] | None:
        """Its steady tensors, nested as in a checkpoint; None if it has none."""
        return None

    def loose(self) -> Any:
        """The rest of its current state; None if there is none."""

    def targets(self, saved: Mapping[Path, Item]) -> dict[Path, torch.Tensor]:
        """A tensor to fill for each saved tensor of this part, by path, without those not needed.
        Does not change the part yet. Raises StateError."""

    def adopt(self, values: Mapping[Path, Any]) -> None:
        """Put the filled targets and the opaque values in place. Raises StateError."""


def why_no_state(value: Any) -> str:
    """Why the value cannot be a part of the state (`is ..., which has no state ...`), or "" if it
    can."""
    if isinstance(value, torch.Tensor | Mapping):
        return ""
    kind = "class" if isinstance(value, type) else "function" if callable(value) else ""
    if isinstance(value, Stateful) and kind != "class":
        return ""
    wanted = "pass an object that has state_dict() and load_state_dict(), a tensor, or a dict"
    if kind and (kind == "class" or not hasattr(value, "state_dict")):
        what = f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else ""
        return f"is the {kind} {what or repr(value)}, which has no state: {wanted}"
    for has, lacks in (("state_dict", "load_state_dict"), ("load_state_dict", "state_dict")):
        if hasattr(value, has):
            return f"is a {type(value).__name__}, which has {has}() and no {lacks}()"
    return f"is {value!r:.100}, a plain value: put it into a dict, as in state={{...}}"


class PlainPart(StatePart):
    """A dict, which is refilled, or a tensor, which is overwritten."""

    def __init__(self, name: str, value: dict[Any, Any] | torch.Tensor) -> None:
        self._name = name
        self._value = value

    def loose(self) -> Any:
        return self._value

    def targets(self, saved: Mapping[Path, Item]) -> dict[Path, torch.Tensor]:
        there = saved.get(())
        if isinstance(self._value, dict):
            if there is not None:
                raise StateError(f"{self._name} is a dict, but was not one when it was saved")
        elif there is None or there.shape != self._value.shape or there.kind is ItemKind.BYTES:
            shape = "" if there is None else f" (shape {there.shape})"
            now = f"shape {tuple(self._value.shape)}"
            raise StateError(f"{self._name} was saved as something else{shape}; it now has {now}")
        return fitting(self._value, saved, in_place=True)

    def adopt(self, values: Mapping[Path, Any]) -> None:
        if isinstance(self._value, dict):
            refill(self._value, unflatten(values, self._value))
        elif values[()] is not self._value:  # another dtype: convert, as DCP does
            self._value.copy_(values[()])


class RestPart(PlainPart):
    """A dict without the objects in it that are separate parts."""

    def __init__(self, name: str, value: dict[Any, Any], apart: Mapping[Any, Any]) -> None:
        super().__init__(name, value)
        self._all = value
        self._apart = apart

    def loose(self) -> dict[Any, Any]:
        for key, one in self._apart.items():
            if self._all.get(key) is not one:
                what = f"{self._name}[{key!r}] is no longer the {type(one).__name__} that it was"
                raise StateError(f"{what} when the Checkpointer was created")
        return {key: value for key, value in self._all.items() if key not in self._apart}

    def targets(self, saved: Mapping[Path, Item]) -> dict[Path, torch.Tensor]:
        if () in saved:
            return super().targets(saved)  # raises
        return fitting(self.loose(), saved, in_place=True)

    def adopt(self, values: Mapping[Path, Any]) -> None:
        refill(self._all, {**self._apart, **unflatten(values, self.loose())})


class StatefulPart(StatePart):
    """An object with `state_dict()` and `load_state_dict()`."""

    def __init__(self, value: Stateful) -> None:
        self._value = value
        self._template: Any = {}

    def loose(self) -> Any:
        return self._value.state_dict()

    def targets(self, saved: Mapping[Path, Item]) -> dict[Path, torch.Tensor]:
        self._template = self._value.state_dict()
        return fitting(self._template, saved, in_place=False)

    def adopt(self, values: Mapping[Path, Any]) -> None:
        if values:
            self._value.load_state_dict(unflatten(values, self._template))


def fitting(present: Any, saved: Mapping[Path, Item], in_place: bool) -> dict[Path, torch.Tensor]:
    """A tensor to fill for each saved one: the present one, or a new one like it (with the same
    sharding), or a new CPU tensor if none fits."""
    flat = flatten({"it": present}) if present is not None else None
    there = {flat.paths[fqn][1:]: v for fqn, v in flat.values.items()} if flat else {}
    found: dict[Path, torch.Tensor] = {}
    for path, item in saved.items():
        if item.kind is ItemKind.BYTES:
            continue
        now, dtype = there.get(path), getattr(torch, item.dtype)
        if isinstance(now, torch.Tensor) and tuple(now.shape) == item.shape and now.dtype == dtype:
            found[path] = now if in_place else torch.empty_like(now)
        else:
            found[path] = torch.empty(item.shape, dtype=dtype)
    return found


def unflatten(values: Mapping[Path, Any], template: Any) -> Any:
    """Restore the nesting. DCP converts all keys of mappings to text. If `template`, the current
    state, has a mapping of another type or with other keys in the same place, both are restored
    from it."""
    if () in values:
        return values[()]
    heads: dict[str | int, dict[Path, Any]] = {}
    for path, value in values.items():
        heads.setdefault(path[0], {})[path[1:]] = value
    if all(isinstance(head, int) for head in heads):
        row = template if isinstance(template, list | tuple) else ()
        there = {int(head): below for head, below in heads.items()}
        left = {at for at, one in enumerate(row) if _has_no_trace(one)}
        return [
            unflatten(there[at], row[at] if at < len(row) else None) if at in there else row[at]
            for at in sorted(left | there.keys())
        ]
    like: Mapping[Any, Any] = template if isinstance(template, Mapping) else {}
    names = {str(key): key for key in like}
    counted = bool(names) and all(isinstance(key, int) for key in like)
    made: dict[Any, Any] = {}
    for head, below in heads.items():
        is_number = counted and str(head).isdecimal()
        key = names.get(str(head), int(head) if is_number else head)
        made[key] = unflatten(below, like.get(key))
    for key, value in like.items():
        if _has_no_trace(value):
            made.setdefault(key, value)
    if type(template) is dict or not isinstance(template, Mapping):
        return made
    try:
        return type(template)(made)  # type: ignore[call-arg]
    except TypeError:  # a type that cannot be created from a mapping
        return made


def _has_no_trace(value: Any) -> bool:
    """Whether DCP's flattening drops the value: an empty mapping, or a container of empty mappings
    (like the list `lr_lambdas` of a LambdaLR)."""
    if isinstance(value, Mapping):
        return all(map(_has_no_trace, value.values()))
    return isinstance(value, list | tuple) and bool(value) and all(map(_has_no_trace, value))


def refill(present: dict[Any, Any], new: Mapping[Any, Any]) -> None:
    """Replace the content of a dict, also of nested dicts, in place: other references see the
    change."""
    for key in [key for key in present if key not in new]:
        del present[key]
    for key, value in new.items():
        now = present.get(key)
        if type(now) is dict and isinstance(value, dict):
            refill(now, value)
        else:
            present[key] = value


class ModulePart:
    """A module: DDP, fully_shard, tensor parallel, or plain."""

    def __init__(self, name: str, module: nn.Module) -> None:
        """Raises StateError for FSDP1, whose state is only available by collectives."""
        for inner in module.modules():
            if type(inner).__name__ == "FullyShardedDataParallel":
                raise StateError(
                    f"{name} is wrapped in FullyShardedDataParallel, whose state_dict uses "
                    "collectives and so cannot be taken here; use "
                    "torch.distributed.fsdp.fully_shard, or pass a dict of your own tensors"
                )
        self._name = name
        self.module = module
        self._steady: tuple[Nested, TensorWatch] | None = None
        self._loaded: Nested | None = None

    def steady(self) -> tuple[Nested, TensorWatch] | None:
        """All of it, if every entry of the state dict is the memory of a parameter or buffer."""
        if self._steady is not None and self._steady[1].is_unchanged():
            return self._steady
        watch, self._steady = TensorWatch(), None
        for inner in self.module.modules():
            watch.add(inner._parameters)
            watch.add(inner._buffers)
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
        """All of it, unless it is steady."""
        return None if self._steady else state_of(self.module)

    def targets(self, saved: Mapping[Path, Item]) -> dict[Path, torch.Tensor]:
        found = self.steady()
        state = found[0] if found else state_of(self.module)
        self._loaded = None if found else state
        heads = {path[:1] for path in saved}  # the first component of each path
        for key in state:
            if (key,) not in heads:
                raise StateError(f"{self._name}.{key} is not in what was saved")
        return {(key,): value for key, value in state.items() if isinstance(value, torch.Tensor)}

    def adopt(self, values: Mapping[Path, Any]) -> None:
        if self._loaded is not None:
            # a late import, because it loads FSDP and more
            from torch.distributed.checkpoint.state_dict import set_model_state_dict

            set_model_state_dict(self.module, unflatten(values, self._loaded))

    def buffers(self) -> set[str]:
        """The canonical names of the buffers."""
        ddp = _data_parallel(self.module)
        return {_canonical(name, ddp) for name, _ in self.module.named_buffers()}

    def names(self) -> dict[torch.Tensor, str]:
        """The canonical name of each parameter; the first one if it has several."""
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
    """The paths of DDP modules, with the names of a state dict."""
    return {
        _unwrapped(path)
        for path, inner in module.named_modules()
        if isinstance(inner, nn.parallel.DistributedDataParallel)
    }


def _unwrapped(path: str) -> str:
    """Remove the path components that activation checkpointing leaves out of a state dict."""
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
    """Names of parameters; raises StateError for a parameter without one."""

    optimizer = ""

    def __missing__(self, parameter: torch.Tensor) -> str:
        raise StateError(
            f"{self.optimizer} has a parameter of shape {tuple(parameter.shape)} that is no "
            "longer in any module: after replacing a parameter, create a new optimizer and a "
            "new Checkpointer"
        )


class OptimizerPart:
    """An optimizer whose parameters have known names."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, modules: Sequence[ModulePart]):
        """Raises StateError for parameters that are in none of the modules."""
        self._name = name
        self._optimizer = optimizer
        self._modules = modules
        self._pending: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._direct: set[Path] = set()
        self._named: list[list[str]] = []  # parameter names by group, valid for these ids
        self._named_for: tuple[int, ...] | None = None
        names = self._names()
        if not all(p in names for p in self._parameters()):
            raise StateError(f"{name} has parameters that are in none of the modules")

    def _parameters(self) -> Iterable[torch.Tensor]:
        return (p for group in self._optimizer.param_groups for p in group["params"])

    def _names(self) -> dict[torch.Tensor, str]:
        found, many = _Names(), len(self._modules) > 1
        found.optimizer = self._name
        for part in self._modules:
            for parameter, name in part.names().items():
                found[parameter] = f"{part._name}.{name}" if many else name
        return found

    def steady(self) -> tuple[Nested, TensorWatch]:
        names, watch = self._names(), TensorWatch()
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
        groups = self._optimizer.param_groups
        key = tuple(map(id, self._parameters()))
        if self._named_for != key:
            names = self._names()
            self._named = [[names[p] for p in group["params"]] for group in groups]
            self._named_for = key
        return [
            {**{k: v for k, v in group.items() if k != "params"}, "params": named}
            for group, named in zip(groups, self._named, strict=True)
        ]

    def targets(self, saved: Mapping[Path, Item]) -> dict[Path, torch.Tensor]:
        """Also creates state that was saved and that the optimizer has not created yet."""
        self._pending = {}
        found: dict[Path, torch.Tensor] = {}
        states: dict[str | int, dict[Path, Item]] = {}
        for path, item in saved.items():
            if path[0] == "state" and len(path) > 2 and item.kind is not ItemKind.BYTES:
                states.setdefault(path[1], {})[path[2:]] = item
        names = self._names()
        for group, parameter in ((g, p) for g in self._optimizer.param_groups for p in g["params"]):
            name = names[parameter]
            for key, item in states.get(name, {}).items():
                tensor = self._target(group, parameter, str(key[0]), item)
                found["state", name, *key] = tensor
                if len(key) == 1:
                    self._pending.setdefault(parameter, {})[str(key[0])] = tensor
        self._direct = {path for path in found if len(path) == 3}
        groups = {path[1:]: item for path, item in saved.items() if path[0] == "param_groups"}
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
                "parameter; call the optimizer's step() before restore(), so that it exists"
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
        """Match groups by the names of their parameters, because their order may differ."""
        for group, now in zip(self._optimizer.param_groups, self._groups(), strict=True):
            wanted = set(now["params"])
            match = [one for one in saved if set(one.get("params", ())) == wanted]
            if not match:
                raise StateError(
                    f"a parameter group of {self._name} has other parameters than were saved"
                )
            group.update({k: v for k, v in match[0].items() if k != "params"})
