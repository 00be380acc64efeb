"""What an agent says to its ranks about snapshots: a part of `wire.snapshots`, imported by it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Named:
    """A round's whole name, as in ids.RoundName; number 0 is no round."""

    term: int = 0
    number: int = 0
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Resume:
    """What the ranks of this life go on from: the snapshot (`round`, `step`), which the master has
    chosen for all; step -1: there is none in memory. `present` names the life's own round."""

    present: Named
    round: Named
    step: int
    world_size: int  # of that round
    same: bool  # whether this rank's own snapshot of that round lies on this node
    rewound_from: int = -1  # checkpoints of this step and later ones come last; -1: none does
    put_off: tuple[int, ...] = ()  # signals that the rank is to put off until its state is saved
    suspect: bool = False  # what is in memory comes last too
    restore_step: int = -1  # this step and no other, from memory or storage; -1: whatever is newest


@dataclass(frozen=True, slots=True)
class SegmentHere:
    """A descriptor comes with it if `ok`; else `reason` says in a sentence why there is none."""

    ok: bool
    reason: str
    fresh: bool  # no snapshot of an earlier life is in it, and its layout has yet to be written


@dataclass(frozen=True, slots=True)
class RoomThere:
    """What AwaitRoom asked for has come."""


@dataclass(frozen=True, slots=True)
class ShardHere:
    """A descriptor of a whole segment comes with it if `ok`; the snapshot lies in `slot`."""

    ok: bool
    reason: str
    rank: int  # whose it is: the one asked for, or one of the same content
    slot: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Whole:
    """`ok` also where there were no hashes to compare with."""

    rank: int
    ok: bool
    reason: str


ToRank = Resume | SegmentHere | RoomThere | ShardHere | Whole
