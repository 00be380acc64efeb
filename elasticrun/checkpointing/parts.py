"""The parts that a user's state is made of: how each is read, watched, and put back.

A part's *steady* tensors are the model's and the optimizer's own: they are found once, watched for
being the same objects in the same memory, and restored in place. What is *loose* (a Stateful's
state, a dict, learning rates) is read anew at every snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter, eq
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.stateful import Stateful

from elasticrun.dcp.items import flatten, local
from elasticrun.dcp.torches import DTensor
from elasticrun.wire.layout import Item, ItemKind

Path = tuple[str | int, ...]
Nested = dict[str, Any]


_SHAPE = attrgetter("shape")


class StateError(ValueError):
    """State that cannot be taken or put back, in a sentence for the script's author."""


@dataclass(slots=True)
class Watch:
    """Whether tensors still are as they were found: the very objects, with the same memory in the
    same shape."""

    sizes: list[tuple[Mapping[Any, Any], int]] = field(default_factory=list)
    places: list[tuple[Mapping[Any, Any], Any]] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    pointers: list[int] = field(default_factory=list)
    _strides: list[tuple[int, ...]] = field(default_factory=list)
    _shapes: list[tuple[int, ...]] = field(default_factory=list)
    _sharded: bool = False  # some of them: their local parts are what is watched

    def add(self, holder: Mapping[Any, Any]) -> None:
        """Watch a container and the tensors that stand right in it."""
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

    def holds(self) -> bool:
        for holder, size in self.sizes:
            if len(holder) != size:
                return False
        for (holder, key), tensor in zip(self.places, self.tensors, strict=True):
            if holder.get(key) is not tensor:
                return False
        parts = self.tensors
        if self._sharded:
            parts = [local(one) if isinstance(one, DTensor) else one for one in parts]
        # at every snapshot, for thousands of them: `map` takes half of what a loop does
        return (
            all(map(eq, map(torch.Tensor.data_ptr, parts), self.pointers))
            and all(map(eq, map(torch.Tensor.stride, parts), self._strides))
            and all(map(eq, map(_SHAPE, parts), self._shapes))
        )


class Part(Protocol):
    """One named part of the state."""

    def steady(self) -> tuple[Nested, Watch] | None:
        """Its steady tensors, nested as a checkpoint names them; None: it has none."""

    def loose(self) -> Any:
        """The rest, as it is now; None: there is none."""

    def targets(self, saved: Mapping[Path, Item]) -> dict[Path, torch.Tensor]:
        """Where the saved tensors below this part go, by their paths; ones that are not wanted are
        left out. Nothing of the part is changed yet. StateError."""

    def adopt(self, values: Mapping[Path, Any]) -> None:
        """The targets are filled; put them and the opaque values in their places. StateError."""


def why_no_state(value: Any) -> str:
    """ "" for what can be a part of the state by its name, else what it is (`is ..., which has no
    state ...`)."""
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


class PlainPart:
    """A dict, which is refilled, or a tensor, which is overwritten."""

    def __init__(self, name: str, value: dict[Any, Any] | torch.Tensor) -> None:
        self._name = name
        self._value = value

    def steady(self) -> None:
        return None

    def loose(self) -> Any:
        return self._value

    def targets(self, saved: Mapping[Path, Item]) -> dict[Path, torch.Tensor]:
        there = saved.get(())
        if isinstance(self._value, dict):
            if there is not None:
                raise StateError(f"{self._name} is a dict and was none when it was saved")
        elif there is None or there.shape != self._value.shape or there.kind is ItemKind.BYTES:
            shape = "" if there is None else f" (shape {there.shape})"
            now = f"shape {tuple(self._value.shape)}"
            raise StateError(f"{self._name} was saved as something else{shape}; it has {now} now")
        return fitting(self._value, saved, in_place=True)

    def adopt(self, values: Mapping[Path, Any]) -> None:
        if isinstance(self._value, dict):
            refill(self._value, unflatten(values, self._value))
        elif values[()] is not self._value:  # of another type: converted, as DCP does
            self._value.copy_(values[()])


class RestPart(PlainPart):
    """A dict without the objects in it, which are parts of their own."""

    def __init__(self, name: str, value: dict[Any, Any], apart: Mapping[Any, Any]) -> None:
        super().__init__(name, value)
        self._all = value
        self._apart = apart

    def loose(self) -> dict[Any, Any]:
        for key, one in self._apart.items():
            if self._all.get(key) is not one:
                what = f"{self._name}[{key!r}] is not the {type(one).__name__} that it was"
                raise StateError(f"{what} when the Checkpointer was made")
        return {key: value for key, value in self._all.items() if key not in self._apart}

    def targets(self, saved: Mapping[Path, Item]) -> dict[Path, torch.Tensor]:
        if () in saved:
            return super().targets(saved)  # which refuses that
        return fitting(self.loose(), saved, in_place=True)

    def adopt(self, values: Mapping[Path, Any]) -> None:
        refill(self._all, {**self._apart, **unflatten(values, self.loose())})


class StatefulPart:
    """What has `state_dict()` and `load_state_dict()`."""

    def __init__(self, value: Stateful) -> None:
        self._value = value
        self._template: Any = {}

    def steady(self) -> None:
        return None

    def loose(self) -> Any:
        return self._value.state_dict()

    def targets(self, saved: Mapping[Path, Item]) -> dict[Path, torch.Tensor]:
        self._template = self._value.state_dict()
        return fitting(self._template, saved, in_place=False)

    def adopt(self, values: Mapping[Path, Any]) -> None:
        if values:
            self._value.load_state_dict(unflatten(values, self._template))


def fitting(present: Any, saved: Mapping[Path, Item], in_place: bool) -> dict[Path, torch.Tensor]:
    """A tensor for each saved one: the present one, or one like it (sharded as it is), or where
    there is none that fits a fresh one of the CPU."""
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
    """Nested again. DCP makes all keys of a mapping text; where `template`, the state of now, has a
    mapping of another type or with other keys in that place, they become what they were."""
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
        key = names.get(str(head), _number(head) if counted else head)
        made[key] = unflatten(below, like.get(key))
    for key, value in like.items():
        if _has_no_trace(value):
            made.setdefault(key, value)
    return _as(made, template)


def _has_no_trace(value: Any) -> bool:
    """Whether DCP's flattening leaves nothing of it: an empty mapping, or what is made of such (the
    `lr_lambdas` of a LambdaLR are a list of them)."""
    if isinstance(value, Mapping):
        return all(map(_has_no_trace, value.values()))
    return isinstance(value, list | tuple) and bool(value) and all(map(_has_no_trace, value))


def _number(head: str | int) -> str | int:
    return int(head) if str(head).isdecimal() else head


def _as(made: dict[Any, Any], template: Any) -> Any:
    """As the template's type, where that is a mapping that is made from one."""
    if type(template) is dict or not isinstance(template, Mapping):
        return made
    try:
        return type(template)(made)  # type: ignore[call-arg]
    except TypeError:
        return made


def refill(present: dict[Any, Any], new: Mapping[Any, Any]) -> None:
    """Give a dict this content, and so for the dicts in it: who holds one of them sees it."""
    for key in [key for key in present if key not in new]:
        del present[key]
    for key, value in new.items():
        now = present.get(key)
        if type(now) is dict and isinstance(value, dict):
            refill(now, value)
        else:
            present[key] = value
