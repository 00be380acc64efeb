"""What may stay in the segments when a new life of the ranks begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elasticrun.agent.held import Held
from elasticrun.wire.messages import Restore
from elasticrun.wire.segment import NONE, Snapshot, round_key

CHOSEN = "restore"
"""What a slot is pinned for that the present life goes on from."""


def sift(
    held: Iterable[Held],
    restore: Restore | None,
    going_on: set[str],
    wanted: Callable[[Snapshot], set[str]],
) -> None:
    """While no rank lives: withdraw what is newer than what the new life goes on from, pin that,
    and set the words of the control pages. Pins that stay: `going_on`, and those that `wanted`
    gives for a snapshot."""
    for one in held:
        segment = one.segment
        for snapshot in one.snapshots():
            if restore is None or _newer(snapshot, restore):
                segment.withdraw(snapshot.slot)
        left = {snapshot.slot: snapshot for snapshot in one.snapshots()}
        for slot in range(segment.slots):
            reasons = one.pins.get(slot, set()) & going_on
            if slot in left:
                reasons |= wanted(left[slot])
            one.pins[slot] = reasons
            segment.pin(slot, bool(reasons))
        segment.watermark = NONE if restore is None else restore.step
        segment.save_at = segment.current = NONE
        chosen = None if restore is None else one.find(round_key(restore.round), restore.step)
        if chosen is not None:
            one.pin(chosen.slot, CHOSEN)


def _newer(snapshot: Snapshot, restore: Restore) -> bool:
    """Whether it is of a later time than what is gone back to, or of one that never was."""
    name = restore.round
    if (snapshot.term, snapshot.number) == (name.term, name.number):
        return not snapshot.is_of(name) or snapshot.step > restore.step
    return (snapshot.term, snapshot.number) > (name.term, name.number)
