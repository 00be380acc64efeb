"""The messages between an agent and the job master, one frozen struct each, with their bounds.

An agent sends Reports and the master sends Orders, on one `Attend` stream per agent; a reader of
the status sends what an agent sends first, and is sent a page. Orders are level-triggered: they
describe what the node should be doing now, so a repeated order is harmless, and a report that lists
something (`Holdings`) takes the place of the one before. All durations are seconds as floats and
relative; no message carries a clock reading that the receiver would compare with its own clock
(`Failure.time_us` is shown to people only). A snapshot is named (round, step).

What a field may hold, its annotation says (`wire/types.py`); what fields may hold together,
`agree` of their message. `wire/rpc/protobuf.py` checks both in both directions.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Struct, field

from elasticrun.wire.types import (
    INT32,
    INT64,
    MAX_ATTEMPT,
    MAX_LOCAL_RANKS,
    NOTHING,
    Amount,
    AtMost,
    Attempt,
    Between,
    Count,
    Endpoint,
    Exactly,
    Limit,
    Name,
    NameOrEmpty,
    OneLine,
    OneOf,
    Pid,
    Ratio,
    RoundName,
    Skip,
    StepOrNone,
    WholeText,
    WireError,
    tail,
)

PROTOCOL_VERSION: Final = 9
"""Raised with every change of the wire that an older peer cannot read."""

MAX_MESSAGE_BYTES: Final = 64 * 1024
"""No message on `Attend` is longer: beats would wait behind it, in the stream and while it is
decoded. A longer one is refused, not truncated."""

MAX_STATUS_BYTES: Final = 64 * 1024 * 1024
"""Room for a status reply of MAX_NODES nodes; it does not travel on `Attend`."""

MAX_NODES: Final = 100_000
"""A claim above this is a typing error."""

MAX_RANKS: Final = 10_000_000
"""Largest world size that is believed."""

MAX_CODE: Final = 2048
"""Bytes of the fields of a reason; of a longer one only the text is sent."""

MAX_FAILURES: Final = 16
"""Most failures listed in one message; the first ones by time are kept."""

MAX_TRANSFERS: Final = 16
"""Most message sizes that one probe measures."""

MAX_EXCLUDED: Final = 1000
"""Most excluded nodes that are remembered; the oldest are forgotten first."""

MAX_HOLDINGS: Final = 8
"""Snapshots that one node reports; the newest ones."""

MAX_CONTENTS: Final = 4096
"""Local ranks listed in one report, over all its holdings; older holdings are left out before."""

MAX_MARGIN: Final = 1_000_000
"""Steps that a departing node may ask for, so that word comes to every rank."""

MAX_INSPECTED: Final = 8
"""Ranks that one Inspected tells of; a node with more says several."""

MAX_GROUPS: Final = 16
"""Process groups of a rank that are looked at: those with an open collective first."""

MAX_PLACES: Final = 8
"""Process groups of which a rank tells where it is."""

MAX_STACKS: Final = 8
"""Groups of like stacks that one node tells of; what is rarer stands in its files."""

MAX_SAID: Final = 10
"""Lines of its ranks' output that one node tells of, the newest."""

MAX_METRICS: Final = 32
"""Names of metrics that a job may have; of more the first are kept."""

MAX_METRIC_ROWS: Final = 64
"""Steps that one Metrics tells of."""

MAX_ANSWER: Final = 8 * 1024 * 1024
"""Bytes of an answer to a Request, as JSON; it does not travel on `Attend`."""

NONCE_BYTES: Final = 32
"""Random bytes that each side adds to what is proved, so that no proof is good twice."""

PROOF_BYTES: Final = 32
"""Length of a proof (an HMAC-SHA256); an empty one says that there is no token."""

Rank = Annotated[int, Between(0, MAX_RANKS)]
RankOrNone = Annotated[int, Between(-1, MAX_RANKS)]
WorldSize = Annotated[int, Between(1, MAX_RANKS)]
Nodes = Annotated[int, Between(1, MAX_NODES)]
NodesOrNone = Annotated[int, Between(0, MAX_NODES)]
LocalRanks = Annotated[int, Between(1, MAX_LOCAL_RANKS)]
ExitCode = Annotated[int, Between(0, 255)]
Nonce = Annotated[bytes, Exactly(NONCE_BYTES)]
ProofBytes = Annotated[bytes, Exactly(PROOF_BYTES, empty=True)]
Pids = Annotated[tuple[Pid, ...], AtMost(MAX_LOCAL_RANKS)]
Ranks = Annotated[tuple[Rank, ...], AtMost(MAX_LOCAL_RANKS)]
Contents = Annotated[tuple[int, ...], AtMost(MAX_CONTENTS)]
ContentsHeld = Annotated[tuple[Annotated[int, Between(1, INT64)], ...], AtMost(MAX_LOCAL_RANKS)]


# ---------------------------------------------------------------- parts of messages


class CheckSpec(Struct, frozen=True):
    """How the job looks after the health of its nodes; part of the JobSpec."""

    network: bool = False  # --network-check: no node enters a round before it has passed
    perf: bool = False  # --comm-perf-test: one all_reduce over all good nodes, once before training
    perf_floor: Amount = 0.0  # bus bandwidth (GB/s) to reach at its largest size; 0: none
    exclude_stragglers: bool = False  # --exclude-straggler
    slow_ratio: Ratio = 1.5  # times the others' median from which a node is slow
    slow_for: float = 30.0  # and while training: for so many seconds
    probe_limit: Limit = 60.0  # seconds for one probe, after which it is ended
    exclude_for: float = 3600.0  # seconds for which an excluded node is refused


class SaveSpec(Struct, frozen=True):
    """What the job does with its snapshots; part of the JobSpec."""

    at_breakpoint: bool = False  # --save-at-breakpoint: what ranks lost is written out too
    limit: Limit = 120.0  # seconds that one attempt to write a checkpoint may take
    restore_step: StepOrNone = -1  # --restore-step: what a person wants; -1: the newest


class WatchSpec(Struct, frozen=True):
    """How the job is watched for hangs, and what its time costs; part of the JobSpec."""

    on_hang: Annotated[str, OneOf("auto", "tell", "restart", "off")] = "auto"
    hang_limit: Amount = 0.0  # seconds for which any rank may be waited for; 0: no limit
    slot_price: Amount = 0.0  # of one slot for one hour; 0: costs are told in hours alone


class JobSpec(Struct, frozen=True):
    """What the whole job has agreed on; every agent brings it, the master's own copy counts."""

    job_id: NameOrEmpty
    min_nodes: Nodes
    max_nodes: Nodes
    node_unit: Nodes
    max_restarts: Count
    restart_backoff: float  # longest wait between restarts, 0 for none
    restart_window: float  # the budget counts failures of this many seconds, 0: of the whole job
    join_timeout: float
    last_call_timeout: float
    heartbeat_timeout: float  # silence after which a node is dead
    grow: Annotated[str, OneOf("auto", "now")]  # "auto" or "now"
    grow_cooldown: float
    restart_grace: float  # how long a rank may take to die when its group is restarted
    master_lost_timeout: float
    checks: CheckSpec = field(default_factory=CheckSpec)
    saves: SaveSpec = field(default_factory=SaveSpec)
    watch: WatchSpec = field(default_factory=WatchSpec)
    scheduler_codes: bool = False  # --exit-codes=scheduler (core.rounds.failures.CONTRACT)
    nodes_return: bool = False  # somebody makes a node anew that has gone, as Kubernetes does pods

    def agree(self, where: str) -> None:
        if self.min_nodes > self.max_nodes:
            raise WireError(f"{where}: min_nodes {self.min_nodes} > max_nodes {self.max_nodes}")


class FailureKind(StrEnum):
    """What a failed rank died of, as `core/rounds/failures.py` classifies it."""

    SCRIPT = "script"  # an exception or a non-zero exit of its own
    FINAL = "final"  # ended with EXIT_FINAL: the script's own word for "do not try again"
    SIGNAL = "signal"  # killed by a signal nobody in the job sent
    OOM = "oom"  # SIGKILL together with the kernel's or cgroup's word for it
    PEER_LOST = "peer-lost"  # a collective broke because another rank had gone
    STOPPED = "stopped"  # died of a signal its agent had just received or sent
    STUCK = "stuck"  # would not die: uninterruptible sleep
    SPAWN = "spawn"  # could not be started at all
    SPAWNER = "spawner"  # its fork server died under it
    HUNG = "hung"  # the others waited for it, and the job's watch ended the round


class Failure(Struct, frozen=True):
    """One failed rank, as its agent saw it."""

    host: NameOrEmpty
    rank: RankOrNone
    local_rank: Annotated[int, Between(-1, MAX_LOCAL_RANKS)]
    pid: Pid
    exitcode: Annotated[int, Between(-INT32, INT32)]  # as subprocess has it: negative for a signal
    time_us: int  # wall clock of the node, microseconds since the epoch; for people
    kind: FailureKind
    message: str  # one line
    traceback: Annotated[str, tail]  # empty if none is known
    error_file: str  # path on the node, empty if none
    ended_before: str = ""  # ranks here that had ended with 0 when it lost its connection: "0-2"


Failures = Annotated[tuple[Failure, ...], AtMost(MAX_FAILURES)]


class Restore(Struct, frozen=True):
    """What the ranks of a round go on from; part of Start."""

    round: RoundName
    step: int
    world_size: WorldSize  # of that round


def _agree_on_place(value: Start | RoundReport | Probe, where: str) -> None:
    if value.group_rank >= value.group_world_size or value.first_rank >= value.world_size:
        raise WireError(
            f"{where}: node {value.group_rank} of {value.group_world_size} with first rank "
            f"{value.first_rank} of {value.world_size}"
        )


class RoundReport(Struct, frozen=True):
    """A round whose ranks still live on this node, told to a master that may have forgotten it."""

    round: RoundName
    group_rank: Rank
    group_world_size: Nodes
    first_rank: Rank
    world_size: WorldSize
    restart_count: Count
    store: Endpoint
    restore: Restore | None = None  # as in Start
    skip: Skip = NOTHING  # as in Start

    def agree(self, where: str) -> None:
        _agree_on_place(self, where)


# ---------------------------------------------------------------- before anything else: auth.py


class Role(StrEnum):
    """What a stream is opened for; a proof made for one role is none for the other."""

    AGENT = "agent"  # takes part in the job
    READER = "reader"  # reads its status
    OPERATOR = "operator"  # stops it, restarts it, keeps nodes out
    JOINER = "joiner"  # has a join code, and gets what a node needs (wire.auth)


class Knock(Struct, frozen=True):
    """First message on every stream: who wants in, and the nonce that the master must answer."""

    protocol: Count
    version: Name
    job_id: NameOrEmpty  # "" for a reader
    role: Role
    # what the session is bound to: its Hello may name no other; "" for a reader, for a joiner
    # the second until which its code is good
    node: NameOrEmpty
    incarnation: NameOrEmpty
    nonce: Nonce
    proves: bool  # whether it has a token to prove


class Challenge(Struct, frozen=True):
    """The master's answer: its own proof first, and the nonce for the other one's."""

    protocol: Count
    version: Name
    term: int
    nonce: Nonce
    proof: ProofBytes  # empty where the master has no token


class Proof(Struct, frozen=True):
    """What lets the stream in: Reports follow, or the status page."""

    proof: ProofBytes


# ---------------------------------------------------------------- reports: agent to master


class Hello(Struct, frozen=True):
    """First message of a proved session: who this is, in full."""

    protocol: Count
    version: Name
    node: Name  # node id, stable over the lives of the agent
    incarnation: Name
    host: NameOrEmpty  # name for people
    address: Name  # what other nodes dial to reach a store here
    pid: Pid
    node_rank: Annotated[int, Between(-1, MAX_NODES - 1)]  # -1: none was given
    local_world_size: LocalRanks
    role: NameOrEmpty
    spec: JobSpec
    attached: RoundReport | None
    last_term: int = 0  # of the last master this agent obeyed, 0: none yet


class Join(Struct, frozen=True):
    """No rank of an earlier round lives here; count this node in. Carries its ready store."""

    store: Endpoint


class Running(Struct, frozen=True):
    """The ranks of `round` have been started; pids by local rank, for status."""

    round: RoundName
    pids: Pids


class RanksFailed(Struct, frozen=True):
    """Ranks of `round` failed here; the others are being stopped. May be sent again with more."""

    round: RoundName
    failures: Failures
    newest: StepOrNone = -1  # step that a rank here has come to; -1: not known


class Stopping(Struct, frozen=True):
    """Ranks of `round` are being stopped and will be gone within `remaining` seconds."""

    round: RoundName
    remaining: float
    ended: Ranks = ()  # local ranks that had ended with 0 before


class Stopped(Struct, frozen=True):
    """Every process of `round` on this node has been reaped: the fence may be passed."""

    round: RoundName
    newest: StepOrNone = -1  # as in RanksFailed


class Finished(Struct, frozen=True):
    """Every local rank of `round` ended with 0."""

    round: RoundName


class Leaving(Struct, frozen=True):
    """This node goes: a signal, or its own decision. Not a failure of any rank."""

    reason: str
    signal: Annotated[int, Between(0, 64)]  # 0: none


class Departing(Struct, frozen=True):
    """Report: this node has received a death signal and leaves, as soon as a step that all ranks
    save is written out, or its grace is over. Answer: SaveAt to all nodes of the round."""

    round: RoundName
    reason: str
    signal: Annotated[int, Between(1, 64)]
    step: int  # the newest that a rank here is at
    margin: Annotated[int, Between(1, MAX_MARGIN)]  # steps in which word comes to every rank
    asked: StepOrNone = -1  # the step that this node has been asked to save; -1: none yet


class Beat(Struct, frozen=True):
    """The agent's loop is alive and has seen orders up to `seen`."""

    number: int


class ProbePhase(StrEnum):
    """How far a probe has come; a failed one names the phase in which it failed."""

    START = "start"  # its process was not there yet, or could not import what it needs
    COMPUTE = "compute"  # the timed matmul
    MEET = "meet"  # forming the process group with the partner
    COMM = "comm"  # the timed all_reduce
    DONE = "done"


class Transfer(Struct, frozen=True):
    """One size of all_reduce, as the slowest local rank saw it."""

    size: int  # bytes of the reduced buffer
    seconds: float  # of one all_reduce


class Probed(Struct, frozen=True):
    """What came of the m.Probe of the same `check` on this node: the worst of its local ranks."""

    check: Name
    ok: bool
    phase: ProbePhase  # where it failed; DONE if it did not
    own: bool  # it failed by itself, with no part of any other node in it (START and COMPUTE)
    excused: bool  # it could not be finished because another node of the group said it had failed
    reason: str  # a clause with the time it took and the limit, without phase and partner; "" if ok
    compute: float  # seconds of one matmul, the slowest local rank's; 0.0: not measured
    flops: Amount  # floating point operations of one matmul
    transfers: Annotated[tuple[Transfer, ...], AtMost(MAX_TRANSFERS)]
    seconds: float  # that the whole probe took, of which ...
    timed: float  # ... so many were timed work


class Steps(Struct, frozen=True):
    """How training goes on this node, by the slowest local rank, from the calls of `progress` of
    elasticrun.training or, where there are none, of a Checkpointer's `step`.

    Means over the steps since the last report, in seconds. `waited` is what the rank spent in
    collectives, waiting for others: a slow rank waits least. The last three are sums over the life
    of the ranks so far, so that a report that is lost, or heard twice, changes nothing."""

    round: RoundName
    step: int  # the newest
    steps: Annotated[int, Between(1, INT32)]  # in this report
    seconds: float  # of one step
    own: float  # of one step, without waiting; 0.0 where it is not known
    waited: float
    saves: Count = 0  # of the rank that has most
    saved: float = 0.0  # seconds that saves kept local ranks from training, of all of them together
    restored: float = 0.0  # the same of restores


class Quiet(Struct, frozen=True):
    """Report: on this node no counter of a collective and no step of `progress` has moved for
    `seconds`; 0.0: they move again, or have for the first time (`first`). Said when that changes
    and when a stream is opened, so a node that trains says nothing.

    `first`: seconds from the start of the life to its first collective or step; 0.0: told before,
    or not yet. `counted`: whether torch counts the collectives of a rank here. `waiting`: ranks
    that are in a collective which is not complete. `busy`: whether any rank here used the CPU or
    did I/O worth the name in the last window."""

    round: RoundName
    seconds: float
    first: float = 0.0
    counted: bool = False
    waiting: Count = 0
    busy: bool = False


class Being(StrEnum):
    """What the kernel says a rank does."""

    RUNS = "runs"
    SLEEPS = "sleeps"
    STOPPED = "stopped"  # SIGSTOP, and nobody traces it
    TRACED = "traced"  # by a debugger
    DISK = "disk"  # uninterruptible sleep
    FROZEN = "frozen"  # its cgroup is
    ENDED = "ended"  # with 0, while others may still wait for it


class Position(Struct, frozen=True):
    """Where a rank is in the collectives of one process group, by torch's counters."""

    group: Annotated[int, Between(0, MAX_GROUPS - 1)]  # index into Inspected.groups
    entered: int  # collectives that it has called
    done: int  # of these, the ones that are complete
    started: Annotated[int, Between(-1, INT64)] = -1  # that the device has begun; -1: not told
    call: str = ""  # the oldest that is not complete: "all_reduce [1000] float32"; "": none
    age: float = 0.0  # seconds since it was called
    limit: float = 0.0  # seconds after which torch itself ends the job for it; 0.0: not told


class GroupSeen(Struct, frozen=True):
    """A process group, under the name that all ranks know it by."""

    name: Name
    title: NameOrEmpty  # what the script called it; "" for none
    members: str  # "0-41,43-63", "0-62:2"; "": all ranks


class RankSeen(Struct, frozen=True):
    """One rank at one look. `answers`: the thread in it that answers did; `forked`: there is one.
    Rates are means over the node's last window of some seconds, of the rank and all below it."""

    rank: Rank
    pid: Pid
    being: Being
    forked: bool
    answers: bool
    cpu: Amount  # cores
    io: Amount  # bytes a second, read and written
    rss: Count = 0  # MiB
    gpu: Annotated[int, Between(-1, 100)] = -1  # percent; -1: not known
    gpu_mib: Count = 0
    quiet: float = 0.0  # seconds since a counter or a step of it moved
    kernel: NameOrEmpty = ""  # where it sleeps in the kernel (wchan)
    place: NameOrEmpty = ""  # innermost line of the user's own source: "train.py:88 load_shard"
    library: NameOrEmpty = (
        ""  # outermost known library that this line has called: "torch.serialization"
    )
    holds: bool = False  # it has not answered, and C code holds its interpreter
    step: StepOrNone = -1
    step_seconds: float = 0.0
    says: NameOrEmpty = ""  # what it is in that takes long on purpose; "": nothing
    says_left: float = 0.0  # seconds for which that holds yet, at most
    at: Annotated[tuple[Position, ...], AtMost(MAX_PLACES)] = ()
    partial: bool = False  # it is in groups that `at` does not tell of
    idle: float = 0.0  # seconds since it used the CPU, or read or wrote; 0.0: not known


class StackGroup(Struct, frozen=True):
    """Threads of ranks with the same frames, innermost first; or a line that ranks have written.
    `key`: the same on every node for the same. `text`: a line a frame, "train.py:88 load_shard"."""

    key: Name
    ranks: str  # "0-41,43-63"
    count: Count
    thread: NameOrEmpty  # "" for the main thread; "loader 3" for a child process
    text: str


class Inspected(Struct, frozen=True):
    """Report, the answer to Inspect: the ranks of this node, in as many of these as it takes;
    `left`: how many ranks are still to come. `said`, in the last of these, where lines are wanted:
    what all have written last, each line once, the newest last."""

    round: RoundName
    number: Count  # of the Inspect
    left: Count
    groups: Annotated[tuple[GroupSeen, ...], AtMost(MAX_GROUPS)]
    ranks: Annotated[tuple[RankSeen, ...], AtMost(MAX_INSPECTED)]
    said: Annotated[tuple[StackGroup, ...], AtMost(MAX_SAID)] = ()


class Stacks(Struct, frozen=True):
    """Report, after the Inspected that was asked for with stacks. `missing`: ranks whose stack
    could not be had, and why, in a clause. `folder`: where they are whole, here; "" nowhere."""

    round: RoundName
    number: Count
    groups: Annotated[tuple[StackGroup, ...], AtMost(MAX_STACKS)]
    missing: str = ""
    folder: str = ""


class LastLines(Struct, frozen=True):
    """Report: what a rank that failed here wrote last, after the RanksFailed that names it."""

    round: RoundName
    rank: Rank
    text: Annotated[str, tail]


MetricName = Annotated[str, OneLine(1, 64)]
MetricValue = Annotated[str, OneLine(0, 24)]


class MetricRow(Struct, frozen=True):
    """What rank 0 has said of a step. `age`: seconds before the report. `values`: numbers as text,
    in the order of the names; "" where it has said nothing of one."""

    step: int
    age: float
    values: Annotated[tuple[MetricValue, ...], AtMost(MAX_METRICS)]


class Metrics(Struct, frozen=True):
    """Report: rows for the run folder, by what rank 0 has handed to `progress`; nothing is decided
    by them. `dropped`: rows of this life so far that were not kept."""

    round: RoundName
    names: Annotated[tuple[MetricName, ...], AtMost(MAX_METRICS)]
    rows: Annotated[tuple[MetricRow, ...], AtMost(MAX_METRIC_ROWS)]
    dropped: Count = 0


class ReachMe(Struct, frozen=True):
    """A reader asks the master to dial `port` at the address its stream comes from, and to read
    `nonce` there (elasticrun doctor)."""

    port: Annotated[int, Between(1024, 65535)]
    nonce: Nonce


class Request(Struct, frozen=True):
    """What a reader wants to know, or an operator wants done. Answer: Reply."""

    verb: Annotated[
        str,
        OneOf(
            *("picture", "stacks", "stop", "restart", "exclude", "include", "scale"),
            *("invite", "join"),
        ),
    ]
    node: NameOrEmpty = ""
    number: Count = 0  # scale: of nodes
    live: bool = False  # picture: with what the ranks do at this moment
    who: NameOrEmpty = ""  # user@host, for the event that it becomes
    reason: NameOrEmpty = ""


class Holding(Struct, frozen=True):
    """One snapshot of one node: all of its local ranks of that round have committed it, or those of
    them whose content is not 0. `replica`: of another node's ranks, copied from there."""

    round: RoundName
    step: int
    first_rank: Rank
    world_size: WorldSize
    contents: Contents  # of local ranks first_rank..: Layout.content, 0: not held
    wanted: bool  # the ranks have asked for it to be written out
    replica: bool = False
    own: bool = False  # its ranks have state that no other rank has (per_rank)

    def agree(self, where: str) -> None:
        if not 1 <= len(self.contents) <= self.world_size - self.first_rank:
            raise WireError(
                f"{where}: {len(self.contents)} ranks from rank {self.first_rank} on of "
                f"{self.world_size}"
            )


class LastRound(Struct, frozen=True):
    """The newest round whose ranks lived on a node, as an agent before this one may have noted it;
    told to a master that may know of no round."""

    round: RoundName
    world_size: WorldSize
    restore: Restore | None = None  # as in Start
    rewound_from: StepOrNone = -1  # `storage_from`, until a checkpoint committed since says it


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
    held: Annotated[tuple[Holding, ...], AtMost(MAX_HOLDINGS)]
    replicas: bool = False
    last: LastRound | None = None
    went_on: WentOn | None = None
    skipped: Count = 0

    def agree(self, where: str) -> None:
        if (listed := sum(len(holding.contents) for holding in self.held)) > MAX_CONTENTS:
            raise WireError(f"{where} lists {listed} ranks, more than {MAX_CONTENTS}")


class WhereIs(Struct, frozen=True):
    """Report: this node needs the shard of a rank that it does not hold. Answer: Holder."""

    round: RoundName
    step: int
    rank: Rank


class ShardBad(Struct, frozen=True):
    """Report: what this node holds of a rank of (round, step) is not what was written, or cannot be
    had from the node that was named; it is to count as absent. Of the round that runs, for a rank
    that lives here and holds nothing of that step: it could not save it, and never will."""

    round: RoundName
    step: int
    rank: Rank
    reason: str


class NotReplicated(Struct, frozen=True):
    """Report: this node could not copy all that a Replicate named."""

    round: RoundName
    step: int
    reason: str


class Persisted(Struct, frozen=True):
    """Report: what came of this node's share, or, with `committed`, of the commit."""

    attempt: Attempt
    ok: bool
    committed: bool
    reason: str
    nbytes: int
    seconds: float


class Missed(Struct, frozen=True):
    """Report: a rank of this node was past the step that SaveAt named, or had no room for it."""

    round: RoundName
    asked: int
    step: int  # that it is at


SaveReport = Holdings | WhereIs | ShardBad | NotReplicated | Persisted | Departing | Missed
"""About snapshots."""

RankReport = Join | Running | RanksFailed | Stopping | Stopped | Finished | Leaving
HealthReport = Probed | Steps | Metrics | ReachMe
SightReport = Quiet | Inspected | Stacks | LastLines
"""About what the ranks are doing."""

Report = (
    Knock | Proof | Hello | Beat | RankReport | HealthReport | SaveReport | SightReport | Request
)


# ---------------------------------------------------------------- orders: master to agent


class Welcome(Struct, frozen=True):
    """The answer to a Hello that was accepted."""

    protocol: Count
    version: Name
    job_id: NameOrEmpty
    term: int
    beat_interval: float
    master_lost_timeout: float
    status_url: NameOrEmpty  # "" until the page is up
    clock_us: int = 0  # the master's wall clock, microseconds since the epoch; for people only


class ReasonCode(Struct, frozen=True):
    """Which reason a text was made of (`core/reasons.py`): its kind, and its fields as JSON."""

    kind: Name
    fields: Annotated[str, WholeText(MAX_CODE)]


class Refused(Struct, frozen=True):
    """The answer to a Hello that was not: the agent ends with `exit_code` and the sentence."""

    reason: str
    exit_code: ExitCode
    code: ReasonCode | None = None


class Wait(Struct, frozen=True):
    """Nothing to do yet, and why; told once per change of the sentence."""

    reason: str
    left: float = 0.0  # seconds after which the wait is over at the latest; 0: it has no end
    code: ReasonCode | None = None


class Start(Struct, frozen=True):
    """This node's place in a new round, and nothing about anybody else's, so that its size does not
    grow with the number of nodes."""

    round: RoundName
    group_rank: Rank
    group_world_size: Nodes
    first_rank: Rank
    world_size: WorldSize
    role_first_rank: Rank
    role_world_size: WorldSize
    restart_count: Count
    store: Endpoint
    host_store: bool  # this node's store is the one: keep it
    restore: Restore | None = None  # the snapshot that all ranks go on from; None: none in memory
    skip: Skip = NOTHING
    why: str = ""  # what ended the round before it, in a clause; "": it is the first, or not known
    code: ReasonCode | None = None  # of `why`

    def agree(self, where: str) -> None:
        _agree_on_place(self, where)


class Stop(Struct, frozen=True):
    """Stop the ranks of `round` and join again."""

    round: RoundName
    reason: str
    code: ReasonCode | None = None


class End(Struct, frozen=True):
    """The job is over for this node."""

    exit_code: ExitCode
    reason: str
    failures: Failures  # the root cause first; empty on success
    goodput: str = ""  # where the time went, in a line; "" where it is not worth one
    saved: StepOrNone = -1  # the newest step in storage; -1: none
    code: ReasonCode | None = None


class Echo(Struct, frozen=True):
    """The answer to a Beat of the same number."""

    number: int
    beat_interval: float = 0.0  # how often to beat from now on; 0: as before


class Probe(Struct, frozen=True):
    """Probe this machine, and its links to the other nodes of a small group, of which only this
    node's own place is told. A newer `check` takes the place of one that is under way."""

    check: Name  # unique name of this group's probe; also the prefix of its keys in the store
    perf: bool  # the all_reduce over all good nodes, in several sizes; no matmul
    partners: str  # the other nodes, in words; "" where there is none
    group_rank: Rank
    group_world_size: Nodes  # nodes; 1: this machine alone
    first_rank: Rank
    world_size: WorldSize  # ranks in the group
    store: Endpoint  # offered in a Join by the group's first node
    limit: float  # seconds, after which the probe is ended and has failed

    def agree(self, where: str) -> None:
        _agree_on_place(self, where)


class Inspect(Struct, frozen=True):
    """Order: look at every rank of this node. Report back: Inspected, and Stacks where `stacks`.
    `dump`: write all that can be known of them to the log folder, as `hang-<dump>`; 0: do not.
    `lines`: tell what they have written last."""

    round: RoundName
    number: Count
    stacks: bool = False
    dump: Count = 0
    lines: bool = False


class Warn(Struct, frozen=True):
    """Order: tell the user of this node, who may see no line of the master's."""

    text: str


class Recovery(Struct, frozen=True):
    """Order: tell the user of this node how long training has stood still. Sent when all ranks of
    `round` run, and again when the first step or collective is told. Seconds count from what ended
    the round before, as in its incident."""

    round: RoundName
    restarted: float  # until all ranks ran again
    first_step: float = 0.0  # until training went on; 0.0: not yet
    repeated: StepOrNone = -1  # steps that are done again; -1: not known


class Watermark(Struct, frozen=True):
    """Order: this step of the present round is whole over the whole job, so that older ones are
    needed no more; -1: none is yet. Steps above it up to `given_up` will never be Whole, because
    some nodes have them and others went on without; -1: none."""

    round: RoundName
    step: StepOrNone
    given_up: StepOrNone = -1


class SaveAt(Struct, frozen=True):
    """Order: every rank of the round takes a snapshot at its first step from this one on, and wants
    it written out; `reason` says in a clause who leaves. Report back, if a rank cannot: Missed."""

    round: RoundName
    step: int
    reason: str


class Holder(Struct, frozen=True):
    """Order: who has it. `holds` is the rank asked for, or one of the same content; `saver` None:
    nobody, and `reason` says why."""

    round: RoundName
    step: int
    rank: Rank
    holds: RankOrNone
    saver: Endpoint | None
    reason: str


class Replicate(Struct, frozen=True):
    """Order: copy what these ranks have of (round, step) from another node's saver, and hold it as
    replicas. What is held already is not copied again; of several orders the newest step counts.
    Report back: Holdings, or NotReplicated."""

    round: RoundName
    step: int
    world_size: WorldSize
    ranks: Ranks
    contents: ContentsHeld  # of these ranks
    saver: Endpoint

    def agree(self, where: str) -> None:
        if not self.ranks or max(self.ranks) >= self.world_size:
            raise WireError(f"{where}: no rank, or one beyond {self.world_size}, is copied")
        if len(self.contents) != len(self.ranks):
            raise WireError(f"{where}: {len(self.contents)} contents of other ranks")


class Persist(Struct, frozen=True):
    """Order: write this node's share of the checkpoint of (round, step). The snapshot is pinned
    until PersistOver. Report back: Persisted."""

    attempt: Attempt
    round: RoundName
    step: int
    world_size: WorldSize
    ranks: Ranks  # of that round, held here, that write a part
    shared: Ranks  # those of them that write their shared items too
    writers: WorldSize  # parts of all nodes, one a rank
    coordinates: bool
    coordinator: Endpoint | None  # its saver, where this node does not coordinate
    reason: Annotated[str, OneOf("periodic", "breakpoint", "asked")]
    limit: Limit  # seconds until the attempt is given up
    rewound_from: StepOrNone = -1  # training was taken back from it since the newest checkpoint

    def agree(self, where: str) -> None:
        if not self.ranks or max(self.ranks) >= self.world_size:
            raise WireError(f"{where}: no rank, or one beyond {self.world_size}, would write")
        if not set(self.shared) <= set(self.ranks) or len(self.ranks) > self.writers:
            raise WireError(f"{where}: ranks write that are not among its {self.writers} writers")
        if self.coordinates is (self.coordinator is not None):
            raise WireError(f"{where}: a node coordinates, or is told who does")


class CommitCheckpoint(Struct, frozen=True):
    """Order to the coordinator: every part is written; write the marker. Report back: Persisted
    with `committed`."""

    attempt: Attempt


class PersistOver(Struct, frozen=True):
    """Order: the attempt was committed or given up, or (`attempt` "") there will be none for a
    snapshot that the ranks wanted written; it is no longer pinned for that."""

    attempt: Annotated[str, OneLine(0, MAX_ATTEMPT)]
    round: RoundName
    step: int
    ok: bool
    reason: str


SaveOrder = Watermark | Persist | CommitCheckpoint | PersistOver | Holder | Replicate | SaveAt
"""About snapshots."""

Order = (
    Challenge
    | Welcome
    | Refused
    | Wait
    | Start
    | Stop
    | End
    | Echo
    | Probe
    | SaveOrder
    | Inspect
    | Warn
    | Recovery
)


# ---------------------------------------------------------------- status: master to a reader


class ExcludedNode(Struct, frozen=True):
    """A node that the job refuses, for people and for schedulers."""

    node: Name
    host: NameOrEmpty
    kind: Annotated[str, OneOf("failed", "slow", "asked")]  # network check, straggler, operator
    reason: str  # the verdict with its evidence
    age: float  # seconds since
    remaining: float  # seconds until it may come back and is probed anew


class NodeStatus(Struct, frozen=True):
    """One node, as the status page shows it."""

    node: Name
    host: NameOrEmpty
    address: NameOrEmpty
    state: NameOrEmpty  # the membership word: alive, suspect, dead, left
    activity: NameOrEmpty  # joining, at-the-door, starting, running, stopping, finished, spare
    reason: str  # why it waits, empty if it does not
    group_rank: RankOrNone  # -1: has no place in the current round
    first_rank: RankOrNone
    local_world_size: Annotated[int, Between(0, MAX_LOCAL_RANKS)]
    pids: Pids
    health: str = ""  # what its last probe measured, or why it is suspected; "" if not probed


class JobStatus(Struct, frozen=True):
    """The job as one page: what a person asks first, and why anything waits."""

    job_id: NameOrEmpty
    phase: NameOrEmpty  # gathering, running, stopping, ended
    reason: str
    round: RoundName | None
    world_size: Rank
    restart_count: Count
    restarts_left: Count
    max_restarts: Count
    min_nodes: NodesOrNone
    max_nodes: NodesOrNone
    nodes: Annotated[tuple[NodeStatus, ...], AtMost(MAX_NODES)]
    last_failure: str
    outcome: str
    excluded: Annotated[tuple[ExcludedNode, ...], AtMost(MAX_EXCLUDED)] = ()
    check: str = ""  # what the last network check found, in a sentence; "" if there was none
    snapshot: str = ""  # newest whole step, newest written one, what is under way; "" if none is
    step: StepOrNone = -1  # the newest that ranks have told of; -1: none
    step_age: float = 0.0  # seconds since it was heard
    age: float = 0.0  # seconds since the job's first master on this host began
    verdict: str = ""  # what keeps the ranks from going on, in a sentence; "": nothing is known to
    quiet: float = 0.0  # seconds since a collective or a step of any rank was complete
    goodput: str = ""  # where the time went, in a line; "" before the first round
    hang: str = ""  # what the verdict is: certain, strong, weak, still; "": none, or on purpose
    name: NameOrEmpty = ""  # by which people know the job; "": by its id
    failed: ReasonCode | None = None  # of `last_failure`
    ended: ReasonCode | None = None  # of `outcome`


class Reached(Struct, frozen=True):
    """The answer to a ReachMe, and what a doctor wants to know of the master's host."""

    ok: bool
    reason: str  # why not, in a clause
    address: NameOrEmpty  # the reader's, as the master sees it
    mtu: Count  # of the interface on the master's side, 0: unknown
    clock_us: int
    host: NameOrEmpty


class Reply(Struct, frozen=True):
    """What came of a Request. `body`: JSON as `core/sight/picture.py` has it, "" where there is
    none."""

    ok: bool
    reason: str
    body: Annotated[str, WholeText(MAX_ANSWER)] = ""


StatusAnswer = Challenge | Refused | JobStatus | Reached | Reply
"""What a reader is sent: a challenge to its knock; to its proof the page, what its ReachMe led to,
or a refusal."""
