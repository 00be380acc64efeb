"""What may stay in the segments when a new life of the ranks begins, and while it lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from elasticrun.agent.held import Held
from elasticrun.agent.inventory import Inventory
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


def needless(
    held: Iterable[Held], current: Mapping[int, Held], inventory: Inventory, watermark: int
) -> list[Held]:
    """Segments of local ranks that nobody needs any more: of a layout that a rank has no more, or
    of a local rank that is no more. `current`: those that were given in this life."""
    found: list[Held] = []
    for one in held:
        now = current.get(one.local_rank)
        if now is None and not inventory.is_beyond(one.local_rank):
            continue  # its rank has yet to ask for one
        if now is one or one.pinned():
            continue
        heirs = current.values() if now is None else [now]
        if not one.snapshots() or any(inventory.has_whole(heir, watermark) for heir in heirs):
            found.append(one)
    return found


def _newer(snapshot: Snapshot, restore: Restore) -> bool:
    """Whether it is of a later time than what is gone back to, or of one that never was."""
    name = restore.round
    if (snapshot.term, snapshot.number) == (name.term, name.number):
        return not snapshot.is_of(name) or snapshot.step > restore.step
    return (snapshot.term, snapshot.number) > (name.term, name.number)
