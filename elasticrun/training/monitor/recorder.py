"""Where a rank is in its collectives, as torch counts them: next to nothing for the counters, some
milliseconds where the call that is not complete is wanted too.

gloo never says when a collective began or ended, and its count of complete ones may stay too low:
two of its threads finish two collectives at a time, and the first one's number is written last. So
what is open is looked up among the entries, where `retired` says so; that costs more, and is done
where it matters, once the counters stand still.
The counters go by a number that each process gives its groups itself; the name that all ranks know
a group by stands in its collectives' entries. Each recorder has numbers of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from elasticrun.training.monitor.recorders import (
    CPU,
    FlightRecorder,
    Row,
    TorchGroup,
    groups,
    is_by_hook,
    recorders,
)
from elasticrun.wire import env
from elasticrun.wire.progress import MAX_GROUPS_SAID, GroupSays
from elasticrun.wire.types import write_ranges

ON_CPU: Final = f"/{CPU}"
"""Suffix to the name of a group that has another backend for other devices: its collectives on the
CPU are numbered apart."""

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
        """As torch has them; if they are as they were, what is open is read from the entries."""
        rows: list[GroupSays] = []
        for recorder in recorders(groups()):
            rows += [_counted(recorder, one, row) for one, row in recorder.status().items()]
        found = _most(rows)
        stands, self._last = found == self._last, found
        if not stands or all(row.entered <= row.done for row in found):
            return found
        counted = {row.key: row.entered for row in found}
        # the same count of calls as before, or the change of source would look like a move
        return tuple(
            GroupSays(r.key, entered, r.started, entered - (r.entered - r.done))
            for r in positions()
            if (entered := counted.get(r.key, r.entered)) >= 0
        )


def positions() -> tuple[GroupSays, ...]:
    """The groups that there are, with their names, members and the oldest call that is open; those
    that may be any of several have no name."""
    known = groups()
    found: list[GroupSays] = []
    for recorder in recorders(known):
        found += _positions(recorder, [group for group in known if group.is_fed_to(recorder)])
    return _most(found)


def _positions(recorder: FlightRecorder, known: Sequence[TorchGroup]) -> list[GroupSays]:
    """Of the groups that this recorder holds."""
    status, entries = recorder.whole()
    by_name = {group.name: group for group in known}
    named = _names(status, entries, list(by_name))
    found = []
    if not by_name.keys() <= set(named.values()):
        found += [_counted(recorder, one, row) for one, row in status.items() if one not in named]
    for number, name in named.items():
        members = write_ranges(by_name[name].ranks, pairs=True)
        if len(members) > MAX_MEMBERS:
            continue
        own = [one for one in entries if str(one.get("pg_id")) == number]
        row = _completed(_counted(recorder, number, status[number]), own)
        title = by_name[name].title
        found.append(_placed(row, _name(recorder, by_name[name]), title, members, _open(row, own)))
    return found


def _name(recorder: FlightRecorder, group: TorchGroup) -> str:
    """The name of what this recorder holds of the group."""
    mine = {type for name in recorder.backends for type in group.devices.get(name, ())}
    apart = group.devices.keys() - recorder.backends
    return group.name + ON_CPU if apart and CPU in mine else group.name


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


def _counted(recorder: FlightRecorder, number: str, row: Row) -> GroupSays:
    entered, started, done = (
        int(row.get(f"last_{what}_collective", -1)) for what in ("enqueued", "started", "completed")
    )
    first = 1 if recorder.hooked else 0
    key = f"{recorder.key}:{number}" if recorder.key else number
    return GroupSays(key, max(0, entered + first), started, max(0, done + first))


def _completed(row: GroupSays, entries: Sequence[Row]) -> GroupSays:
    """The collectives that are entered and complete, with what the entries tell."""
    if entries and is_by_hook(entries[-1]):
        return _by_hook(row, entries)
    numbers = {
        int(one.get("collective_seq_id") or 0): bool(one.get("retired"))
        for one in entries
        if not one.get("is_p2p")
    }
    entered = max(row.entered, *numbers) if numbers else row.entered
    open_ones = [number for number, retired in numbers.items() if not retired]
    # with no entry left, others have been called since by the thousand: none of these is open
    done = min(open_ones) - 1 if open_ones else max(numbers, default=entered)
    return replace(row, entered=entered, done=min(max(row.done, done), entered))


def _by_hook(row: GroupSays, entries: Sequence[Row]) -> GroupSays:
    """The same where a hook made the entries: its counters are of calls and not of collectives. A
    call that raised stays open for ever; the backend completes those of a group in order, so one
    that is complete says so of all before it."""
    entered = max(int(one.get("collective_seq_id") or 0) for one in entries)
    numbers = [one for one in entries if not one.get("is_p2p")]
    retired = [int(one["collective_seq_id"]) for one in numbers if one.get("retired")]
    oldest = min((int(one["collective_seq_id"]) for one in numbers), default=entered + 1)
    return replace(row, entered=entered, done=max(retired, default=oldest - 1))


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
