"""Converts state to items. Names and chunks come from torch's own planner, so they are DCP's.

Anything that is not a tensor is an opaque value. So is a tensor whose bytes are not a plain array
(sparse, quantized, a wrapper subclass); a checkpoint contains it as torch.save writes it. Two names
for one storage are two items, as in DCP. Nothing here communicates: a DTensor's chunk follows from
its placement.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from elasticrun.snapshots.shm.layout import Item, ItemKind

OWN_PREFIX: Final = "__rank"
"""The per-rank state of rank r is under the top-level key `__rank{r}`."""

PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that consist of one chunk and do not wrap others."""

_KINDS: Final = {
    WriteItemType.TENSOR: ItemKind.TENSOR,
    WriteItemType.SHARD: ItemKind.SHARD,
    WriteItemType.BYTE_IO: ItemKind.BYTES,
}


_ALIKE: Final = ("kind", "shape", "offsets", "sizes", "requires_grad", "nbytes")
"""Fields that `is_item` compares, apart from the dtype."""


def own_key(rank: int) -> str:
    """The top-level key of the per-rank state of one rank."""
    return f"{OWN_PREFIX}{rank}"


@dataclass(frozen=True, slots=True)
class Piece:
    """An item without a location, and its value: this rank's part of the tensor (not a copy), or
    the opaque value."""

    item: Item
    value: Any


@dataclass(frozen=True, slots=True)
class Flat:
    """A nested state as flattened by DCP: values and paths by flat name."""

    values: dict[str, Any]
    paths: dict[str, tuple[str | int, ...]]


@dataclass(frozen=True, slots=True)
class _Opaque:
    """Wraps a tensor, so that the planner treats it as an opaque value."""

    value: torch.Tensor


class NameClash(ValueError):
    """Two values of a state would have the same name in a checkpoint. The message names their
    keys."""


def flatten(state: Mapping[str, Any]) -> Flat:
    """Flatten a state like DCP. Raises NameClash."""
    flat = Flat({}, {})
    if all(_flatten_into(flat, (str(key),), value) for key, value in state.items()):
        return flat
    planner = _planner(state)
    return Flat(dict(planner.state_dict), dict(planner.mappings))


def _planner(state: Mapping[str, Any]) -> DefaultSavePlanner:
    """torch's planner for saving this state. Raises NameClash."""
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner(dict(state), None, True)
    except ValueError as error:  # torch reports the flat name only
        raise NameClash(_clash(state, (), {}) or str(error)) from None
    return planner


def _clash(value: Any, keys: tuple[Any, ...], seen: dict[str, tuple[Any, ...]]) -> str:
    """A sentence about the first two values of a nested state with the same name, "" if there are
    none. `seen`: the keys of each value so far, by its name."""
    below: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        below = value.items()
    elif isinstance(value, list) and not _is_leaf(value):
        below = enumerate(value)
    else:
        name = ".".join(map(str, keys))
        if (other := seen.setdefault(name, keys)) is keys:
            return ""
        first, second = (
            f"{at[0]}{''.join(f'[{key!r}]' for key in at[1:])}" for at in (other, keys)
        )
        return (
            f"{first} and {second} would both be saved under the name {name!r}: "
            "rename one of these keys"
        )
    return next(filter(None, (_clash(one, (*keys, key), seen) for key, one in below)), "")


_SCALARS: Final = frozenset((int, float, bool, str, bytes, complex, type(None), torch.dtype))


def _flatten_into(flat: Flat, path: tuple[str | int, ...], value: Any) -> bool:
    """Flatten a value into `flat` like DCP, but faster: DCP visits every name in an optimizer's
    groups three times per snapshot. Returns False if only DCP can flatten it; then `flat` is
    incomplete."""
    if isinstance(value, dict):
        return all(_flatten_into(flat, (*path, str(key)), below) for key, below in value.items())
    if type(value) is list and not _is_leaf(value):
        return all(_flatten_into(flat, (*path, at), below) for at, below in enumerate(value))
    if isinstance(value, Mapping | list) and type(value) is not list:
        return False
    if isinstance(value, torch.Tensor) and not (type(value) in PLAIN or isinstance(value, DTensor)):
        return False
    name = ".".join(map(str, path))
    if name in flat.values:
        return False
    flat.values[name], flat.paths[name] = value, path
    return True


def _is_leaf(value: list[Any]) -> bool:
    """Whether a list is one value: it contains no tensor and no mapping at any depth."""
    if _SCALARS.issuperset(map(type, value)):
        return True
    return not any(
        isinstance(one, Mapping | torch.Tensor) or (isinstance(one, list) and not _is_leaf(one))
        for one in value
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory."""
    if type(tensor) in PLAIN:
        return tensor.detach() if tensor.requires_grad else tensor
    if isinstance(tensor, DTensor):
        # the public to_local() gives the same tensor with an autograd node, ten times slower
        part = getattr(tensor, "_local_tensor", None)
        tensor = part if part is not None else tensor.to_local()
    return tensor.detach()


def is_array(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain array in memory, so that its bytes are its whole value."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return False
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:  # wrappers have no storage
        return False


def pieces(state: Mapping[str, Any], own: str = "") -> list[Piece]:
    """All items of a nested state; those below the top-level key `own` are per-rank state.

    Raises ValueError for state that cannot be saved: two values with one name (NameClash), a tensor
    on the meta device, a sharded tensor whose shards are not plain arrays."""
    planner = _planner(state)
    found: list[Piece] = []
    rest: dict[str, Any] = {}
    for fqn, value in planner.state_dict.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            if value.is_meta:
                raise ValueError(f"{fqn} is on the meta device: it has no elements to save")
            if not is_array(value):
                rest[fqn] = _Opaque(value)
                continue
            if type(value) in PLAIN:
                found.append(_plain(fqn, planner.mappings.get(fqn, (fqn,)), value, own))
                continue
        rest[fqn] = value
    if not rest:
        return found
    order = {fqn: at for at, fqn in enumerate(planner.state_dict)}
    planner.state_dict = rest
    found += [_piece(planner, item, own) for item in planner.create_local_plan().items]
    return sorted(found, key=lambda one: order[one.item.fqn])


def _plain(fqn: str, path: tuple[str | int, ...], tensor: torch.Tensor, own: str) -> Piece:
    """The piece of a plain tensor: the same as torch's planner creates, but ten times faster."""
    sizes = tuple(tensor.shape)
    owned = bool(own) and path[0] == own
    nowhere = (0,) * len(sizes)
    name = dtype_name(tensor.dtype)
    grad, nbytes = tensor.requires_grad, tensor.numel() * tensor.element_size()
    return Piece(
        Item(
            *(fqn, tuple(path), ItemKind.TENSOR, owned, name, sizes, nowhere, sizes, grad),
            nbytes=nbytes,
        ),
        tensor.detach() if grad else tensor,
    )


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, without "torch."."""
    return str(dtype).removeprefix("torch.")


def _piece(planner: DefaultSavePlanner, write: WriteItem, own: str) -> Piece:
    fqn = write.index.fqn
    path = tuple(planner.mappings.get(fqn, (fqn,)))
    owned = bool(own) and path[0] == own
    kind = _KINDS[write.type]
    data, value = write.tensor_data, planner.state_dict[fqn]
    if data is None:
        value = value.value if isinstance(value, _Opaque) else value
        return Piece(Item(fqn, path, kind, owned), value)
    # the planner can find it too, but slowly
    is_known = isinstance(value, DTensor) or kind is ItemKind.TENSOR
    found: Any = local(value) if is_known else planner.resolve_data(write)
    part = found.detach()
    if not is_array(part):
        raise ValueError(f"the shards of {fqn} are not plain arrays ({type(part).__name__})")
    item = Item(
        *(fqn, path, kind, owned, dtype_name(part.dtype)),
        *(tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes)),
        requires_grad=data.properties.requires_grad,
        nbytes=part.numel() * part.element_size(),
    )
    if tuple(part.shape) != item.sizes:
        raise ValueError(f"the chunk of {fqn} is {tuple(part.shape)} and should be {item.sizes}")
    return Piece(item, part)


def is_item(item: Item, value: Any) -> bool:
    """Whether `pieces` would create this item, except for its location, from this value."""
    if item.kind is ItemKind.BYTES:
        return not isinstance(value, DTensor) and not (
            isinstance(value, torch.Tensor) and is_array(value)
        )
    if not isinstance(value, torch.Tensor) or dtype_name(value.dtype) != item.dtype:
        return False
    if type(value) in PLAIN:
        return (
            item.kind is ItemKind.TENSOR
            and tuple(value.shape) == item.sizes
            and value.requires_grad == item.requires_grad
            and is_array(value)
        )
    made = [one.item for one in pieces({item.fqn: value})]
    return len(made) == 1 and all(getattr(made[0], name) == getattr(item, name) for name in _ALIKE)


def is_filled_item(item: Item, value: torch.Tensor) -> bool:
    """The same as `is_item`, for a plain tensor of the item's sizes that holds the item's
    elements."""
    return (
        dtype_name(value.dtype) == item.dtype
        and value.requires_grad == item.requires_grad
        and not value.is_meta
    )


def in_order(found: Sequence[Piece]) -> list[Piece]:
    """Sort pieces as in a layout: tensors before opaque values, and of both, own before shared."""
    return sorted(found, key=lambda one: (one.item.kind is ItemKind.BYTES, not one.item.own))


def serialise(value: Any) -> bytes:
    """Serialize an opaque value like DCP."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
