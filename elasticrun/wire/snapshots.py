"""What ranks, savers and their agent say to each other about snapshots.

They travel as frames (`wire.frames`) over one AF_UNIX stream socket of the agent, an abstract one
whose name has 128 random bits; the agent looks at its peer's user besides (SO_PEERCRED). A rank is
told the name with its local rank (`env.SNAPSHOTS`), a saver in its order. The first message says
who comes. Descriptors travel beside the messages that say so (SCM_RIGHTS), one each.

State itself never travels here: it lies in segments (`shm.segment`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from elasticrun.wire.types import NOTHING, RoundName, Skip

NO_ROUND: Final = RoundName(0, 0, "")
"""In the place of a round where there is none."""


@dataclass(frozen=True, slots=True)
class Resume:
    """What the ranks of this life go on from: the snapshot (`round`, `step`), which the master has
    chosen for all; step -1: there is none in memory. `present` names the life's own round."""

    present: RoundName
    round: RoundName
    step: int
    world_size: int  # of that round
    same: bool  # whether this rank's own snapshot of that round lies on this node
    skip: Skip = NOTHING
    put_off: tuple[int, ...] = ()  # signals that the rank is to put off until its state is saved


@dataclass(frozen=True, slots=True)
class RankRefused:
    """The answer to RankHere where this rank's Checkpointer contradicts that of another rank of
    this node. The rank ends with `reason`, a sentence."""

    reason: str


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


ToRank = Resume | RankRefused | SegmentHere | RoomThere | ShardHere | Whole


# ---------------------------------------------------------------- a rank to its agent


@dataclass(frozen=True, slots=True)
class RankHere:
    """First message of a rank that has a Checkpointer. Answer: Resume, or RankRefused."""

    version: int  # segment.VERSION
    local_rank: int
    rank: int
    world_size: int
    folder: str  # where its checkpoints lie: an absolute path or a URL
    keep_last: int  # checkpoints that are kept, 0: all
    keep_every: int  # steps; such checkpoints are kept for good, 0: none
    replicas: int = 0  # other nodes in whose memory its state is to be, too: 0 or 1


@dataclass(frozen=True, slots=True)
class NeedSegment:
    """Give me a segment for this layout. Answer: SegmentHere, with a descriptor if `ok`. One that
    this local rank has had for the same layout, in an earlier life too, is given again: its pages
    are warm. The newest snapshot of another layout stays until the new segment has a whole one."""

    layout: int  # Layout.key
    content: int  # Layout.content
    layout_length: int
    slot_bytes: int
    slots: int
    own: bool = False  # it has state that no other rank has
    least: int = 0  # slots that will do where there is no room for more; 0: no fewer


@dataclass(frozen=True, slots=True)
class Committed:
    """A snapshot stands. `persist`: it is to be written out, and its slot is pinned. No answer."""

    step: int
    slot: int
    sequence: int
    persist: bool


@dataclass(frozen=True, slots=True)
class AwaitRoom:
    """No slot is free: say when one is, or when step `whole` is whole. Answer: RoomThere, unless
    this life ends before. A rank that has waited long enough does not look at the answer."""

    whole: int  # a step, or segment.NONE for a free slot


@dataclass(frozen=True, slots=True)
class WantShard:
    """For the restore that Resume offered: the snapshot of this rank of that round, or of one with
    the same content. Answer: ShardHere, with a descriptor if `ok`. It may be this local rank's own
    segment, another's of this node, or a copy that was fetched from another node."""

    rank: int


@dataclass(frozen=True, slots=True)
class IsWhole:
    """Has this shard been compared with its hashes? Answer: Whole, once that is known."""

    rank: int


@dataclass(frozen=True, slots=True)
class Restored:
    """What came of the restore: the step that training goes on from, and where from. No answer."""

    step: int
    source: str  # memory, storage, nothing
    looked: bool = True  # what is in the folder was looked at: the script has called restore()


@dataclass(frozen=True, slots=True)
class CannotRestore:
    """The snapshot that Resume offered cannot be used: it is to count as absent, and another is to
    be found. No answer but the end of this rank's life."""

    rank: int  # whose shard
    reason: str


@dataclass(frozen=True, slots=True)
class PutsOff:
    """These signals do not end this rank at once any more, but when it has saved its state. No
    answer."""

    signals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepMissed:
    """The rank was past the step that its segment's `save_at` named, or could not save it. No
    answer."""

    on_wire: ClassVar = "Missed"
    asked: int
    step: int  # that it is at


@dataclass(frozen=True, slots=True)
class Skipped:
    """So many snapshots were due in this life and not taken, since no slot was free. No answer."""

    count: int


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """This rank could not take the snapshot of a step, and never will. `persist`: it was to be
    written out. No answer."""

    step: int
    persist: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Remark:
    """One sentence for the operator. No answer."""

    text: str


RankAsks = RankHere | NeedSegment | AwaitRoom | WantShard | IsWhole
"""These are answered."""

RankTells = (
    Committed | SaveFailed | Restored | CannotRestore | PutsOff | StepMissed | Skipped | Remark
)
FromRank = RankAsks | RankTells

# ---------------------------------------------------------------- an agent to its saver


@dataclass(frozen=True, slots=True)
class SegmentOpen:
    """A segment to work with, under a key of the agent's; its descriptor comes with it. `write`:
    the saver may write into it (a copy that is to be fetched)."""

    key: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class SegmentClosed:
    """It is not needed any more."""

    key: int


@dataclass(frozen=True, slots=True)
class HashSnapshot:
    """Hash this snapshot when there is nothing more important to do, and keep the hashes in its
    slot; of several for one segment only the newest counts. No answer."""

    key: int
    slot: int
    sequence: int


@dataclass(frozen=True, slots=True)
class CheckSnapshot:
    """Compare this snapshot with its hashes. Answer: Checked."""

    key: int
    slot: int
    sequence: int


@dataclass(frozen=True, slots=True)
class PartOf:
    """One rank's share in a checkpoint."""

    key: int  # of its segment
    slot: int
    sequence: int
    rank: int
    shared: bool  # whether its shared items are written, or its own alone


@dataclass(frozen=True, slots=True)
class PersistParts:
    """Write these shares of the checkpoint of (`round`, `step`). Answer: PartsDone, once they are
    on stable storage and, unless this node coordinates, the coordinator has what it needs of them.

    The coordinator's saver takes in the other nodes' parts by its own port until CommitNow."""

    attempt: str
    round: RoundName
    step: int
    folder: str
    world_size: int
    parts: tuple[PartOf, ...]
    coordinates: bool
    coordinator_host: str  # where its saver listens; "" where this one coordinates
    coordinator_port: int
    reason: str  # periodic, breakpoint, asked
    keep_last: int
    keep_every: int
    rewound_from: int = -1  # as in messages.Persist
    in_use: tuple[int, ...] = ()  # checkpoints that ranks may be reading
    base: int = -1  # the step that the ranks of `round` went on from; -1: not known


@dataclass(frozen=True, slots=True)
class CommitNow:
    """To the coordinator: every part is written. Write the manifest and then the marker, and remove
    what is not to be kept. Answer: CommitDone."""

    attempt: str
    writers: int  # how many ranks have written a part


@dataclass(frozen=True, slots=True)
class GiveUp:
    """This attempt is over: remove what it has written, if it was not committed. No answer."""

    attempt: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the snapshot of (`round`, `step`, `rank`) from another node's saver. Answer: FetchSize
    with its segment's sizes, then, after FetchInto has brought the memory, Fetched. `replica`: it
    is to be kept, and no rank waits for it."""

    key: int  # the agent's, for the memory that is to come
    round: RoundName
    step: int
    rank: int
    host: str
    port: int
    replica: bool = False


@dataclass(frozen=True, slots=True)
class FetchInto:
    """The memory for a Fetch, a descriptor beside it. `layout`: the only one that a snapshot may
    have there (Layout.key), 0: any."""

    key: int
    slot: int = 0
    layout: int = 0


@dataclass(frozen=True, slots=True)
class Serve:
    """Serve this snapshot of a segment to other nodes that ask for (`round`, `step`, `rank`)."""

    key: int
    slot: int
    sequence: int
    round: RoundName
    step: int
    rank: int


AboutSegments = SegmentOpen | SegmentClosed | HashSnapshot | CheckSnapshot | Serve


@dataclass(frozen=True, slots=True)
class PingSaver:
    """Is its loop running? Answer: SaverPong with the same number."""

    number: int


ToSaver = AboutSegments | PersistParts | CommitNow | GiveUp | Fetch | FetchInto | PingSaver

# ---------------------------------------------------------------- a saver to its agent


@dataclass(frozen=True, slots=True)
class SaverHere:
    """First message of a saver; `port`: where it serves other nodes, 0: nowhere."""

    version: int  # segment.VERSION
    key: int  # of the spawner's order
    port: int


@dataclass(frozen=True, slots=True)
class Checked:
    """Also `ok` where there were no hashes to compare with; `reason` says so."""

    key: int
    slot: int
    sequence: int
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PartsDone:
    """What came of PersistParts: bytes that were written, and how long it took."""

    attempt: str
    ok: bool
    reason: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CommitDone:
    """What came of CommitNow."""

    attempt: str
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class FetchSize:
    """What a Fetch will need; `ok` is false where the other node has no such snapshot."""

    key: int
    ok: bool
    reason: str
    layout_length: int
    slot_bytes: int
    layout: int = 0  # Layout.key


@dataclass(frozen=True, slots=True)
class Fetched:
    """The copy stands in the slot that FetchInto named, and was found whole."""

    key: int
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SaverPong:
    """The answer to a PingSaver."""

    number: int


FromSaver = SaverHere | Checked | PartsDone | CommitDone | FetchSize | Fetched | Remark | SaverPong

FromPeer = FromRank | FromSaver
"""What may come in at the agent's socket."""

ToPeer = ToRank | ToSaver
"""What the agent may answer."""
