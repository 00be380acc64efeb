"""A user's whole state, to take in a snapshot and to restore; includes this rank's random states.

Taking it is cheap as long as only values change: the plan (the items, and where their tensors are)
is made once, and cached as long as the watched tensors are the same objects and the loose state has
the same names and shapes.
"""

from __future__ import annotations

import importlib
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from elasticrun.snapshots.dcp.garbage import no_collection
from elasticrun.snapshots.dcp.items import (
    OWN_PREFIX,
    Flat,
    NameClash,
    Piece,
    flatten,
    in_order,
    is_array,
    is_filled_item,
    is_item,
    local,
    own_key,
    pieces,
    serialise,
)
from elasticrun.snapshots.dcp.loading import NotAllowed, deserialise
from elasticrun.snapshots.shm.layout import Item, ItemKind, Layout
from elasticrun.training.checkpointing.parts import (
    ModulePart,
    OptimizerPart,
    Path,
    PlainPart,
    RestPart,
    StateError,
    StatefulPart,
    StatePart,
    TensorWatch,
    fitting,
    unflatten,
)
from elasticrun.training.data import ElasticBatchSampler

RNG: Final = "__rng"
"""Key of the random states, beside the names passed to `per_rank`: for rank 3, `__rank3.__rng`."""

_HEAD: Final = struct.Struct("<8sHHI")
"""Header of one state: its source, the device's index, whether that was the current device, and the
state's length in bytes.
"""

_PYTHON: Final = struct.Struct("<625I?d")
"""Python's state: its words, whether a second Gaussian number is pending, and that number."""

_NUMPY: Final = struct.Struct("<624Iiid?")
"""numpy's state: its words, the position in them, whether a second Gaussian number is pending, and
that number; then whether there is a state at all.
"""

_NUMPY_KIND: Final = "MT19937"

_PYTHON_VERSION: Final = 3
_DEVICES: Final = ("cuda", "xpu", "npu", "mlu", "musa", "hpu")
"""torch's device modules; only those that exist and are initialized are used."""


class RandomPart:
    """The random states as a part of the state of one rank: Python's, numpy's global generator,
    torch's CPU generator and those of all devices in use.

    They form one tensor of bytes, so they add one item of fixed length to a snapshot (about 10 kB;
    a changed layout would require new memory) and one entry per rank to a checkpoint. They are
    taken with the snapshot, and restored at the end of a restore."""

    def __init__(self, remark: Callable[[str], None]) -> None:
        """`remark`: accepts a sentence for the operator."""
        self._remark = remark
        self._saved: torch.Tensor | None = None  # what was restored
        self._numpy()  # its remark is reported at the restore

    def steady(self) -> None:
        return None

    def loose(self) -> torch.Tensor:
        found: list[torch.Tensor] = []
        for name, index, is_current, state in self._sections():
            head = _HEAD.pack(name.encode(), index, is_current, state.numel())
            found += [_tensor(head), state]
        return torch.cat(found)

    def targets(self, saved: Mapping[Path, Item]) -> dict[Path, torch.Tensor]:
        return fitting(None, saved, in_place=False)

    def adopt(self, values: Mapping[Path, Any]) -> None:
        self._saved = values[()]

    def put_back(self) -> None:
        """Set the random generators to the restored states; a no-op if none were restored."""
        if self._saved is None:
            return
        sections = list(_split(self._saved))
        current = {name: int(module.current_device()) for name, module in _devices()}
        before = {name: index for name, index, was_current, _ in sections if was_current}
        for name, index, was_current, state in sections:
            # A rank may have another device than before. The state of its current device is kept.
            if was_current:
                index = current.get(name, index)
            elif index == current.get(name):
                index = before.get(name, index)
            try:
                _set_state(name, index, state)
            except Exception as error:  # e.g. from another version of torch
                self._remark(f"the random state of {name} could not be restored: {error!r:.200}")

    def _sections(self) -> Iterator[tuple[str, int, bool, torch.Tensor]]:
        """Source of each state, device index, whether that is the current device, and the state."""
        version, words, left = random.getstate()
        if version == _PYTHON_VERSION:
            packed = _PYTHON.pack(*words, left is not None, left or 0.0)
            yield "python", 0, False, _tensor(packed)
        if "numpy" in sys.modules:
            yield "numpy", 0, False, _tensor(self._numpy())
        yield "torch", 0, False, torch.get_rng_state()
        for name, module in _devices():
            mine = module.current_device()
            for index in range(module.device_count()):
                yield name, index, index == mine, module.get_rng_state(index).cpu()

    def _numpy(self) -> bytes:
        numpy_random: Any = sys.modules.get("numpy.random")  # torch may load numpy without it
        if numpy_random is None:
            return bytes(_NUMPY.size)
        state = numpy_random.get_state(legacy=False)
        if (kind := state["bit_generator"]) != _NUMPY_KIND:
            self._remark(f"the state of numpy's global generator, a {kind}, is not saved")
            return bytes(_NUMPY.size)
        words, place = state["state"]["key"].tolist(), state["state"]["pos"]
        return _NUMPY.pack(*words, place, state["has_gauss"], state["gauss"], True)


def _split(states: torch.Tensor) -> Iterator[tuple[str, int, bool, torch.Tensor]]:
    """The inverse of `_sections`."""
    at = 0
    while at < states.numel():
        tag, index, was_current, length = _HEAD.unpack(bytes(states[at : at + _HEAD.size].tolist()))
        at += _HEAD.size + length
        yield tag.rstrip(b"\0").decode(), index, bool(was_current), states[at - length : at].clone()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _devices() -> Iterator[tuple[str, Any]]:
    """torch's device modules that this process already uses; initializes none."""
    for name in _DEVICES:
        module = getattr(torch, name, None)
        begun = getattr(module, "is_initialized", None)
        if begun is not None and begun():
            yield name, module


def _set_state(name: str, index: int, state: torch.Tensor) -> None:
    """Set this random state; a no-op for a device that this node does not have."""
    if name == "python":
        *words, is_left, left = _PYTHON.unpack(bytes(state.tolist()))
        random.setstate((_PYTHON_VERSION, tuple(words), left if is_left else None))
    elif name == "numpy":
        *words, place, has_gauss, gauss, is_there = _NUMPY.unpack(bytes(state.tolist()))
        if is_there:
            numpy_random: Any = importlib.import_module("numpy.random")  # may not be loaded yet
            numpy_random.set_state((_NUMPY_KIND, words, place, has_gauss, gauss))
    elif name == "torch":
        torch.set_rng_state(state)
    else:
        module: Any = getattr(torch, name, None)
        if module is not None and index < module.device_count():
            module.set_rng_state(state, index)


STATE = "state"
"""Name of the argument whose dict may contain objects with a `state_dict` beside plain values."""

_VOUCHED = frozenset((int, float, bool, str, type(None), torch.Tensor, nn.Parameter, DTensor))
"""Types whose values can always be loaded."""

REMEMBERED = 16 * 1024
"""Maximum characters of a plain value whose bytes are cached; random.getstate() has half as
many."""

_Groups = dict[Path, dict[Path, Item]]

OnResize = Callable[[list[Any]], None]
"""Receives the states of one per-rank object of all old ranks, by rank."""


@dataclass(slots=True)
class SnapshotPlan:
    """The content of a snapshot, in the order of a layout."""

    tensors: list[torch.Tensor]  # this rank's parts, not copies
    values: list[Any]  # opaque ones
    items: Sequence[Item]  # of the tensors, then of the values
    layout: Layout | None = None  # if its layout is known

    @property
    def pieces(self) -> list[Piece]:
        """The items with their values."""
        return list(map(Piece, self.items, [*self.tensors, *self.values]))


@dataclass(slots=True)
class KnownLayout:
    """The layout of this rank's state in the snapshot that was restored, and the plain tensors, by
    name, that were filled with whole items of it."""

    layout: Layout
    filled: Mapping[str, torch.Tensor]


@dataclass(slots=True)
class OwnState:
    """A per-rank object and its `on_resize`."""

    part: StatePart
    on_resize: OnResize | None


class TrainingState:
    """A training's state: all parts, by name."""

    def __init__(
        self, parts: Mapping[str, Any], rank: int, rng: bool = False, weights_only: bool = True
    ) -> None:
        """`rng`: include this rank's random states. `weights_only`: refuse to save what could not
        be loaded that way. Raises StateError for a value that cannot be part of a state."""
        self.weights_only = weights_only
        self._vouched: set[tuple[str, type]] = set()  # names and types that can be loaded
        self.remarks: list[str] = []
        self.rank = rank
        self.own: dict[str, OwnState] = {}
        self._rng = RandomPart(self._remark) if rng else None
        if self._rng is not None:
            self.own[RNG] = OwnState(self._rng, None)
        given, among = _with_nested_parts(parts)
        self._optimizers = [v for v in given.values() if isinstance(v, torch.optim.Optimizer)]
        self.parts = self._sort(given, among)
        self._samplers = {n: s for n, s in given.items() if isinstance(s, ElasticBatchSampler)}
        self.known: KnownLayout | None = None
        self._below: tuple[Mapping[str, Item], _Groups] = ({}, {})
        self._plan: SnapshotPlan | None = None
        self._watches: list[TensorWatch] = []
        self._signature: tuple[Any, ...] = ()
        self._places: dict[str, tuple[bool, int]] = {}
        self._serialised: dict[tuple[type, str], bytes] = {}

    def _sort(self, parts: Mapping[str, Any], among: Mapping[str, Any]) -> dict[str, StatePart]:
        """Create the parts. `among`: those of `parts` that came from the dict `state`, which is
        itself a part."""
        for name in parts:
            if name.startswith(OWN_PREFIX):
                raise StateError(f"{name!r} cannot be a name: it is reserved for per-rank state")
        made: dict[str, StatePart] = {
            name: ModulePart(name, value)
            for name, value in parts.items()
            if isinstance(value, nn.Module)
        }
        for name, value in parts.items():
            if name == STATE and among:
                made[name] = RestPart(name, value, among)
            elif name not in made:
                made[name] = self._part(name, value, list(made.values()))
        return {name: made[name] for name in parts}

    def _part(self, name: str, value: Any, others: Iterable[StatePart]) -> StatePart:
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(name, value, [p for p in others if isinstance(p, ModulePart)])
        if isinstance(value, Stateful):
            return StatefulPart(value)
        if isinstance(value, Mapping):
            if not isinstance(value, dict):
                raise StateError(
                    f"{name} is a {type(value).__name__}, which cannot be restored in place"
                )
            for key, inner in value.items():
                if isinstance(inner, Stateful | nn.Module):
                    what = f"{name}[{key!r}] is a {type(inner).__name__}"
                    raise StateError(f"{what}: pass it under its own name, or in state={{...}}")
        return PlainPart(name, value)

    def _optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, modules: list[ModulePart]
    ) -> StatePart:
        """The part for an optimizer. Its state is keyed by parameter names if one module, or all
        modules together, contain its parameters."""
        for candidates in [*([module] for module in modules), modules]:
            try:
                return OptimizerPart(name, optimizer, candidates)
            except StateError as error:
                why = str(error)
        if modules:
            self._remark(
                f"{why}; its state is saved by position, and can only be restored with the same "
                "number of ranks"
            )
        return StatefulPart(optimizer)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that are parts."""
        return list(self._optimizers)

    def add_own(self, name: str, value: Any, on_resize: OnResize | None) -> None:
        """Add state of this rank alone. Raises StateError."""
        if name == RNG:
            raise StateError(f"{name!r} cannot be a name: it is reserved for random states")
        if isinstance(value, nn.Module | torch.optim.Optimizer):
            raise StateError(f"{name} is a {type(value).__name__}, which is not per-rank state")
        self.own[name] = OwnState(self._part(name, value, ()), on_resize)
        self._plan = None

    def resize(
        self, ranks: int, why: str, own_of: Callable[[int, str], Mapping[Path, Any]]
    ) -> None:
        """Pass the per-rank states of all old ranks to `on_resize`, because the number of ranks,
        formerly `ranks`, has changed. `own_of` returns a state by rank and name ({} for a lost
        one). `why` is the reason in the remark about an object without `on_resize`."""
        for name, own in self.own.items():
            if own.on_resize is None or not ranks:
                self.remark_not_restored(name, why)
                continue
            template = own.part.loose()
            found = [own_of(rank, name) for rank in range(ranks)]
            own.on_resize([unflatten(one, template) if one else None for one in found])

    def remark_not_restored(self, name: str, why: str) -> None:
        """Remark that the per-rank state of this name was not restored."""
        if name == RNG:
            text = "random states are not restored"
            self._remark(f"{text}: {why}")
        else:
            self._remark(f"per-rank state {name} is not restored: {why}")

    def _remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    def set_step(self, step: int) -> None:
        """Set the position in the data to `step`, the number of completed steps."""
        for sampler in self._samplers.values():
            sampler.set_step(step)

    def put_back_rng(self) -> None:
        """Set the random generators to the restored states, if there are any."""
        if self._rng is not None:
            self._rng.put_back()

    def check_loadable(self) -> None:
        """Check before training begins that the state can be saved and loaded again. Raises
        StateError."""
        try:
            steady, loose = self._steady(), self._loose()
            whole = _joined(steady, loose)
        except Exception:  # raised by a user's state_dict; reported when a snapshot is due
            return
        try:
            flatten(whole)
            self._check_values_loadable(flatten(loose))
        except NameClash as error:
            raise StateError(str(error)) from None

    def _check_values_loadable(self, flat: Flat) -> None:
        """Check once for each name and type whether opaque values can be loaded again. Raises
        StateError."""
        for fqn, value in flat.values.items() if self.weights_only else ():
            if type(value) in _VOUCHED or (fqn, type(value)) in self._vouched:
                continue
            if not (isinstance(value, torch.Tensor) and is_array(value)) and not _is_plain(value):
                try:
                    deserialise(serialise(value), name=fqn)
                except NotAllowed as error:
                    raise StateError(str(error)) from error
            self._vouched.add((fqn, type(value)))

    def take(self) -> SnapshotPlan:
        """The current state. Not a copy: copy it before training continues. Raises StateError, or
        what a Stateful raises."""
        flat = flatten(self._loose())
        self._check_values_loadable(flat)
        plan = self._plan if _signature(flat) == self._signature else None
        if plan is not None and all(watch.is_unchanged() for watch in self._watches):
            for fqn, value in flat.values.items():
                if fqn in self._places:  # otherwise sharded over a mesh without this rank
                    is_tensor, at = self._places[fqn]
                    if is_tensor:
                        plan.tensors[at] = local(value)
                    else:
                        plan.values[at] = value
            return plan
        known, self.known = self.known, None
        with no_collection():
            found = None if known is None else self._as_known(known)
            return self._planned() if found is None else found

    def _steady(self) -> dict[str, Any]:
        self._watches = []
        steady: dict[str, Any] = {}
        for name, part in self.parts.items():
            found = part.steady()
            if found is not None:
                steady[name] = found[0]
                self._watches.append(found[1])
        return steady

    def _loose(self) -> dict[str, Any]:
        found = {}
        for name, part in self.parts.items():
            value = part.loose()
            if value is not None and not (isinstance(value, Mapping) and not value):
                found[name] = value
        if self.own:
            found[own_key(self.rank)] = {n: own.part.loose() for n, own in self.own.items()}
        return found

    def _planned(self) -> SnapshotPlan:
        try:
            ordered = in_order(pieces(self.whole(), own_key(self.rank)))
        except ValueError as error:
            raise StateError(str(error)) from error
        buffers = {
            (name, buffer)
            for name, part in self.parts.items()
            if isinstance(part, ModulePart)
            for buffer in part.buffers()
        }
        return self._cache_plan(
            [
                (
                    one.item._replace(buffer=True) if one.item.path in buffers else one.item,
                    one.value,
                )
                for one in ordered
            ]
        )

    def _cache_plan(
        self, found: Iterable[tuple[Item, Any]], layout: Layout | None = None
    ) -> SnapshotPlan:
        """Cache and return the plan of these items with their values, in the order of a layout."""
        items: list[Item] = []
        tensors: list[torch.Tensor] = []
        values: list[Any] = []
        self._places = {}
        for item, value in found:
            items.append(item)
            is_tensor = item.kind is not ItemKind.BYTES
            of_its_kind = tensors if is_tensor else values
            self._places[item.fqn] = (is_tensor, len(of_its_kind))
            of_its_kind.append(value)
        self._plan = SnapshotPlan(tensors, values, items, layout)
        return self._plan

    def _as_known(self, known: KnownLayout) -> SnapshotPlan | None:
        """The plan, if the state still has that layout. Comparing item by item avoids a new layout,
        which takes three times as long."""
        layout, filled = known.layout, known.filled
        if layout.torch != str(torch.__version__):
            return None
        flat, loose = flatten(self._steady()), flatten(self._loose())
        if len(flat.values) + len(loose.values) != len(layout.items):
            return None
        flat.values.update(loose.values)
        flat.paths.update(loose.paths)
        there: list[tuple[Item, Any]] = []
        for item in layout.items:
            value, target = flat.values.get(item.fqn, self), filled.get(item.fqn)
            filled_so = target is not None and value is target and is_filled_item(item, target)
            if not filled_so and (
                value is self or flat.paths[item.fqn] != item.path or not is_item(item, value)
            ):
                return None
            there.append((item, value if item.kind is ItemKind.BYTES else local(value)))
        self._signature = _signature(loose)
        return self._cache_plan(there, layout)

    def whole(self) -> dict[str, Any]:
        """The whole state, nested as in a checkpoint; not a copy."""
        steady, loose = self._steady(), self._loose()
        flat = flatten(loose)
        self._check_values_loadable(flat)
        self._signature = _signature(flat)
        self._plan = None
        return _joined(steady, loose)

    def serialised(self, values: Iterable[Any]) -> list[bytes]:
        """Serialize opaque values; reuse the bytes of small plain ones that have not changed."""
        before, self._serialised = self._serialised, {}
        found = []
        for value in values:
            text = repr(value) if _is_plain(value) else ""
            if not 0 < len(text) <= REMEMBERED:
                found.append(serialise(value))
                continue
            key = (type(value), text)
            if key not in self._serialised:
                self._serialised[key] = before[key] if key in before else serialise(value)
            found.append(self._serialised[key])
        return found

    def targets(self, saved: Mapping[str, Item], own: bool) -> dict[str, torch.Tensor]:
        """A tensor to fill for each saved tensor, by name; changes no state yet. `own`: include
        this
        rank's per-rank state. Raises StateError."""
        found: dict[str, torch.Tensor] = {}
        for prefix, part, below in self._restored(saved, own):
            names = {path: item.fqn for path, item in below.items()}
            if not below:
                now = part.loose()
                if prefix[-1] == RNG:
                    self.remark_not_restored(RNG, f"those of rank {self.rank} were not saved")
                elif prefix[0] in self._samplers:
                    self._remark(
                        f"{prefix[0]} was not saved: it continues at the restored step, but its "
                        "settings cannot be compared"
                    )
                elif part.steady() is not None or (now is not None and now != {}):
                    self._remark(f"{'.'.join(prefix)} was not saved, so it is not restored")
                continue
            for path, tensor in part.targets(below).items():
                found[names[path]] = tensor
        return found

    def _restored(
        self, saved: Mapping[str, Item], own: bool
    ) -> Iterator[tuple[tuple[str, ...], StatePart, dict[Path, Item]]]:
        """Each part to restore: its path, and its items by the rest of their paths."""
        mine = own_key(self.rank)
        if self._below[0] is not saved:
            groups: _Groups = {}
            for item in saved.values():
                size = 2 if item.path[0] == mine else 1
                groups.setdefault(item.path[:size], {})[item.path[size:]] = item
            self._below = (saved, groups)
        for name, part in self.parts.items():
            yield (name,), part, self._below[1].get((name,), {})
        for name, one in self.own.items() if own else ():
            yield (mine, name), one.part, self._below[1].get((mine, name), {})

    def wanted_values(self, saved: Mapping[str, Item], own: bool) -> list[str]:
        """Names of the opaque values that belong to these parts."""
        return [
            item.fqn
            for _, _, below in self._restored(saved, own)
            for item in below.values()
            if item.kind is ItemKind.BYTES
        ]

    def adopt(self, saved: Mapping[str, Item], values: Mapping[str, Any], own: bool) -> None:
        """Put values in place. `values`: the filled targets and the opaque values, by name."""
        for _, part, below in self._restored(saved, own):
            had = {p: values[item.fqn] for p, item in below.items() if item.fqn in values}
            if had:
                part.adopt(had)
        self._plan = None
        self._below = ({}, {})


def _with_nested_parts(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parts by name, where objects with a `state_dict` in the dict `state` are added under
    their keys; and these objects alone. Raises StateError."""
    state = given.get(STATE)
    if type(state) is not dict:
        return dict(given), {}
    among = {
        key: one
        for key, one in state.items()
        if isinstance(one, Stateful | nn.Module) and not isinstance(one, type)
    }
    for key, one in among.items():
        what = f"{STATE}[{key!r}] is a {type(one).__name__}"
        if not isinstance(key, str):
            raise StateError(f"{what}: its key must be a string")
        if key in given:
            raise StateError(f"{what}, and {key}= is also an argument: use another key")
    return {**given, **among}, among


def _joined(steady: Mapping[str, Any], loose: Mapping[str, Any]) -> dict[str, Any]:
    """Steady and loose state, nested."""
    whole = dict(steady)
    for name, value in loose.items():
        if (known := whole.get(name)) is None:
            whole[name] = value
            continue
        state = {key: dict(entries) for key, entries in known["state"].items()}
        for key, entries in value["state"].items():  # an optimizer's state is in both
            state.setdefault(key, {}).update(entries)
        whole[name] = {**value, "state": state}
    return whole


def _signature(flat: Flat) -> tuple[Any, ...]:
    """Equal for two states that consist of the same items."""
    return tuple((fqn, _shape(value)) for fqn, value in flat.values.items())


def _shape(value: Any) -> Any:
    if isinstance(value, DTensor):
        return (value.dtype, value.shape, value.placements, id(value.device_mesh))
    if isinstance(value, torch.Tensor) and is_array(value):
        return (value.dtype, value.shape)
    return None


def _is_plain(value: Any) -> bool:
    """Whether `repr` shows the value completely; False if it may be long."""
    if type(value) in (int, float, bool, type(None)):
        return True
    if type(value) not in (str, bytes, list, tuple) or len(value) > REMEMBERED:
        return False
    return type(value) in (str, bytes) or all(map(_is_plain, value))
