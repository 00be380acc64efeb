"""Torch's flight recorders: which ones this process writes to, and how to read each.

Each recorder keeps the newest collectives in a ring. Which recorder a collective goes to depends on
the backend that serves it:

* `nccl` (ProcessGroupNCCL) and `xccl` have their own recorders.
* `gloo` records into the default recorder.
* All other backends (`nccl2`, which is what "nccl" builds since torch 2.15, `nccl-lazy`, `ucc`,
  plugins) record nothing themselves. Since 2.15 torch attaches a hook to their groups, which
  records into one recorder for each backend name. A hook that a script attaches itself under torch
  2.14 records into the default recorder.

A hook numbers calls differently: see `FlightRecorder.is_hooked`.

torch is looked up and never imported. Nothing is read before the script has made a process group,
since the first read fixes the size of the ring.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

Row = dict[str, Any]

DEFAULT: Final = "gloo"
"""The backend whose name torch gives to its default recorder."""

PLAIN_DUMP: Final = "_dump_fr_trace_json"
OWN_DUMPS: Final[Mapping[str, str]] = {
    "nccl": "_dump_nccl_trace_json",
    "xccl": "_dump_xccl_trace_json",
}
"""torch's functions that read the recorder of one backend, and the one for all others."""

SELF_RECORDING: Final = frozenset({DEFAULT, *OWN_DUMPS})
"""Backends that record their collectives without a hook."""

CPU: Final = "cpu"


@dataclass(frozen=True, slots=True)
class TorchGroup:
    """A process group: the name under which all its ranks know it, its description, its members
    (ranks of the job) and, by backend, the device types that the backend serves in it."""

    name: str
    title: str
    ranks: Iterable[int]
    devices: Mapping[str, frozenset[str]]  # empty: unknown

    def is_fed_to(self, recorder: FlightRecorder) -> bool:
        """Whether this recorder may hold collectives of the group."""
        return not self.devices or not recorder.backends.isdisjoint(self.devices)


@dataclass(frozen=True, slots=True)
class FlightRecorder:
    """One of torch's recorders. `key` is unique within the process, `backends` feed it."""

    key: str
    backends: frozenset[str]
    dump: Callable[[bool, bool], bytes]

    @property
    def is_hooked(self) -> bool:
        """Whether only a hook feeds it. Its counters then count every call of a group, including
        point-to-point ones, from 0; its entries number collectives from 1, as in the other
        recorders."""
        return not self.backends & SELF_RECORDING

    def status(self) -> Mapping[str, Row]:
        """The counters of each group that has made a call, by the group's number in this process;
        takes a few microseconds."""
        return json.loads(self.dump(False, False)).get("pg_status") or {}

    def whole(self) -> tuple[Mapping[str, Row], Sequence[Row]]:
        """The counters and the entries, oldest first; takes about 25 microseconds per entry."""
        dumped = json.loads(self.dump(True, False))
        return dumped.get("pg_status") or {}, dumped.get("entries") or ()


def is_by_hook(entry: Row) -> bool:
    """Whether a hook has made this entry: its title starts with the backend's name."""
    return str(entry.get("profiling_name") or "").partition(":")[0] not in SELF_RECORDING


def groups() -> tuple[TorchGroup, ...]:
    """The existing process groups, in order of creation."""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    names = dict(getattr(world, "pg_names", None) or {})
    ranks = dict(getattr(world, "pg_group_ranks", None) or {})
    return tuple(
        TorchGroup(
            str(name),
            str(getattr(made, "group_desc", "") or ""),
            ranks.get(made) or (),
            _devices(made),
        )
        for made, name in names.items()
    )


def recorders(known: Sequence[TorchGroup]) -> tuple[FlightRecorder, ...]:
    """The recorders that these groups feed, those of accelerators first."""
    c10d = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    names = {backend for group in known for backend in group.devices or (DEFAULT,)}
    found = []
    for name, function in OWN_DUMPS.items():
        dump = getattr(c10d, function, None)
        if name in names and dump is not None:
            found.append(FlightRecorder(name, frozenset({name}), dump))
    plain = getattr(c10d, PLAIN_DUMP, None)
    others = names - OWN_DUMPS.keys()
    if plain is None or not others:
        return tuple(found)
    if not _takes_backend(plain):
        return (*found, FlightRecorder("", frozenset(others), plain))
    for name in sorted(others, key=lambda name: (name == DEFAULT, name)):
        # the hook replaces colons in a name
        dump = plain if name == DEFAULT else partial(plain, backend=name.replace(":", "_"))
        found.append(FlightRecorder("" if name == DEFAULT else name, frozenset({name}), dump))
    return tuple(found)


def _devices(made: Any) -> Mapping[str, frozenset[str]]:
    """The devices of a complete group, by backend: torch reads them from a table that no longer
    changes."""
    found: dict[str, set[str]] = {}
    for device in getattr(made, "_device_types", ()):
        try:
            name = str(made._get_backend(device).name())
        except Exception:  # a backend that does not report its name
            continue
        found.setdefault(name, set()).add(str(device.type))
    return {name: frozenset(types) for name, types in found.items()}


@cache
def _takes_backend(dump: Callable[..., bytes]) -> bool:
    """Whether torch (since 2.15) has a recorder per backend, which this function can read."""
    try:
        dump(False, False, DEFAULT)
    except TypeError:
        return False
    return True
