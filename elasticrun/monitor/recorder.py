"""Where a rank is in its collectives, as torch counts them: next to nothing for the counters, some
milliseconds where the call that is not complete is wanted too.

torch is looked for and never imported; nothing is asked of it before the script has made a process
group, since the first question fixes how many collectives torch keeps.

gloo never says when a collective began or ended, and its count of complete ones may stay too low:
two of its threads finish two collectives at a time, and the first one's number is written last. So
what is open is looked up among the entries, where `retired` says so; that costs more, and is done
where it matters, once the counters stand still.
The counters go by a number that each process gives its groups itself; the name that all ranks know
a group by stands in its collectives' entries. NCCL's recorder and the one of all other backends
count apart, each with numbers of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from elasticrun.wire import env
from elasticrun.wire.progress import MAX_GROUPS_SAID, GroupSays
from elasticrun.wire.types import write_ranges

NCCL: Final = "_dump_nccl_trace_json"
PLAIN: Final = "_dump_fr_trace_json"

BESIDE_NCCL: Final = "/cpu"
"""Behind the name of a group whose collectives on the CPU are counted beside NCCL's."""

MAX_MEMBERS: Final = 1000
"""Characters in which the members of a group are told; one that needs more is left out."""

MAX_SIZES: Final = 4
"""Tensors of a call whose sizes are told."""

TYPES: Final = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}

Row = dict[str, Any]


KEEPS_BY_ITSELF: Final = (2, 11)
"""The first torch that keeps collectives without being told to."""

KEPT: Final = "2000"
"""How many such a torch keeps of each process."""


def keep(version: str) -> None:
    """Have torch of this version keep collectives; to be called before the script has made a group.
    What the user has set stands. Not by `os.environ`: there it would look as if he had."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    told = {env.FLIGHT_RECORDER_SIZE, env.NCCL_TRACE_SIZE} & os.environ.keys()
    if len(numbers) == 2 and numbers < KEEPS_BY_ITSELF and not told:
        os.putenv(env.FLIGHT_RECORDER_SIZE, KEPT)


class Counters:
    """The counters of each group by its number in this process."""

    def __init__(self) -> None:
        self._last: tuple[GroupSays, ...] = ()

    def look(self) -> tuple[GroupSays, ...]:
        """As torch has them; if they are as they were, as the entries have them."""
        rows: list[GroupSays] = []
        for kind, dump in _dumps():
            status = json.loads(dump(False, False)).get("pg_status") or {}
            rows += [_counted(kind + number, row) for number, row in status.items()]
        found = _most(rows)
        stands, self._last = found == self._last, found
        if not stands or all(row.entered <= row.done for row in found):
            return found
        return tuple(GroupSays(r.key, r.entered, r.started, r.done) for r in positions())


def positions() -> tuple[GroupSays, ...]:
    """The groups that there are, with their names, members and the oldest call that is open; those
    that may be any of several have no name."""
    groups, dumps = _groups(), _dumps()
    found: list[GroupSays] = []
    for kind, dump in dumps:
        said = json.loads(dump(True, False))
        entries: Sequence[Row] = said.get("entries") or ()
        status: Mapping[str, Row] = said.get("pg_status") or {}
        beside = BESIDE_NCCL if kind == "" and len(dumps) > 1 else ""
        named = _names(status, entries, list(groups))
        if not groups.keys() <= set(named.values()):
            found += [_counted(kind + one, row) for one, row in status.items() if one not in named]
        for number, name in named.items():
            title, members = groups[name]
            if len(members) > MAX_MEMBERS:
                continue
            own = [one for one in entries if str(one.get("pg_id")) == number]
            row = _completed(_counted(kind + number, status[number]), own)
            call = _open(row, own)
            found.append(_placed(row, name + beside, title, members, call))
    return _most(found)


def _dumps() -> list[tuple[str, Any]]:
    """Torch's recorders; none before the script has made a group."""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    torch: Any = sys.modules.get("torch")
    c10d = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    if c10d is None or not getattr(world, "pg_names", None):
        return []
    both = (("n", getattr(c10d, NCCL, None)), ("", getattr(c10d, PLAIN, None)))
    return [(kind, dump) for kind, dump in both if dump is not None]


def _groups() -> dict[str, tuple[str, str]]:
    """Title and members of each group by its name, in the order in which they were made."""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    if world is None:
        return {}
    names = dict(getattr(world, "pg_names", {}))
    ranks = dict(getattr(world, "pg_group_ranks", {}))
    return {
        str(name): (
            str(getattr(group, "group_desc", "") or ""),
            write_ranges(ranks.get(group) or (), pairs=True),
        )
        for group, name in names.items()
    }


def _names(
    status: Mapping[str, Row], entries: Sequence[Row], groups: Sequence[str]
) -> dict[str, str]:
    """The name of each numbered group that still is there. Where its collectives do not tell it
    (they have left the ring), the order in which groups were made does, if it is beyond doubt."""
    told = {str(one.get("pg_id")): str((one.get("process_group") or [""])[0]) for one in entries}
    found = {number: name for number, name in told.items() if number in status and name in groups}
    numbers = sorted((one for one in status if one not in told), key=int)
    names = [name for name in groups if name not in found.values()]
    if len(numbers) == len(names):
        found.update(zip(numbers, names, strict=True))
    return found


def _counted(key: str, row: Row) -> GroupSays:
    entered, started, done = (
        int(row.get(f"last_{what}_collective", -1)) for what in ("enqueued", "started", "completed")
    )
    return GroupSays(key, max(0, entered), started, max(0, done))


def _completed(row: GroupSays, entries: Sequence[Row]) -> GroupSays:
    """All before the oldest one that is open are complete."""
    numbers = {
        int(one.get("collective_seq_id") or 0): bool(one.get("retired"))
        for one in entries
        if not one.get("is_p2p")
    }
    open_ones = [number for number, retired in numbers.items() if not retired]
    # with no entry left, others have been called since by the thousand: none of these is open
    done = min(open_ones) - 1 if open_ones else max(numbers, default=row.entered)
    return replace(row, done=min(max(row.done, done), row.entered))


def _open(row: GroupSays, entries: Sequence[Row]) -> Row | None:
    """The entry of the oldest call that is not complete, one between two ranks if that is all."""
    if row.entered <= row.done:
        return None
    left = [one for one in entries if not one.get("retired")]
    pairs = [one for one in left if one.get("is_p2p")]
    next_one = (one for one in left if one.get("collective_seq_id") == row.done + 1)
    return next(next_one, pairs[0] if pairs else None)


def _placed(row: GroupSays, name: str, title: str, members: str, call: Row | None) -> GroupSays:
    if title == "undefined":
        title = ""
    text, age, limit = "", 0.0, 0.0
    if call is not None:
        text = signature(call)
        age = max(0.0, (time.time_ns() - int(call.get("time_created_ns") or 0)) / 1e9)
        limit = float(call.get("timeout_ms") or 0) / 1e3
    where = (row.key, row.entered, row.started, row.done)
    return GroupSays(*where, name[:100], title[:100], members, text, age, limit)


def signature(call: Row) -> str:
    """By which ranks in the same collective are the same: "all_reduce [1000] float32"."""
    what = str(call.get("profiling_name") or "").partition(":")[2]
    sizes = [json.dumps(size) for size in (call.get("input_sizes") or ())]
    more = [f"and {len(sizes) - MAX_SIZES} more"] if len(sizes) > MAX_SIZES else []
    types = call.get("input_dtypes") or ()
    names = sorted({TYPES.get(str(one), str(one).lower()) for one in types})
    return " ".join([what, *sizes[:MAX_SIZES], *more, *names[:MAX_SIZES]])[:200]


def _most(found: list[GroupSays]) -> tuple[GroupSays, ...]:
    """The ones with an open collective first, where there are more than can be told."""
    if len(found) > MAX_GROUPS_SAID:
        found.sort(key=lambda row: row.entered <= row.done)
    return tuple(found[:MAX_GROUPS_SAID])
