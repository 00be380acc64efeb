"""The messages between ranks, savers and their agent: snapshots, recoverable functions, and work
that is handed out.

They are frames (`wire.frames`) over one AF_UNIX stream socket of the agent, an abstract one whose
name has 128 random bits; the agent also checks the user of its peer (SO_PEERCRED). A rank gets the
name with its local rank (`env.SNAPSHOTS`), a saver in its order. The first message identifies the
sender. Some messages come with one descriptor (SCM_RIGHTS).

State itself is never sent here: it is in segments (`snapshots.shm.segment`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from elasticrun.wire.types import NO_SKIP, RoundName, Skip

NO_ROUND: Final = RoundName(0, 0, "")
"""A placeholder for no round."""


@dataclass(frozen=True, slots=True)
class Resume:
    """What the ranks restore: the snapshot (`round`, `step`) that the master has chosen for all;
    step -1: there is none in memory. `present` is the current round."""

    present: RoundName
    round: RoundName
    step: int
    world_size: int  # of that round
    same: bool  # whether this rank's own snapshot of that round is on this node
    skip: Skip = NO_SKIP
    put_off: tuple[int, ...] = ()  # signals to defer until the rank's state is saved


@dataclass(frozen=True, slots=True)
class RankRefused:
    """The answer to RankHere if this rank's Checkpointer contradicts that of another rank of this
    node, or to RankWork if it can get no work. The rank ends with `reason`, a sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class SegmentHere:
    """The answer to NeedSegment; comes with a descriptor if `ok`. Otherwise `reason` says why not,
    in a sentence."""

    ok: bool
    reason: str
    fresh: bool  # it has no snapshot from before a restart, and its layout must be written


@dataclass(frozen=True, slots=True)
class RoomThere:
    """The answer to AwaitRoom: a slot is free, or the step is complete."""


@dataclass(frozen=True, slots=True)
class ShardHere:
    """The answer to WantShard; comes with a descriptor of a whole segment if `ok`. The snapshot is
    in `slot`."""

    ok: bool
    reason: str
    rank: int  # the requested rank, or one with the same content
    slot: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Whole:
    """The answer to IsWhole. `ok` also if there are no hashes to compare with."""

    rank: int
    ok: bool
    reason: str


ToRank = Resume | RankRefused | SegmentHere | RoomThere | ShardHere | Whole


# ---------------------------------------------------------------- a rank to its agent


@dataclass(frozen=True, slots=True)
class RankHere:
    """First message of a rank with a Checkpointer. Answer: Resume, or RankRefused."""

    version: int  # segment.VERSION
    local_rank: int
    rank: int
    world_size: int
    folder: str  # of its checkpoints: an absolute path or a URL
    keep_last: int  # number of checkpoints to keep, 0: all
    keep_every: int  # keep checkpoints at multiples of this forever, 0: none
    replicas: int = 0  # number of other nodes that hold its state in memory: 0 or 1


@dataclass(frozen=True, slots=True)
class NeedSegment:
    """Request a segment for this layout. Answer: SegmentHere, with a descriptor if `ok`. A segment
    that this local rank has had for the same layout, even before a restart, is reused, because its
    pages are allocated. The newest snapshot of another layout remains until the new segment has a
    complete one."""

    layout: int  # Layout.key
    content: int  # Layout.content
    layout_length: int
    slot_bytes: int
    slots: int
    own: bool = False  # the rank has state that no other rank has
    least: int = 0  # slots that suffice if there is no memory for more; 0: all
    device: str = ""  # where its tensors are; "": in the memory of the host


@dataclass(frozen=True, slots=True)
class Committed:
    """A snapshot is complete. `persist`: it will be written to storage, and its slot is pinned. No
    answer."""

    step: int
    slot: int
    sequence: int
    persist: bool


@dataclass(frozen=True, slots=True)
class AwaitSegment:
    """The rank waits for the segment that it has requested: allocate it at full speed. No
    answer."""


@dataclass(frozen=True, slots=True)
class AwaitRoom:
    """No slot is free: request a notification when one is, or when step `whole` is complete.
    Answer: RoomThere, unless the ranks are restarted first. A rank that has stopped waiting ignores
    the answer."""

    whole: int  # a step, or segment.NONE for a free slot


@dataclass(frozen=True, slots=True)
class WantShard:
    """Request the snapshot that Resume offers, of this rank of that round or of one with the same
    content. Answer: ShardHere, with a descriptor if `ok`: of this local rank's own segment, of
    another's on this node, or of a copy fetched from another node."""

    rank: int


@dataclass(frozen=True, slots=True)
class IsWhole:
    """Ask whether the shard of this rank matches its hashes. Answer: Whole, once that is known."""

    rank: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of the restore: the step from which training continues, and its source. No
    answer."""

    step: int
    source: str  # memory, storage, nothing
    looked: bool = True  # the folder was examined: the script has called restore()
    used: str = ""  # as in messages.WorkBase, from rank 0


@dataclass(frozen=True, slots=True)
class CannotRestore:
    """The offered snapshot is unusable: it counts as absent, and another one must be found. No
    answer: the agent stops the rank."""

    rank: int  # of the shard
    reason: str


@dataclass(frozen=True, slots=True)
class PutsOff:
    """The rank defers these signals until it has saved its state. No answer."""

    signals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepMissed:
    """The rank had passed the step in its segment's `save_at`, or could not save it. No answer."""

    on_wire: ClassVar = "Missed"
    asked: int
    step: int  # its current step


@dataclass(frozen=True, slots=True)
class Skipped:
    """The number of snapshots that were due since the rank started and were skipped, because no
    slot was free. No answer."""

    count: int


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """This rank could not take the snapshot of a step, and never will. `persist`: it was to be
    written to storage. No answer."""

    step: int
    persist: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Remark:
    """One sentence for the operator. No answer."""

    text: str


RankRequest = RankHere | NeedSegment | AwaitRoom | WantShard | IsWhole
"""Messages of a rank that are answered."""

RankNotice = (
    AwaitSegment
    | Committed
    | SaveFailed
    | Restored
    | CannotRestore
    | PutsOff
    | StepMissed
    | Skipped
    | Remark
)
FromRank = RankRequest | RankNotice

# ---------------------------------------------------------------- an agent to its saver


@dataclass(frozen=True, slots=True)
class SegmentOpen:
    """The saver may use this segment under this key, which the agent has chosen. Comes with its
    descriptor."""

    key: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class SegmentClosed:
    """The segment is not needed any more."""

    key: int


@dataclass(frozen=True, slots=True)
class HashSnapshot:
    """Hash this snapshot with low priority, and store the hashes in its slot. Of several orders for
    one segment only the newest counts. No answer."""

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
class DigestSnapshot:
    """Hash the tensors of this snapshot that its replicas have in common, with low priority; the
    other fields are as in messages.CompareReplicas. Answer: Digested."""

    key: int
    slot: int
    sequence: int
    number: int
    first: int
    last: int
    left_out: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartOf:
    """One rank's share of a checkpoint."""

    key: int  # of its segment
    slot: int
    sequence: int
    rank: int
    shared: bool  # whether shared items are written, or only own ones


@dataclass(frozen=True, slots=True)
class PersistParts:
    """Write these shares of the checkpoint of (`round`, `step`). Answer: PartsDone, once they are
    on stable storage and, unless this node coordinates, the coordinator has the information about
    them.

    The coordinator's saver accepts the other nodes' parts on its own port until CommitNow."""

    attempt: str
    round: RoundName
    step: int
    folder: str
    world_size: int
    parts: tuple[PartOf, ...]
    coordinates: bool
    coordinator_host: str  # where its saver listens; "" if this one coordinates
    coordinator_port: int
    reason: str  # periodic, breakpoint, asked
    keep_last: int
    keep_every: int
    rewound_from: int = -1  # as in messages.Persist
    in_use: tuple[int, ...] = ()  # checkpoints that ranks may be reading
    base: int = -1  # the step that the ranks of `round` restored; -1: unknown
    used: str = ""  # as in messages.Persist


@dataclass(frozen=True, slots=True)
class CommitNow:
    """To the coordinator: every part is written. Write the manifest and then the marker, and remove
    checkpoints that are not kept. Answer: CommitDone."""

    attempt: str
    writers: int  # number of ranks that have written a part


@dataclass(frozen=True, slots=True)
class GiveUp:
    """This attempt is over: remove its files, unless it was committed. No answer."""

    attempt: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the snapshot of (`round`, `step`, `rank`) from another node's saver. Answer: FetchSize
    with the sizes of its segment, then, after FetchInto has provided the memory, Fetched.
    `replica`: it will be kept, and no rank waits for it."""

    key: int  # the agent's, for the memory that follows
    round: RoundName
    step: int
    rank: int
    host: str
    port: int
    replica: bool = False


@dataclass(frozen=True, slots=True)
class FetchInto:
    """The memory for a Fetch, with a descriptor. `layout`: the only allowed layout of the snapshot
    (Layout.key), 0: any."""

    key: int
    slot: int = 0
    layout: int = 0


@dataclass(frozen=True, slots=True)
class Serve:
    """Serve this snapshot of a segment to other nodes that request (`round`, `step`, `rank`)."""

    key: int
    slot: int
    sequence: int
    round: RoundName
    step: int
    rank: int


AboutSegments = SegmentOpen | SegmentClosed | HashSnapshot | CheckSnapshot | DigestSnapshot | Serve


@dataclass(frozen=True, slots=True)
class PingSaver:
    """Check that the loop runs. Answer: SaverPong with the same number."""

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
    """The answer to CheckSnapshot. `ok` also if there are no hashes to compare with; `reason` says
    so."""

    key: int
    slot: int
    sequence: int
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Digested:
    """The answer to DigestSnapshot, as messages.RankDigests. `reason`: why there are none, or "".
    `seconds`: CPU time."""

    key: int
    number: int
    reason: str
    count: int
    digests: tuple[int, ...]
    names: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class PartsDone:
    """The result of PersistParts: bytes written, and the duration."""

    attempt: str
    ok: bool
    reason: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CommitDone:
    """The result of CommitNow."""

    attempt: str
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class FetchSize:
    """What a Fetch needs; not `ok` if the other node does not have the snapshot."""

    key: int
    ok: bool
    reason: str
    layout_length: int
    slot_bytes: int
    layout: int = 0  # Layout.key


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a Fetch. If `ok`, the copy is in the slot that FetchInto named, and
    verified."""

    key: int
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SaverPong:
    """The answer to a PingSaver."""

    number: int


FromSaver = (
    SaverHere
    | Checked
    | Digested
    | PartsDone
    | CommitDone
    | FetchSize
    | Fetched
    | Remark
    | SaverPong
)

# ---------------------------------------------------------------- recoverable functions
#
# Each has a connection of its own. LeaveRound is answered by Left; EnterRound begins the next round
# in the same process. A rank whose function raises before that sends Raised, and gets LeaveRound or
# Reraise.


@dataclass(frozen=True, slots=True)
class RecoverableHere:
    """The first message: this local rank runs a recoverable function."""

    local_rank: int


@dataclass(frozen=True, slots=True)
class Returned:
    """The function has returned, or failed: the rank can no longer be recalled."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception has left the function. `time_us`: microseconds since the epoch."""

    message: str  # one line, as in an error file
    traceback: str
    time_us: int


@dataclass(frozen=True, slots=True)
class Left:
    """The rank has destroyed its process groups, and waits for EnterRound."""


FromRecoverable = RecoverableHere | Returned | Raised | Left


@dataclass(frozen=True, slots=True)
class LeaveRound:
    """Leave the round."""


@dataclass(frozen=True, slots=True)
class Reraise:
    """Fail with the exception that was raised."""


@dataclass(frozen=True, slots=True)
class EnterRound:
    """Call the function again, as a rank of the next round. `environ`: the variables that a new
    process would get; `stdout` and `stderr`: the files to write to, "" for the present one;
    `restores`: whether the ranks restore a step that is in memory."""

    environ: dict[str, str]
    stdout: str
    stderr: str
    restores: bool


ToRecoverable = LeaveRound | Reraise | EnterRound

# ---------------------------------------------------------------- work that is handed out
#
# A rank that takes work has one more connection. What it sends replaces what it sent before; the
# agent keeps the newest, and passes it on to the master (`messages.WorkState`).


@dataclass(frozen=True, slots=True)
class WorkHere:
    """The first message: this local rank takes work."""

    local_rank: int
    rank: int


@dataclass(frozen=True, slots=True)
class RankShare:
    """As messages.DatasetShare."""

    name: str
    total: int
    size: int
    epochs: int
    shuffle: int
    dropped: int
    leases: tuple[int, ...]
    used: int
    marks: tuple[int, ...]
    wants: bool


@dataclass(frozen=True, slots=True)
class RankWork:
    """As messages.WorkState. Answer, for each dataset of which it wants more: RankLeases, once the
    master has granted them, or RankRefused."""

    restored: bool
    since: int
    marked: tuple[int, ...]
    shares: tuple[RankShare, ...]
    record: int


FromWorker = WorkHere | RankWork


@dataclass(frozen=True, slots=True)
class RankLeases:
    """As messages.WorkGrant."""

    dataset: str
    first: int
    leases: tuple[int, ...]
    dropped: int
    over: bool
    record: int


ToWorker = RankLeases | RankRefused


FromPeer = FromRank | FromSaver | FromRecoverable | FromWorker
"""What the agent's socket may receive."""

ToPeer = ToRank | ToSaver | ToRecoverable | ToWorker
"""What the agent may send on it."""
