"""What agents and the job master say to each other about snapshots and checkpoints.

A snapshot is named (round, step). All of these are level-triggered: `Holdings` always lists all
that a node holds, and an order that comes again changes nothing.
"""

from __future__ import annotations

from msgspec import Struct

from elasticrun.wire.ids import Endpoint, RoundName

MAX_HOLDINGS = 8
"""Snapshots that one node reports; the newest ones."""

MAX_CONTENTS = 4096
"""Local ranks listed in one report, over all its holdings; older holdings are left out before."""

MAX_MARGIN = 1_000_000
"""Steps that a departing node may ask for, so that word comes to every rank."""

MAX_ATTEMPT = 64
"""Characters of an attempt's name."""


class SaveSpec(Struct, frozen=True):
    """What the job does with its snapshots; part of the JobSpec."""

    at_breakpoint: bool = False  # --save-at-breakpoint: what ranks lost is written out too
    limit: float = 120.0  # seconds that one attempt to write a checkpoint may take
    restore_step: int = -1  # --restore-step: what a person wants to go on from; -1: the newest


class Holding(Struct, frozen=True):
    """One snapshot of one node: all of its local ranks of that round have committed it, or those of
    them whose content is not 0. `replica`: of another node's ranks, copied from there."""

    round: RoundName
    step: int
    first_rank: int
    world_size: int
    contents: tuple[int, ...]  # of local ranks first_rank..: Layout.content, 0: not held
    wanted: bool  # the ranks have asked for it to be written out
    replica: bool = False
    own: bool = False  # its ranks have state that no other rank has (per_rank)


class Restore(Struct, frozen=True):
    """What the ranks of a round go on from; part of Start."""

    round: RoundName
    step: int
    world_size: int  # of that round


class LastRound(Struct, frozen=True):
    """The newest round whose ranks lived on a node, as an agent before this one may have noted it;
    told to a master that may know of no round."""

    round: RoundName
    world_size: int
    restore: Restore | None = None  # as in Start
    rewound_from: int = -1  # as in Start, until a checkpoint that was committed since says it


class WentOn(Struct, frozen=True):
    """A rank of this round has put back here what its Start named, and done steps since, up to
    `step`. Told once no rank of the round lives here any more."""

    round: RoundName
    step: int


class Holdings(Struct, frozen=True):
    """Report: every whole snapshot that this node holds, in place of what it said before. `saver`:
    where other nodes fetch from it; None: it has none yet. `replicas`: its ranks want every part of
    the state in the memory of two nodes. `last`: None if no rank ever lived here. `went_on`: None
    if no rank of the newest round has trained on here from what it put back. `skipped`: snapshots
    of that round for which a rank of this node had no free slot, of the rank with the most."""

    saver: Endpoint | None
    held: tuple[Holding, ...]
    replicas: bool = False
    last: LastRound | None = None
    went_on: WentOn | None = None
    skipped: int = 0


class ShardBad(Struct, frozen=True):
    """Report: what this node holds of a rank of (round, step) is not what was written, or cannot be
    had from the node that was named; it is to count as absent."""

    round: RoundName
    step: int
    rank: int
    reason: str


class NotReplicated(Struct, frozen=True):
    """Report: this node could not copy all that a Replicate named."""

    round: RoundName
    step: int
    reason: str


class WhereIs(Struct, frozen=True):
    """Report: this node needs the shard of a rank that it does not hold. Answer: Holder."""

    round: RoundName
    step: int
    rank: int


class Departing(Struct, frozen=True):
    """Report: this node has received a death signal and leaves, as soon as a step that all ranks
    save is written out, or its grace is over. Answer: SaveAt to all nodes of the round."""

    round: RoundName
    reason: str
    signal: int
    step: int  # the newest that a rank here is at
    margin: int  # steps from there in which word comes to every rank
    asked: int = -1  # the step that this node has been asked to save; -1: none yet


class SaveAt(Struct, frozen=True):
    """Order: every rank of the round takes a snapshot at its first step from this one on, and wants
    it written out; `reason` says in a clause who leaves. Report back, if a rank cannot: Missed."""

    round: RoundName
    step: int
    reason: str


class Missed(Struct, frozen=True):
    """Report: a rank of this node was past the step that SaveAt named, or had no room for it."""

    round: RoundName
    asked: int
    step: int  # that it is at


class Holder(Struct, frozen=True):
    """Order: who has it. `holds` is the rank asked for, or one of the same content; `saver` None:
    nobody, and `reason` says why."""

    round: RoundName
    step: int
    rank: int
    holds: int
    saver: Endpoint | None
    reason: str


class Watermark(Struct, frozen=True):
    """Order: this step of the present round is whole over the whole job, so that older ones are
    needed no more; -1: none is yet. Steps above it up to `given_up` will never be whole, because
    some nodes have them and others went on without; -1: none."""

    round: RoundName
    step: int
    given_up: int = -1


class Replicate(Struct, frozen=True):
    """Order: copy what these ranks have of (round, step) from another node's saver, and hold it as
    replicas. What is held already is not copied again; of several orders the newest step counts.
    Report back: Holdings, or NotReplicated."""

    round: RoundName
    step: int
    world_size: int
    ranks: tuple[int, ...]
    contents: tuple[int, ...]  # of these ranks
    saver: Endpoint


class Persist(Struct, frozen=True):
    """Order: write this node's share of the checkpoint of (round, step). The snapshot is pinned
    until PersistOver. Report back: Persisted."""

    attempt: str
    round: RoundName
    step: int
    world_size: int
    ranks: tuple[int, ...]  # of that round, held here, that write a part
    shared: tuple[int, ...]  # those of them that write their shared items too
    writers: int  # parts of all nodes, one a rank
    coordinates: bool
    coordinator: Endpoint | None  # its saver, where this node does not coordinate
    reason: str  # periodic, breakpoint, asked
    limit: float  # seconds until the attempt is given up
    rewound_from: int = -1  # training was taken back from this step since the newest checkpoint


class CommitCheckpoint(Struct, frozen=True):
    """Order to the coordinator: every part is written; write the marker. Report back: Persisted
    with `committed`."""

    attempt: str


class PersistOver(Struct, frozen=True):
    """Order: the attempt was committed or given up, or (`attempt` "") there will be none for a
    snapshot that the ranks wanted written; it is no longer pinned for that."""

    attempt: str
    round: RoundName
    step: int
    ok: bool
    reason: str


class Persisted(Struct, frozen=True):
    """Report: what came of this node's share, or, with `committed`, of the commit."""

    attempt: str
    ok: bool
    committed: bool
    reason: str
    nbytes: int
    seconds: float


SaveReport = Holdings | WhereIs | ShardBad | NotReplicated | Persisted | Departing | Missed
"""Those of an agent."""

SaveOrder = Watermark | Persist | CommitCheckpoint | PersistOver | Holder | Replicate | SaveAt
"""Those of the master."""
