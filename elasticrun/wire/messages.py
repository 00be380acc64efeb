"""The messages between an agent and the job master, one frozen struct each, with their bounds.

An agent sends Reports and the master sends Orders, on one `Attend` stream per agent. A reader of
the status authenticates like an agent and receives a page. Orders are level-triggered: they
describe what the node should be doing now, so a repeated order is harmless, and a report that
contains a list (`Holdings`) replaces the previous one. All durations are relative seconds as
floats; no message carries a clock reading that the receiver compares with its own clock
(`Failure.time_us` is only for people). A snapshot is identified by (round, step).

Annotations say which values a field may have (`wire/types.py`); a message's `validate` checks
combinations of fields. `wire/rpc/protobuf.py` checks both in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Struct, field
from msgspec.structs import replace

from elasticrun.wire.types import (
    INT32,
    INT64,
    MAX_ATTEMPT,
    MAX_DATASET_NAME,
    MAX_DATASETS,
    MAX_DEVICE_NAME,
    MAX_EPOCHS,
    MAX_LEASES,
    MAX_LOCAL_RANKS,
    MAX_MARKS,
    MAX_PARTS,
    MAX_SAMPLES,
    MAX_TENSOR_NAME,
    MAX_USED,
    NO_SKIP,
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

PROTOCOL_VERSION: Final = 13
"""Incremented with every change of the protocol that older peers cannot read."""

MAX_MESSAGE_BYTES: Final = 64 * 1024
"""Maximum length of a message on `Attend`: beats would wait behind a longer one, in the stream and
while it is decoded. A longer one is refused, not truncated.
"""

MAX_STATUS_BYTES: Final = 64 * 1024 * 1024
"""Enough for a status reply with MAX_NODES nodes; it is not sent on `Attend`."""

MAX_NODES: Final = 100_000
"""Maximum number of nodes; more is a typo."""

MAX_RANKS: Final = 10_000_000
"""Largest accepted world size."""

MAX_CODE: Final = 2048
"""Maximum bytes of the fields of a reason; if they are longer, only the text is sent."""

MAX_FAILURES: Final = 16
"""Maximum number of failures in one message; later ones are dropped."""

MAX_TRANSFERS: Final = 16
"""Maximum number of message sizes that one probe measures."""

MAX_EXCLUDED: Final = 1000
"""Maximum number of excluded nodes that are remembered; the oldest are forgotten first."""

MAX_NOTICES: Final = 16
"""Maximum number of problems of its machine that one node reports: the newest ones."""

MAX_HOLDINGS: Final = 8
"""Maximum number of snapshots that one node reports: the newest ones."""

MAX_CONTENTS: Final = 4096
"""Maximum number of local ranks in one report, over all its holdings; older holdings are dropped
first.
"""

MAX_LEFT_OUT: Final = 1024
"""Maximum number of tensors that replicas need not have in common; with more, none is compared."""

MAX_DISTRUSTED: Final = 64
"""Maximum number of ranks whose own snapshot a round does not restore."""

MAX_MARGIN: Final = 1_000_000
"""Steps that a departing node may request as margin for the order to reach every rank."""

MAX_INSPECTED: Final = 8
"""Maximum number of ranks in one Inspected; a node with more sends several."""

MAX_GROUPS: Final = 16
"""Maximum number of process groups of a rank that are inspected: those with an open collective
first.
"""

MAX_PLACES: Final = 8
"""Maximum number of process groups for which a rank reports its position."""

MAX_STACKS: Final = 8
"""Maximum number of groups of equal stacks that one node reports; rarer ones are in its files."""

MAX_SAID: Final = 10
"""Maximum number of output lines that one node reports: the newest ones."""

MAX_METRICS: Final = 32
"""Maximum number of metric names in a job; the first ones are kept."""

MAX_METRIC_ROWS: Final = 64
"""Maximum number of steps in one Metrics."""

MAX_ANSWER: Final = 8 * 1024 * 1024
"""Maximum bytes of an answer to a Request, as JSON; it is not sent on `Attend`."""

NONCE_BYTES: Final = 32
"""Number of random bytes that each side adds to what is proved, so that no proof is reused."""

PROOF_BYTES: Final = 32
"""Length of a proof (an HMAC-SHA256); an empty one means that there is no token."""

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
Samples = Annotated[int, Between(0, INT64)]
Leases = Annotated[tuple[Samples, ...], AtMost(2 * MAX_LEASES)]
Digest = Annotated[int, Between(0, INT64)]
TensorName = Annotated[str, OneLine(0, MAX_TENSOR_NAME)]
Used = Annotated[str, WholeText(MAX_USED)]
ContentsHeld = Annotated[tuple[Annotated[int, Between(1, INT64)], ...], AtMost(MAX_LOCAL_RANKS)]


# ---------------------------------------------------------------- parts of messages


class CheckSpec(Struct, frozen=True):
    """How the job checks the health of its nodes; part of the JobSpec."""

    network: bool = False  # --network-check: nodes must pass before they enter a round
    perf: bool = False  # --comm-perf-test: one all_reduce over all good nodes, once before training
    perf_floor: Amount = 0.0  # bus bandwidth (GB/s) to reach at its largest size; 0: none
    exclude_stragglers: bool = False  # --exclude-straggler
    slow_ratio: Ratio = 1.5  # a node is slow from this multiple of the others' median
    slow_for: float = 30.0  # seconds that this must last during training
    probe_limit: Limit = 60.0  # seconds for one probe, after which it is killed
    exclude_for: float = 3600.0  # seconds for which an excluded node is refused


class SaveSpec(Struct, frozen=True):
    """What the job does with its snapshots; part of the JobSpec."""

    at_breakpoint: bool = False  # --save-at-breakpoint: write the snapshot after a failure
    limit: Limit = 120.0  # seconds that one attempt to write a checkpoint may take
    restore_step: StepOrNone = -1  # --restore-step: the requested one; -1: the newest
    on_corruption: Annotated[str, OneOf("tell", "restart", "exclude", "off")] = "tell"


class WatchSpec(Struct, frozen=True):
    """How the job detects hangs, and the price of its time; part of the JobSpec."""

    on_hang: Annotated[str, OneOf("auto", "tell", "restart", "off")] = "auto"
    hang_limit: Amount = 0.0  # seconds for which ranks may wait for any rank; 0: no limit
    slot_price: Amount = 0.0  # of one slot per hour; 0: costs are reported in hours only


class JobSpec(Struct, frozen=True):
    """The settings of the whole job; every agent sends them, the master's own copy is
    authoritative."""

    job_id: NameOrEmpty
    min_nodes: Nodes
    max_nodes: Nodes
    node_unit: Nodes
    max_restarts: Count
    restart_backoff: float  # longest wait between restarts, 0: none
    restart_window: float  # the budget counts failures in this many seconds, 0: in the whole job
    join_timeout: float
    last_call_timeout: float
    heartbeat_timeout: float  # silence after which a disconnected node is dead
    grow: Annotated[str, OneOf("auto", "now")]
    grow_cooldown: float
    restart_grace: float  # time for a rank to exit when its group is restarted
    master_lost_timeout: float
    checks: CheckSpec = field(default_factory=CheckSpec)
    saves: SaveSpec = field(default_factory=SaveSpec)
    watch: WatchSpec = field(default_factory=WatchSpec)
    scheduler_codes: bool = False  # --exit-codes=scheduler (core.rounds.failures.CONTRACT)
    nodes_return: bool = False  # lost nodes are replaced by a controller, like pods in Kubernetes

    def validate(self, where: str) -> None:
        if self.min_nodes > self.max_nodes:
            raise WireError(f"{where}: min_nodes {self.min_nodes} > max_nodes {self.max_nodes}")


class FailureKind(StrEnum):
    """Why a rank failed, as `core/rounds/failures.py` classifies it."""

    SCRIPT = "script"  # its own exception or non-zero exit
    FINAL = "final"  # exit code EXIT_FINAL: the script says "do not retry"
    SIGNAL = "signal"  # killed by a signal: its own (SIGSEGV), or one from outside the job
    OOM = "oom"  # SIGKILL, and the kernel or cgroup reports an OOM kill
    PEER_LOST = "peer-lost"  # a collective or the store broke because a peer was lost
    STOPPED = "stopped"  # stopped by its agent, or by a signal the agent also received
    STUCK = "stuck"  # survives SIGKILL: uninterruptible sleep
    SPAWN = "spawn"  # could not be started
    SPAWNER = "spawner"  # its fork server died
    HUNG = "hung"  # the others waited for it, so the hang watch ended the round


class Failure(Struct, frozen=True):
    """One failed rank, as reported by its agent."""

    host: NameOrEmpty
    rank: RankOrNone
    local_rank: Annotated[int, Between(-1, MAX_LOCAL_RANKS)]
    pid: Pid
    exitcode: Annotated[int, Between(-INT32, INT32)]  # like subprocess: negative for a signal
    time_us: int  # the node's wall clock, microseconds since the epoch; for display
    kind: FailureKind
    message: str  # one line
    traceback: Annotated[str, tail]  # empty if none is known
    error_file: str  # path on the node, empty if none
    ended_before: str = ""  # local ranks that had exited with 0 when it lost its connection: "0-2"


Failures = Annotated[tuple[Failure, ...], AtMost(MAX_FAILURES)]


class Restore(Struct, frozen=True):
    """What the ranks of a round restore; part of Start."""

    round: RoundName
    step: int
    world_size: WorldSize  # of that round


class ReasonCode(Struct, frozen=True):
    """Which reason a text was made of (`core/reasons.py`): its kind, and its fields as JSON."""

    kind: Name
    fields: Annotated[str, WholeText(MAX_CODE)]


class RoundInfo(Struct, frozen=True):
    """A round, the same for all of its nodes."""

    name: RoundName
    world_size: WorldSize
    restart_count: Count = 0
    restore: Restore | None = None  # the snapshot that all ranks restore; None: none in memory
    skip: Skip = NO_SKIP
    why: str = ""  # what ended the previous round, in a clause; "": this is the first, or unknown
    code: ReasonCode | None = None  # of `why`
    distrusted: Annotated[tuple[Rank, ...], AtMost(MAX_DISTRUSTED)] = ()
    """Ranks of `restore.round` that must use a replica, because their own snapshot differs."""

    def committed(self, step: int) -> RoundInfo:
        """The same round after a checkpoint of `step` was committed. If the step is below
        `skip.storage_from`, storage itself shows from now on which checkpoints to skip."""
        if step >= self.skip.storage_from:
            return self
        skip = Skip(memory=self.skip.memory, all_but=self.skip.all_but)
        return replace(self, skip=skip)


def _validate_place(value: Start | Probe, world_size: int, where: str) -> None:
    if value.group_rank >= value.group_world_size or value.first_rank >= world_size:
        raise WireError(
            f"{where}: node {value.group_rank} of {value.group_world_size} with first rank "
            f"{value.first_rank} of {world_size}"
        )


def _validate_leases(leases: tuple[int, ...], where: str) -> None:
    if len(leases) % 2 or any(stop <= start for start, stop in batched(leases)):
        raise WireError(f"{where} has a lease without an end, or one that ends before it starts")


def batched(leases: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Start and end of each lease in a message."""
    return zip(leases[::2], leases[1::2], strict=False)


def after(grant: WorkGrant, received: int) -> tuple[int, ...]:
    """The leases of a grant that a rank with `received` positions does not have yet."""
    found, at = [], grant.first
    for start, stop in batched(grant.leases):
        if at >= received:
            found += [start, stop]
        at += stop - start
    return tuple(found)


# ---------------------------------------------------------------- before anything else: auth.py


class Role(StrEnum):
    """What a stream is opened for; a proof for one role is invalid for another."""

    AGENT = "agent"  # joins the job as a node
    READER = "reader"  # reads its status
    OPERATOR = "operator"  # stops or restarts it, excludes nodes
    JOINER = "joiner"  # has a join code; receives what a node needs (wire.auth)


class Knock(Struct, frozen=True):
    """First message on every stream: who opens it, and the nonce that the master's proof must
    cover."""

    protocol: Count
    version: Name
    job_id: NameOrEmpty  # "" for a reader
    role: Role
    # what the session is bound to: its Hello must name the same node; "" for a reader; for a joiner
    # the second until which its code is valid
    node: NameOrEmpty
    incarnation: NameOrEmpty
    nonce: Nonce
    proves: bool  # whether the sender has a token to prove


class Challenge(Struct, frozen=True):
    """The master's answer to a Knock: its own proof, and the nonce for the peer's proof."""

    protocol: Count
    version: Name
    term: int
    nonce: Nonce
    proof: ProofBytes  # empty where the master has no token


class Proof(Struct, frozen=True):
    """The peer's proof; if it is valid, Reports follow, or the status page."""

    proof: ProofBytes


# ---------------------------------------------------------------- reports: agent to master


class Hello(Struct, frozen=True):
    """First message of an authenticated session: the full description of the node and its agent."""

    protocol: Count
    version: Name
    node: Name  # node id, stable over restarts of the agent
    incarnation: Name
    host: NameOrEmpty  # for display
    address: Name  # address at which other nodes reach a store here
    pid: Pid
    node_rank: Annotated[int, Between(-1, MAX_NODES - 1)]  # -1: none was given
    local_world_size: LocalRanks
    role: NameOrEmpty
    spec: JobSpec
    attached: Start | None  # the last Start that this agent received; None: none yet
    last_term: int = 0  # of the last master that this agent obeyed, 0: none yet


class Join(Struct, frozen=True):
    """No rank of an earlier round runs here, so a round can include this node. `store` is ready."""

    store: Endpoint


class Running(Struct, frozen=True):
    """The ranks of `round` have been started; pids by local rank, for the status."""

    round: RoundName
    pids: Pids


class RanksFailed(Struct, frozen=True):
    """Ranks of `round` failed here; the others are being stopped. May be sent again with more."""

    round: RoundName
    failures: Failures
    newest: StepOrNone = -1  # newest step of a rank here; -1: unknown


class Stopping(Struct, frozen=True):
    """Ranks of `round` are being stopped and will have exited within `remaining` seconds."""

    round: RoundName
    remaining: float
    ended: Ranks = ()  # local ranks that had exited with 0 before


class Stopped(Struct, frozen=True):
    """Every process of `round` on this node has been reaped. One such report lifts the fence of the
    round (`core/rounds/rendezvous.py`)."""

    round: RoundName
    newest: StepOrNone = -1  # as in RanksFailed


class Finished(Struct, frozen=True):
    """Every local rank of `round` exited with 0."""

    round: RoundName


class Leaving(Struct, frozen=True):
    """This node leaves, because of a signal or its own decision. Not a failure of any rank."""

    reason: str
    signal: Annotated[int, Between(0, 64)]  # 0: none


class Departing(Struct, frozen=True):
    """Report: this node has received a termination signal. It leaves as soon as a step that all
    ranks save is written, or when its grace period is over. Answer: SaveAt to all nodes of the
    round."""

    round: RoundName
    reason: str
    signal: Annotated[int, Between(1, 64)]
    step: int  # the newest step of a rank here
    margin: Annotated[int, Between(1, MAX_MARGIN)]  # steps until the order is everywhere
    asked: StepOrNone = -1  # the step that this node must save; -1: none yet


class Beat(Struct, frozen=True):
    """The agent's loop is alive. `number` counts the beats of a stream. Answer: Echo."""

    number: int


class ProbePhase(StrEnum):
    """How far a probe has come; a failed one reports the phase in which it failed."""

    START = "start"  # its process did not run yet, or could not import what it needs
    COMPUTE = "compute"  # the timed matmul
    MEET = "meet"  # forming the process group with the partner
    COMM = "comm"  # the timed all_reduce
    DONE = "done"


class Transfer(Struct, frozen=True):
    """One size of all_reduce, as measured by the slowest local rank."""

    size: int  # bytes of the reduced buffer
    seconds: float  # of one all_reduce


class Probed(Struct, frozen=True):
    """Result of the Probe with the same `check` on this node: the worst of its local ranks."""

    check: Name
    ok: bool
    phase: ProbePhase  # where it failed; DONE if it did not
    own: bool  # it failed alone, without any other node involved (START and COMPUTE)
    excused: bool  # incomplete, because another node of the group reported a failure
    reason: str  # a clause with the time it took and the limit, without phase and partner; "" if ok
    compute: float  # seconds of one matmul of the slowest local rank; 0.0: not measured
    flops: Amount  # floating point operations of one matmul
    transfers: Annotated[tuple[Transfer, ...], AtMost(MAX_TRANSFERS)]
    seconds: float  # duration of the whole probe
    timed: float  # how much of that was timed work


class NodeHealth(Struct, frozen=True):
    """Report: what the agent has found about its machine while the job runs. Replaces the previous
    one; sent when it changes and when a stream is opened.

    `fault`: why no rank may run on this node, as a clause; "": nothing forbids it. `notices`:
    problems that do not forbid it, one sentence each. `standby`: how many local ranks have a
    standby, or why none has, as a clause; "": none is wanted."""

    fault: str = ""
    notices: Annotated[tuple[str, ...], AtMost(MAX_NOTICES)] = ()
    standby: str = ""


class Steps(Struct, frozen=True):
    """Training progress on this node, of the slowest local rank, from the calls of `progress` of
    elasticrun.training or, without any, of a Checkpointer's `step`.

    Means over the steps since the last report, in seconds. `waited` is the time in collectives,
    waiting for others: a slow rank waits least. The last three are sums since the ranks started, so
    that a lost or duplicated report does no harm."""

    round: RoundName
    step: int  # the newest
    steps: Annotated[int, Between(1, INT32)]  # in this report
    seconds: float  # of one step
    own: float  # of one step, without waiting; 0.0 if unknown
    waited: float
    saves: Count = 0  # of the rank with the most
    saved: float = 0.0  # seconds that saves blocked local ranks, all of them together
    restored: float = 0.0  # the same for restores


class Quiet(Struct, frozen=True):
    """Report: on this node no counter of a collective and no step of `progress` has advanced for
    `seconds`; 0.0: they advance again, or for the first time (`first`). Sent when that changes and
    when a stream is opened, so a node that trains sends nothing.

    `first`: seconds from the start of the ranks to their first collective or step; 0.0: reported
    before, or not yet. `counted`: whether torch counts the collectives of a rank here. `waiting`:
    number of ranks in an incomplete collective. `busy`: whether any rank here used the CPU or did
    I/O noticeably in the last window."""

    round: RoundName
    seconds: float
    first: float = 0.0
    counted: bool = False
    waiting: Count = 0
    busy: bool = False


class Being(StrEnum):
    """What a rank does, according to the kernel."""

    RUNS = "runs"
    SLEEPS = "sleeps"
    STOPPED = "stopped"  # SIGSTOP, without a tracer
    TRACED = "traced"  # a debugger is attached
    DISK = "disk"  # uninterruptible sleep
    FROZEN = "frozen"  # its cgroup is frozen
    ENDED = "ended"  # exited with 0; others may still wait for it


class Position(Struct, frozen=True):
    """The position of a rank in the collectives of one process group, from torch's counters."""

    group: Annotated[int, Between(0, MAX_GROUPS - 1)]  # index into Inspected.groups
    entered: int  # collectives called
    done: int  # collectives completed
    started: Annotated[int, Between(-1, INT64)] = -1  # begun by the device; -1: unknown
    call: str = ""  # the oldest incomplete one: "all_reduce [1000] float32"; "": none
    age: float = 0.0  # seconds since that call
    limit: float = 0.0  # seconds after which torch itself ends the job; 0.0: unknown


class GroupSeen(Struct, frozen=True):
    """A process group, under the name that all ranks use."""

    name: Name
    title: NameOrEmpty  # the script's description; "" for none
    members: str  # "0-41,43-63", "0-62:2"; "": all ranks


class RankSeen(Struct, frozen=True):
    """One rank in one sample. `answers`: its monitor thread answered; `forked`: it has such a
    thread. Rates are means over the node's last window of some seconds, for the rank with its
    descendants."""

    rank: Rank
    pid: Pid
    being: Being
    forked: bool
    answers: bool
    cpu: Amount  # cores
    io: Amount  # bytes per second, read and written
    rss: Count = 0  # MiB
    gpu: Annotated[int, Between(-1, 100)] = -1  # percent; -1: unknown
    gpu_mib: Count = 0
    quiet: float = 0.0  # seconds since a counter or step of it advanced
    kernel: NameOrEmpty = ""  # kernel function in which it sleeps (wchan)
    place: NameOrEmpty = ""  # innermost line of the user's own source: "train.py:88 load_shard"
    library: NameOrEmpty = (
        ""  # outermost known library that this line has called: "torch.serialization"
    )
    holds: bool = False  # it has not answered, because C code holds the interpreter
    step: StepOrNone = -1
    step_seconds: float = 0.0
    says: NameOrEmpty = ""  # its `quiet` block, which takes long on purpose; "": none
    says_left: float = 0.0  # seconds until that expires
    at: Annotated[tuple[Position, ...], AtMost(MAX_PLACES)] = ()
    partial: bool = False  # it is in groups that are not in `at`
    idle: float = 0.0  # seconds since it used the CPU or did I/O; 0.0: unknown


class StackGroup(Struct, frozen=True):
    """Threads of ranks with equal frames, innermost first; or a line that ranks have written.
    `key`: equal on every node for equal content. `text`: a line per frame, "train.py:88
    load_shard"."""

    key: Name
    ranks: str  # "0-41,43-63"
    count: Count
    thread: NameOrEmpty  # "" for the main thread; "loader 3" for a child process
    text: str


class Inspected(Struct, frozen=True):
    """Report, answers Inspect: the ranks of this node, in as many messages as needed. `left`: how
    many ranks are still to come. `said`, in the last message, if lines are requested: the last
    output of all ranks, each line once, the newest last."""

    round: RoundName
    number: Count  # of the Inspect
    left: Count
    groups: Annotated[tuple[GroupSeen, ...], AtMost(MAX_GROUPS)]
    ranks: Annotated[tuple[RankSeen, ...], AtMost(MAX_INSPECTED)]
    said: Annotated[tuple[StackGroup, ...], AtMost(MAX_SAID)] = ()


class Stacks(Struct, frozen=True):
    """Report, follows an Inspected if stacks are requested. `missing`: ranks whose stack is not
    available, and why, in a clause. `folder`: where the complete stacks are on this node; "":
    nowhere."""

    round: RoundName
    number: Count
    groups: Annotated[tuple[StackGroup, ...], AtMost(MAX_STACKS)]
    missing: str = ""
    folder: str = ""


class NotFinite(Struct, frozen=True):
    """Report: the loss that this rank has reported for a step is NaN or infinite, for the first
    time in this round."""

    round: RoundName
    rank: Rank
    step: int
    value: Annotated[str, OneOf("nan", "inf", "-inf")]


class LastLines(Struct, frozen=True):
    """Report: the last output of a rank that failed here, after the RanksFailed that names it."""

    round: RoundName
    rank: Rank
    text: Annotated[str, tail]


MetricName = Annotated[str, OneLine(1, 64)]
MetricValue = Annotated[str, OneLine(0, 24)]


class MetricRow(Struct, frozen=True):
    """What rank 0 has reported for a step. `age`: seconds before the report. `values`: numbers as
    text, in the order of the names; "" for a missing one."""

    step: int
    age: float
    values: Annotated[tuple[MetricValue, ...], AtMost(MAX_METRICS)]


class Metrics(Struct, frozen=True):
    """Report: rows for the run folder, from rank 0's calls of `progress`; no decision depends on
    them. `dropped`: rows that were not kept since the rank started."""

    round: RoundName
    names: Annotated[tuple[MetricName, ...], AtMost(MAX_METRICS)]
    rows: Annotated[tuple[MetricRow, ...], AtMost(MAX_METRIC_ROWS)]
    dropped: Count = 0


class ReachMe(Struct, frozen=True):
    """A reader asks the master to connect to `port` at the address of its stream, and to read
    `nonce` there (elasticrun doctor)."""

    port: Annotated[int, Between(1024, 65535)]
    nonce: Nonce


class Request(Struct, frozen=True):
    """A query of a reader, or a command of an operator. Answer: Reply."""

    verb: Annotated[
        str,
        OneOf(
            *("picture", "stacks", "stop", "restart", "exclude", "include", "scale"),
            *("invite", "join"),
        ),
    ]
    node: NameOrEmpty = ""
    number: Count = 0  # scale: number of nodes
    live: bool = False  # picture: with a fresh sample of the ranks
    who: NameOrEmpty = ""  # user@host, for the resulting event
    reason: NameOrEmpty = ""


class Holding(Struct, frozen=True):
    """One snapshot on one node. All local ranks of that round have committed it, or those whose
    content is not 0. `replica`: a copy of what ranks of another node have saved."""

    round: RoundName
    step: int
    first_rank: Rank
    world_size: WorldSize
    contents: Contents  # of local ranks first_rank..: Layout.content, 0: not held
    wanted: bool  # the ranks want it to be written to storage
    replica: bool = False
    own: bool = False  # its ranks have state that no other rank has (per_rank)

    def validate(self, where: str) -> None:
        if not 1 <= len(self.contents) <= self.world_size - self.first_rank:
            raise WireError(
                f"{where}: {len(self.contents)} ranks from rank {self.first_rank} on of "
                f"{self.world_size}"
            )


class WentOn(Struct, frozen=True):
    """A rank of this round has restored here what its Start named, and has trained since, up to
    `step`. Sent once no rank of the round runs here any more."""

    round: RoundName
    step: int


class KeepStep(Struct, frozen=True):
    """Order: keep the snapshots of this step, the newest at which all replicas were equal, until
    the next such order. Sent only if the job may return to it (--on-corruption)."""

    round: RoundName
    step: int


class Holdings(Struct, frozen=True):
    """Report: every complete snapshot on this node, replacing the previous report. `saver`: where
    other nodes fetch from it; None: it has none yet. `replicas`: its ranks want every part of the
    state in the memory of two nodes. `last`: None if no rank ever ran here. `went_on`: None if no
    rank of the newest round has trained here after restoring. `skipped`: snapshots of that round
    skipped for lack of a free slot, by the local rank with the most. `worked`: ranks have taken
    work that is handed out, now or in a round whose snapshots are here. `kept`: the last such order
    to this node; None: there was none."""

    saver: Endpoint | None
    held: Annotated[tuple[Holding, ...], AtMost(MAX_HOLDINGS)]
    replicas: bool = False
    last: RoundInfo | None = None
    went_on: WentOn | None = None
    skipped: Count = 0
    worked: bool = False
    kept: KeepStep | None = None

    def validate(self, where: str) -> None:
        if (listed := sum(len(holding.contents) for holding in self.held)) > MAX_CONTENTS:
            raise WireError(f"{where} lists {listed} ranks, more than {MAX_CONTENTS}")


class WhereIs(Struct, frozen=True):
    """Report: this node needs the shard of a rank, and does not hold it. Answer: Holder."""

    round: RoundName
    step: int
    rank: Rank


class ShardBad(Struct, frozen=True):
    """Report: this node's copy of a rank's shard of (round, step) is corrupt, or cannot be fetched
    from the named node; it counts as absent. For the running round, and a local rank that holds
    nothing of that step: the rank could not save it, and never will."""

    round: RoundName
    step: int
    rank: Rank
    reason: str


class NotReplicated(Struct, frozen=True):
    """Report: this node could not copy everything that a Replicate named."""

    round: RoundName
    step: int
    reason: str


class Persisted(Struct, frozen=True):
    """Report: the result of this node's share, or, with `committed`, of the commit."""

    attempt: Attempt
    ok: bool
    committed: bool
    reason: str
    nbytes: int
    seconds: float


class Missed(Struct, frozen=True):
    """Report: a rank of this node had passed the step of SaveAt, or had no slot for it."""

    round: RoundName
    asked: int
    step: int  # its current step


class WorkBase(Struct, frozen=True):
    """Report: what the ranks of this round have restored, from rank 0. `used`: what was used by
    that step, if it comes from storage."""

    round: RoundName
    source: Annotated[str, OneOf("memory", "storage", "nothing")]
    step: int
    used: Used = ""


class DatasetSpec(Struct, frozen=True):
    """Work that is handed out: `total` samples in shards of `size`, `epochs` times. `shuffle`: the
    seed of the order of the shards; -1: none."""

    name: Annotated[str, OneLine(1, MAX_DATASET_NAME)]
    total: Annotated[int, Between(1, MAX_SAMPLES)]
    size: Annotated[int, Between(1, MAX_SAMPLES)]
    epochs: Annotated[int, Between(1, MAX_EPOCHS)]
    shuffle: Annotated[int, Between(-1, INT64)]


class DatasetShare(Struct, frozen=True):
    """What one rank has of a dataset in this round. Positions count samples over all epochs, with
    each shard as long as the longest. `leases`: start and end of each, in the order in which it got
    them, without the first `dropped` positions. `used`, `marks`: how many positions it had used,
    now and at each of WorkState.marked."""

    spec: DatasetSpec
    dropped: Samples
    leases: Leases
    used: Samples
    marks: Annotated[tuple[Samples, ...], AtMost(MAX_MARKS)]
    wants: bool  # it can use another lease

    def validate(self, where: str) -> None:
        _validate_leases(self.leases, where)


class WorkState(Struct, frozen=True):
    """Report: all that one rank has of the work that is handed out; replaces the previous report.
    `marked`: the last steps that were due to be saved. `since`: it had taken no work before this
    step ended. `restored`: it runs with a Checkpointer that has looked for a step to restore.
    Answer, for each dataset of which it wants more: WorkGrant."""

    round: RoundName
    rank: Rank
    restored: bool
    since: StepOrNone
    marked: Annotated[tuple[int, ...], AtMost(MAX_MARKS)]
    shares: Annotated[tuple[DatasetShare, ...], AtMost(MAX_DATASETS)]
    record: Count = 0  # the WorkGrant.record for which it has dropped leases last

    def validate(self, where: str) -> None:
        if any(len(one.marks) != len(self.marked) for one in self.shares):
            raise WireError(f"{where} does not have one count for each of its marks")


class RankDigests(Struct, frozen=True):
    """Digests of the tensors that a rank shares with its replicas; part of Digests. `count`: number
    of these tensors. `digests`: of each part that CompareReplicas asked for; (): unavailable.
    `names`: of the tensors, if each part has one; else (). `device`: where the rank keeps them."""

    rank: Rank
    count: Count = 0
    digests: Annotated[tuple[Digest, ...], AtMost(MAX_PARTS)] = ()
    names: Annotated[tuple[TensorName, ...], AtMost(MAX_PARTS)] = ()
    device: Annotated[str, OneLine(0, MAX_DEVICE_NAME)] = ""


class Digests(Struct, frozen=True):
    """Report: the answer to CompareReplicas, of some of this node's ranks. `seconds`: CPU time that
    the hashing took."""

    round: RoundName
    step: int
    number: Count
    ranks: Annotated[tuple[RankDigests, ...], AtMost(MAX_PARTS)]
    seconds: float = 0.0


SaveReport = (
    Holdings
    | WhereIs
    | ShardBad
    | NotReplicated
    | Persisted
    | Departing
    | Missed
    | WorkBase
    | WorkState
    | Digests
)
"""Reports about snapshots, and about work that is handed out."""

RankReport = Join | Running | RanksFailed | Stopping | Stopped | Finished | Leaving
HealthReport = Probed | NodeHealth | Steps | Metrics | ReachMe
SightReport = Quiet | Inspected | Stacks | LastLines | NotFinite
"""Reports about the activity of ranks."""

Report = (
    Knock | Proof | Hello | Beat | RankReport | HealthReport | SaveReport | SightReport | Request
)


# ---------------------------------------------------------------- orders: master to agent


class Welcome(Struct, frozen=True):
    """The answer to a Hello that is accepted."""

    protocol: Count
    version: Name
    job_id: NameOrEmpty
    term: int
    beat_interval: float
    master_lost_timeout: float
    status_url: NameOrEmpty  # "" until the page is available
    clock_us: int = 0  # the master's wall clock, microseconds since the epoch; for display only


class Refused(Struct, frozen=True):
    """The answer to a Hello that is refused: the agent logs `reason` and exits with `exit_code`."""

    reason: str
    exit_code: ExitCode
    code: ReasonCode | None = None


class Wait(Struct, frozen=True):
    """Nothing to do yet, and why; sent when the reason changes."""

    reason: str
    left: float = 0.0  # seconds after which the wait ends at the latest; 0: unlimited
    code: ReasonCode | None = None


class Start(Struct, frozen=True):
    """This node's place in a new round, and no other node's, so that the size of this message does
    not depend on the number of nodes. The node reports it to a new master, which may not know the
    round."""

    info: RoundInfo
    group_rank: Rank
    group_world_size: Nodes
    first_rank: Rank
    role_first_rank: Rank
    role_world_size: WorldSize
    store: Endpoint
    host_store: bool  # this node's store is used: keep it

    @property
    def round(self) -> RoundName:
        return self.info.name

    def validate(self, where: str) -> None:
        _validate_place(self, self.info.world_size, where)


class Stop(Struct, frozen=True):
    """Stop the ranks of `round` and join again."""

    round: RoundName
    reason: str
    code: ReasonCode | None = None


class End(Struct, frozen=True):
    """The job is over for this node."""

    exit_code: ExitCode
    reason: str
    failures: Failures  # root cause first; empty on success
    goodput: str = ""  # how the time was spent, in one line; "" if trivial
    saved: StepOrNone = -1  # the newest step in storage; -1: none
    code: ReasonCode | None = None


class Echo(Struct, frozen=True):
    """The answer to a Beat with the same number."""

    number: int
    beat_interval: float = 0.0  # new interval of beats; 0: unchanged


class Probe(Struct, frozen=True):
    """Probe this machine, and its links to the other nodes of a small group. Contains only this
    node's own place. A newer `check` replaces a running one."""

    check: Name  # unique name of this group's probe; also the prefix of its keys in the store
    perf: bool  # the all_reduce over all good nodes, in several sizes; no matmul
    partners: str  # the other nodes, in words; "" if none
    group_rank: Rank
    group_world_size: Nodes  # nodes; 1: this machine alone
    first_rank: Rank
    world_size: WorldSize  # ranks in the group
    store: Endpoint  # offered in a Join by one of the group's nodes
    limit: float  # seconds after which the probe is killed and counts as failed

    def validate(self, where: str) -> None:
        _validate_place(self, self.world_size, where)


class Inspect(Struct, frozen=True):
    """Order: inspect every rank of this node. Answers: Inspected, and Stacks if `stacks`. `dump`:
    write all available information to the log folder, as `hang-<dump>`; 0: do not. `lines`: report
    their last output."""

    round: RoundName
    number: Count
    stacks: bool = False
    dump: Count = 0
    lines: bool = False


class Warn(Struct, frozen=True):
    """Order: inform the user of this node, who may not see the master's log."""

    text: str


class Recovery(Struct, frozen=True):
    """Order: inform the user of this node how long training was interrupted. Sent when all ranks of
    `round` run, and again when the first step or collective is reported. Seconds count from the
    event that ended the previous round, as in its incident."""

    round: RoundName
    restarted: float  # until all ranks ran again
    first_step: float = 0.0  # until training continued; 0.0: not yet
    repeated: StepOrNone = -1  # steps that are repeated; -1: unknown


class Watermark(Struct, frozen=True):
    """Order: this step of the current round is complete in the whole job, so older ones are not
    needed any more; -1: none is yet. Steps above it up to `given_up` will never be complete,
    because some nodes have saved them and others continued without; -1: none."""

    round: RoundName
    step: StepOrNone
    given_up: StepOrNone = -1


class CompareReplicas(Struct, frozen=True):
    """Order: hash the tensors that replicas have in common, of the first snapshot after `step` of
    each local rank; a newer order replaces it. With `last`: of the snapshot hashed last, which is
    of `step`, of `ranks` only; of the tensors, sorted by name, those from `first` up to `last`,
    each or in parts of equal length. `left_out`: keys of the names of tensors that are not
    compared. Answer: Digests."""

    round: RoundName
    step: StepOrNone
    number: Count
    ranks: Ranks = ()
    first: Count = 0
    last: Count = 0
    left_out: Annotated[tuple[Digest, ...], AtMost(MAX_LEFT_OUT)] = ()


class SaveAt(Struct, frozen=True):
    """Order: every rank of the round takes a snapshot at its first step from this one on, to be
    written to storage; `reason` says in a clause who leaves. Answer, if a rank cannot: Missed."""

    round: RoundName
    step: int
    reason: str


class Holder(Struct, frozen=True):
    """Order: who holds a shard. `holds` is the requested rank, or one with the same content;
    `saver` None: nobody, for `reason`."""

    round: RoundName
    step: int
    rank: Rank
    holds: RankOrNone
    saver: Endpoint | None
    reason: str


class Replicate(Struct, frozen=True):
    """Order: copy what these ranks have of (round, step) from another node's saver, and keep it as
    replicas. What is held already is not copied again; of several orders only the newest step
    counts. Answer: Holdings, or NotReplicated."""

    round: RoundName
    step: int
    world_size: WorldSize
    ranks: Ranks
    contents: ContentsHeld  # of these ranks
    saver: Endpoint

    def validate(self, where: str) -> None:
        if not self.ranks or max(self.ranks) >= self.world_size:
            raise WireError(f"{where}: no rank, or one beyond {self.world_size}, is copied")
        if len(self.contents) != len(self.ranks):
            raise WireError(f"{where}: {len(self.contents)} contents of other ranks")


class Persist(Struct, frozen=True):
    """Order: write this node's share of the checkpoint of (round, step). The snapshot is pinned
    until PersistOver. Answer: Persisted."""

    attempt: Attempt
    round: RoundName
    step: int
    world_size: WorldSize
    ranks: Ranks  # ranks of that round, held here, that write a part
    shared: Ranks  # those that also write their shared items
    writers: WorldSize  # number of ranks of all nodes that write a part
    coordinates: bool
    coordinator: Endpoint | None  # the coordinator's saver, if that is another node
    reason: Annotated[str, OneOf("periodic", "breakpoint", "asked")]
    limit: Limit  # seconds until the attempt is given up
    rewound_from: StepOrNone = -1  # training was rewound to below this step; -1: it was not
    used: Used = ""  # for the coordinator: what was used by this step of the work handed out

    def validate(self, where: str) -> None:
        if not self.ranks or max(self.ranks) >= self.world_size:
            raise WireError(f"{where}: no rank, or one beyond {self.world_size}, would write")
        if not set(self.shared) <= set(self.ranks) or len(self.ranks) > self.writers:
            raise WireError(f"{where}: ranks write that are not among its {self.writers} writers")
        if self.coordinates is (self.coordinator is not None):
            raise WireError(f"{where}: a node coordinates, or is told who does")


class CommitCheckpoint(Struct, frozen=True):
    """Order to the coordinator: all parts are written; write the marker. Answer: Persisted with
    `committed`."""

    attempt: Attempt


class PersistOver(Struct, frozen=True):
    """Order: the attempt was committed or given up, or (`attempt` "") there will be none for a
    snapshot that the ranks wanted to be written; it is no longer pinned for that."""

    attempt: Annotated[str, OneLine(0, MAX_ATTEMPT)]
    round: RoundName
    step: int
    ok: bool
    reason: str


class WorkGrant(Struct, frozen=True):
    """Order: leases of a dataset for one rank. `leases` start after the first `first` positions
    that it got in this round; it may have some of them already. It may drop the first `dropped`
    positions from its reports, because they are in the record of this number. `over`: nothing is
    left. `refused`: why it gets nothing; "": it does."""

    round: RoundName
    rank: Rank
    dataset: Annotated[str, OneLine(1, MAX_DATASET_NAME)]
    first: Samples
    leases: Leases
    dropped: Samples
    over: bool = False
    refused: str = ""
    record: Count = 0

    def validate(self, where: str) -> None:
        _validate_leases(self.leases, where)


SaveOrder = (
    Watermark
    | Persist
    | CommitCheckpoint
    | PersistOver
    | Holder
    | Replicate
    | SaveAt
    | WorkGrant
    | CompareReplicas
    | KeepStep
)
"""Orders about snapshots, and about work that is handed out."""

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
    # by the network check, as a straggler, by an operator, for what its agent found, by replicas
    kind: Annotated[str, OneOf("failed", "slow", "asked", "unhealthy", "differs")]
    reason: str  # the verdict with its evidence
    age: float  # seconds since
    remaining: float  # seconds until it may return and is probed again


class NodeStatus(Struct, frozen=True):
    """One node, as the status page shows it."""

    node: Name
    host: NameOrEmpty
    address: NameOrEmpty
    state: NameOrEmpty  # membership: alive, suspect, dead, left
    activity: NameOrEmpty  # joining, at-the-door, starting, running, stopping, finished, none
    reason: str  # why it waits, empty if it does not
    group_rank: RankOrNone  # -1: not in the current round
    first_rank: RankOrNone
    local_world_size: Annotated[int, Between(0, MAX_LOCAL_RANKS)]
    pids: Pids
    health: str = ""  # what its last probe measured, or why it is suspected; "" if not probed
    notices: Annotated[tuple[str, ...], AtMost(MAX_NOTICES)] = ()  # NodeHealth.notices
    standby: str = ""  # NodeHealth.standby


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
    step: StepOrNone = -1  # newest step reported by ranks; -1: none
    step_age: float = 0.0  # seconds since it was reported
    age: float = 0.0  # seconds since the job's first master on this host started
    verdict: str = ""  # what blocks the ranks, in a sentence; "": nothing known
    quiet: float = 0.0  # seconds since a collective or step of any rank completed
    goodput: str = ""  # how the time was spent, in one line; "" before the first round
    hang: str = ""  # kind of the verdict: certain, strong, weak, still; "": none, or on purpose
    name: NameOrEmpty = ""  # the job's name for people; "": its id
    failed: ReasonCode | None = None  # of `last_failure`
    ended: ReasonCode | None = None  # of `outcome`


class Reached(Struct, frozen=True):
    """The answer to a ReachMe, with what `doctor` needs to know of the master's host."""

    ok: bool
    reason: str  # why not, in a clause
    address: NameOrEmpty  # the reader's, as the master sees it
    mtu: Count  # of the interface on the master's side, 0: unknown
    clock_us: int
    host: NameOrEmpty


class Reply(Struct, frozen=True):
    """The result of a Request. `body`: JSON as in `core/sight/picture.py`, "" if none."""

    ok: bool
    reason: str
    body: Annotated[str, WholeText(MAX_ANSWER)] = ""


StatusAnswer = Challenge | Refused | JobStatus | Reached | Reply
"""What a reader receives: a challenge for its Knock; for its proof the page, the result of its
ReachMe, or a refusal.
"""
