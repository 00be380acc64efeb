"""Reads a rank's position in its collectives from torch: the counters at almost no cost, and on
request the incomplete call, which takes a few milliseconds.

gloo does not report when a collective begins or ends, and its count of completed ones may stay too
low, because two threads may finish two collectives at once and write the lower number last. So the
open collective is looked up among the entries, by their `retired` field. That costs more, and is
only done once the counters stop changing. The counters are keyed by a number that each process
assigns to its groups. The name under which all ranks know a group is in the entries of its
collectives. Each recorder has its own numbers.
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
from elasticrun.wire.progress import MAX_ANSWER_GROUPS, GroupAnswer
from elasticrun.wire.types import write_ranges

ON_CPU: Final = f"/{CPU}"
"""Suffix to the name of a group that has another backend for other devices: its collectives on the
CPU are numbered separately.
"""

MAX_MEMBERS: Final = 1000
"""Maximum length of the list of a group's members; a group with a longer one is left out."""

MAX_SIZES: Final = 4
"""Maximum number of tensors of a call whose sizes are reported."""

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

RECORDS_BY_DEFAULT: Final = (2, 11)
"""The first torch version that records collectives by default."""

KEPT: Final = "2000"
"""Number of collectives that such a torch keeps per process."""


def enable(version: str) -> None:
    """Make this version of torch record collectives; call before the script creates a group. A
    user's setting is kept. Uses putenv, because in `os.environ` it would look like a user's
    setting."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    set_by_user = {env.FLIGHT_RECORDER_SIZE, env.NCCL_TRACE_SIZE} & os.environ.keys()
    if len(numbers) == 2 and numbers < RECORDS_BY_DEFAULT and not set_by_user:
        os.putenv(env.FLIGHT_RECORDER_SIZE, KEPT)


class Counters:
    """The counters of each group, by its number in this process."""

    def __init__(self) -> None:
        self._last: tuple[GroupAnswer, ...] = ()

    def read(self) -> tuple[GroupAnswer, ...]:
        """Torch's counters. If they are unchanged since the last call and show an open collective,
        the open collectives are read from the entries."""
        rows: list[GroupAnswer] = []
        for recorder in recorders(groups()):
            rows += [_counted(recorder, one, row) for one, row in recorder.status().items()]
        found = _limited(rows)
        stands, self._last = found == self._last, found
        if not stands or all(row.entered <= row.done for row in found):
            return found
        counted = {row.key: row.entered for row in found}
        # Keep the previous count of calls, because a change of source would look like progress.
        return tuple(
            GroupAnswer(r.key, entered, r.started, entered - (r.entered - r.done))
            for r in positions()
            if (entered := counted.get(r.key, r.entered)) >= 0
        )


def positions() -> tuple[GroupAnswer, ...]:
    """The current groups with names, members and the oldest open call. A group that cannot be
    identified has no name."""
    known = groups()
    found: list[GroupAnswer] = []
    for recorder in recorders(known):
        found += _positions(recorder, [group for group in known if group.is_fed_to(recorder)])
    return _limited(found)


def _positions(recorder: FlightRecorder, known: Sequence[TorchGroup]) -> list[GroupAnswer]:
    """The groups of this recorder."""
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
    """The name of the group as this recorder holds it."""
    mine = {type for name in recorder.backends for type in group.devices.get(name, ())}
    apart = group.devices.keys() - recorder.backends
    return group.name + ON_CPU if apart and CPU in mine else group.name


def _names(
    status: Mapping[str, Row], entries: Sequence[Row], groups: Sequence[str]
) -> dict[str, str]:
    """The name of each numbered group that still exists. If its collectives have left the ring, the
    order in which groups were created gives the name, if that is unambiguous."""
    by_entries = {
        str(one.get("pg_id")): str((one.get("process_group") or [""])[0]) for one in entries
    }
    found = {
        number: name for number, name in by_entries.items() if number in status and name in groups
    }
    numbers = sorted((one for one in status if one not in by_entries), key=int)
    names = [name for name in groups if name not in found.values()]
    if len(numbers) == len(names):
        found.update(zip(numbers, names, strict=True))
    return found


def _counted(recorder: FlightRecorder, number: str, row: Row) -> GroupAnswer:
    entered, started, done = (
        int(row.get(f"last_{what}_collective", -1)) for what in ("enqueued", "started", "completed")
    )
    first = 1 if recorder.is_hooked else 0
    key = f"{recorder.key}:{number}" if recorder.key else number
    return GroupAnswer(key, max(0, entered + first), started, max(0, done + first))


def _completed(row: GroupAnswer, entries: Sequence[Row]) -> GroupAnswer:
    """Correct the counts of entered and completed collectives by the entries."""
    if entries and is_by_hook(entries[-1]):
        return _by_hook(row, entries)
    numbers = {
        int(one.get("collective_seq_id") or 0): bool(one.get("retired"))
        for one in entries
        if not one.get("is_p2p")
    }
    entered = max(row.entered, *numbers) if numbers else row.entered
    open_ones = [number for number, retired in numbers.items() if not retired]
    # no entry left: thousands of calls have followed, so none of these is open
    done = min(open_ones) - 1 if open_ones else max(numbers, default=entered)
    return replace(row, entered=entered, done=min(max(row.done, done), entered))


def _by_hook(row: GroupAnswer, entries: Sequence[Row]) -> GroupAnswer:
    """Like `_completed`, for entries of a hook, whose counters count calls, not collectives. A call
    that raised stays open forever. The backend completes the calls of a group in order, so a
    completed call implies all earlier ones."""
    entered = max(int(one.get("collective_seq_id") or 0) for one in entries)
    numbers = [one for one in entries if not one.get("is_p2p")]
    retired = [int(one["collective_seq_id"]) for one in numbers if one.get("retired")]
    oldest = min((int(one["collective_seq_id"]) for one in numbers), default=entered + 1)
    return replace(row, entered=entered, done=max(retired, default=oldest - 1))


def _open(row: GroupAnswer, entries: Sequence[Row]) -> Row | None:
    """The entry of the oldest incomplete collective; else of the oldest point-to-point call."""
    if row.entered <= row.done:
        return None
    left = [one for one in entries if not one.get("retired")]
    pairs = [one for one in left if one.get("is_p2p")]
    next_one = (one for one in left if one.get("collective_seq_id") == row.done + 1)
    return next(next_one, pairs[0] if pairs else None)


def _placed(row: GroupAnswer, name: str, title: str, members: str, call: Row | None) -> GroupAnswer:
    if title == "undefined":
        title = ""
    text, age, limit = "", 0.0, 0.0
    if call is not None:
        text = signature(call)
        age = max(0.0, (time.time_ns() - int(call.get("time_created_ns") or 0)) / 1e9)
        limit = float(call.get("timeout_ms") or 0) / 1e3
    where = (row.key, row.entered, row.started, row.done)
    return GroupAnswer(*where, name[:100], title[:100], members, text, age, limit)


def signature(call: Row) -> str:
    """The properties that must be equal on all ranks of a collective: "all_reduce [1000]
    float32"."""
    what = str(call.get("profiling_name") or "").partition(":")[2]
    sizes = [json.dumps(size) for size in (call.get("input_sizes") or ())]
    more = [f"and {len(sizes) - MAX_SIZES} more"] if len(sizes) > MAX_SIZES else []
    types = call.get("input_dtypes") or ()
    names = sorted({TYPES.get(str(one), str(one).lower()) for one in types})
    return " ".join([what, *sizes[:MAX_SIZES], *more, *names[:MAX_SIZES]])[:200]


def _limited(found: list[GroupAnswer]) -> tuple[GroupAnswer, ...]:
    """Limit the number of groups; those with an open collective have priority."""
    if len(found) > MAX_ANSWER_GROUPS:
        found.sort(key=lambda row: row.entered <= row.done)
    return tuple(found[:MAX_ANSWER_GROUPS])
