"""The messages about node health: what is asked of the checks, probes and what came of them, how
training goes on a node, who is excluded, and a reader's wish to be dialled.

They are messages like those of `messages.py`, which shows them under its own name too.

What agents and the job master say to each other about snapshots and checkpoints.

A snapshot is named (round, step). All of these are level-triggered: `Holdings` always lists all
that a node holds, and an order that comes again changes nothing.

The job as one page: what `elasticrun status` and the status page are sent.

They are messages like those of `messages.py`, which shows them under its own name too.

The messages between an agent and the job master, one frozen dataclass each.

An agent sends Reports and the master sends Orders, on one `Attend` stream per agent. Orders are
level-triggered: they describe what the node should be doing now, so a repeated order is harmless.
All durations are seconds as floats and relative; no message carries a clock reading that the
receiver would compare with its own clock (`Failure.time_us` is shown to people only).
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field

from elasticrun.wire.types import Endpoint, RoundName

MAX_TRANSFERS = 16
"""Most message sizes that one probe measures."""

MAX_EXCLUDED = 1000
"""Most excluded nodes that are remembered; the oldest are forgotten first."""


class CheckSpec(Struct, frozen=True):
    """How the job looks after the health of its nodes; part of the JobSpec."""

    network: bool = False  # --network-check: no node enters a round before it has passed
    perf: bool = False  # --comm-perf-test: one all_reduce over all good nodes, once before training
    perf_floor: float = 0.0  # bus bandwidth (GB/s) that it must reach at its largest size; 0: none
    exclude_stragglers: bool = False  # --exclude-straggler
    slow_ratio: float = 1.5  # a node is slow from this multiple of the others' median on
    slow_for: float = 30.0  # and while training: for so many seconds
    probe_limit: float = 60.0  # seconds for one probe, after which it is ended
    exclude_for: float = 3600.0  # seconds for which an excluded node is refused
    quarantine: int = 0  # --quarantine: so many excluded nodes at once stay parked


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

    check: str
    ok: bool
    phase: ProbePhase  # where it failed; DONE if it did not
    own: bool  # it failed by itself, with no part of any other node in it (START and COMPUTE)
    excused: bool  # it could not be finished because another node of the group said it had failed
    reason: str  # a clause with the time it took and the limit, without phase and partner; "" if ok
    compute: float  # seconds of one matmul, the slowest local rank's; 0.0: not measured
    flops: float  # floating point operations of one matmul
    transfers: tuple[Transfer, ...]
    seconds: float  # that the whole probe took, of which ...
    timed: float  # ... so many were timed work


class Steps(Struct, frozen=True):
    """How training goes on this node, from `elasticrun.training.progress`: the slowest local rank.

    Means over the steps since the last report, in seconds. `waited` is what the rank spent in
    collectives, waiting for others: a slow rank waits least."""

    round: RoundName
    step: int  # the newest
    steps: int  # in this report
    seconds: float  # of one step
    own: float  # of one step, without waiting; 0.0 where it is not known
    waited: float


class Probe(Struct, frozen=True):
    """Probe this machine, and its links to the other nodes of a small group, of which only this
    node's own place is told. A newer `check` takes the place of one that is under way."""

    check: str  # unique name of this group's probe; also the prefix of its keys in the store
    perf: bool  # the all_reduce over all good nodes, in several sizes; no matmul
    partners: str  # the other nodes, in words; "" where there is none
    group_rank: int
    group_world_size: int  # nodes; 1: this machine alone
    first_rank: int
    world_size: int  # ranks in the group
    store: Endpoint  # offered in a Join by the group's first node
    limit: float  # seconds, after which the probe is ended and has failed


class Park(Struct, frozen=True):
    """This node is excluded and is to stay, without ranks, so that nobody is given its machine."""

    reason: str
    seconds: float  # after which it ends, if the job has not ended before


class ExcludedNode(Struct, frozen=True):
    """A node that the job refuses, for people and for schedulers."""

    node: str
    host: str
    kind: str  # "failed" (network check) or "slow" (straggler)
    reason: str  # the verdict with its evidence
    age: float  # seconds since
    remaining: float  # seconds until it may come back and is probed anew


class ReachMe(Struct, frozen=True):
    """A reader asks the master to dial `port` at the address its stream comes from, and to read
    `nonce` there (elasticrun doctor)."""

    port: int
    nonce: bytes


class Reached(Struct, frozen=True):
    """The answer to a ReachMe, and what a doctor wants to know of the master's host."""

    ok: bool
    reason: str  # why not, in a clause
    address: str  # the reader's, as the master sees it
    mtu: int  # of the interface on the master's side, 0: unknown
    clock_us: int
    host: str


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


class NodeStatus(Struct, frozen=True):
    """One node, as the status page shows it."""

    node: str
    host: str
    address: str
    state: str  # the membership word: alive, suspect, dead, left, parked
    activity: str  # joining, at-the-door, starting, running, stopping, finished, spare
    reason: str  # why it waits, empty if it does not
    group_rank: int  # -1: has no place in the current round
    first_rank: int
    local_world_size: int
    pids: tuple[int, ...]
    health: str = ""  # what its last probe measured, or why it is suspected; "" if not probed


class JobStatus(Struct, frozen=True):
    """The job as one page: what a person asks first, and why anything waits."""

    job_id: str
    phase: str  # gathering, running, stopping, ended
    reason: str
    round: RoundName | None
    world_size: int
    restart_count: int
    restarts_left: int
    max_restarts: int
    min_nodes: int
    max_nodes: int
    nodes: tuple[NodeStatus, ...]
    last_failure: str
    outcome: str
    excluded: tuple[ExcludedNode, ...] = ()
    check: str = ""  # what the last network check found, in a sentence; "" if there was none
    snapshot: str = ""  # newest whole step, newest written one, what is under way; "" if none is
    step: int = -1  # the newest that ranks have told of; -1: none
    step_age: float = 0.0  # seconds since it was heard
    age: float = 0.0  # seconds since the job's first master on this host began


PROTOCOL_VERSION = 6
"""Raised with every change of the wire that an older peer cannot read."""

MAX_MESSAGE_BYTES = 64 * 1024
"""No message on `Attend` is longer: beats would wait behind it, in the stream and while it is
decoded. A longer one is refused, not truncated."""

MAX_TEXT = 4096
"""Longest sentence, traceback or name in a message, in characters; the sender cuts."""

MAX_FAILURES = 16
"""Most failures listed in one message; the first ones by time are kept."""

MAX_NAME = 1024
"""Longest name (of a job, node, host, role), in characters; a longer one is refused, not cut."""

MAX_NODES = 100_000
"""A claim above this is a typing error."""

MAX_LOCAL_RANKS = 4096
"""Most ranks on one node; ten times the cores of the largest hosts there are."""

MAX_RANKS = 10_000_000
"""Largest world size that is believed."""

MAX_SECONDS = 1e9
"""Longest duration that is believed: 31 years, which people write for "for ever"."""

MAX_STATUS_BYTES = 64 * 1024 * 1024
"""Room for a status reply of MAX_NODES nodes; it does not travel on `Attend`."""

NONCE_BYTES = 32
"""Random bytes that each side adds to what is proved, so that no proof is good twice."""

PROOF_BYTES = 32
"""Length of a proof (an HMAC-SHA256); an empty one says that there is no token."""


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


class Failure(Struct, frozen=True):
    """One failed rank, as its agent saw it."""

    host: str
    rank: int
    local_rank: int
    pid: int
    exitcode: int  # as subprocess has it: negative for a signal
    time_us: int  # wall clock of the node, microseconds since the epoch; for people
    kind: FailureKind
    message: str  # one line
    traceback: str  # empty if none is known
    error_file: str  # path on the node, empty if none


class JobSpec(Struct, frozen=True):
    """What the whole job has agreed on; every agent brings it, the master's own copy counts."""

    job_id: str
    min_nodes: int
    max_nodes: int
    node_unit: int
    max_restarts: int
    restart_backoff: float  # longest wait between restarts, 0 for none
    restart_window: float  # the budget counts failures of this many seconds, 0: of the whole job
    join_timeout: float
    last_call_timeout: float
    heartbeat_timeout: float  # silence after which a node is dead
    grow: str  # "auto" or "now"
    grow_cooldown: float
    restart_grace: float  # how long a rank may take to die when its group is restarted
    master_lost_timeout: float
    checks: CheckSpec = field(default_factory=CheckSpec)
    saves: SaveSpec = field(default_factory=SaveSpec)
    scheduler_codes: bool = False  # --exit-codes=scheduler (core.failures.CONTRACT)


class RoundReport(Struct, frozen=True):
    """A round whose ranks still live on this node, told to a master that may have forgotten it."""

    round: RoundName
    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    restart_count: int
    store: Endpoint
    restore: Restore | None = None  # as in Start
    rewound_from: int = -1  # as in Start


# ---------------------------------------------------------------- before anything else: proof.py


class Role(StrEnum):
    """What a stream is opened for; a proof made for one role is none for the other."""

    AGENT = "agent"  # takes part in the job
    READER = "reader"  # reads its status


class Knock(Struct, frozen=True):
    """First message on every stream: who wants in, and the nonce that the master must answer."""

    protocol: int
    version: str
    job_id: str  # "" for a reader
    role: Role
    node: str  # what the session is bound to: its Hello may name no other; "" for a reader
    incarnation: str
    nonce: bytes
    proves: bool  # whether it has a token to prove


class Challenge(Struct, frozen=True):
    """The master's answer: its own proof first, and the nonce for the other one's."""

    protocol: int
    version: str
    term: int
    nonce: bytes
    proof: bytes  # empty where the master has no token


class Proof(Struct, frozen=True):
    """What lets the stream in: Reports follow, or the status page."""

    proof: bytes


# ---------------------------------------------------------------- Reports: agent to master


class Hello(Struct, frozen=True):
    """First message of a proved session: who this is, in full."""

    protocol: int
    version: str
    node: str  # node id, stable over the lives of the agent
    incarnation: str
    host: str  # name for people
    address: str  # what other nodes dial to reach a store here
    pid: int
    node_rank: int  # -1: none was given
    local_world_size: int
    role: str
    spec: JobSpec
    attached: RoundReport | None
    last_term: int = 0  # of the last master this agent obeyed, 0: none yet


class Join(Struct, frozen=True):
    """No rank of an earlier round lives here; count this node in. Carries its ready store."""

    store: Endpoint


class Running(Struct, frozen=True):
    """The ranks of `round` have been started; pids by local rank, for status."""

    round: RoundName
    pids: tuple[int, ...]


class RanksFailed(Struct, frozen=True):
    """Ranks of `round` failed here; the others are being stopped. May be sent again with more."""

    round: RoundName
    failures: tuple[Failure, ...]


class Stopping(Struct, frozen=True):
    """Ranks of `round` are being stopped and will be gone within `remaining` seconds."""

    round: RoundName
    remaining: float


class Stopped(Struct, frozen=True):
    """Every process of `round` on this node has been reaped: the fence may be passed."""

    round: RoundName


class Finished(Struct, frozen=True):
    """Every local rank of `round` ended with 0."""

    round: RoundName


class Leaving(Struct, frozen=True):
    """This node goes: a signal, or its own decision. Not a failure of any rank."""

    reason: str
    signal: int  # 0: none


class Beat(Struct, frozen=True):
    """The agent's loop is alive and has seen orders up to `seen`."""

    number: int


Report = (
    Knock
    | Proof
    | Hello
    | Join
    | Running
    | RanksFailed
    | Stopping
    | Stopped
    | Finished
    | Leaving
    | Beat
    | Probed
    | Steps
    | ReachMe
    | SaveReport
)


# ---------------------------------------------------------------- Orders: master to agent


class Welcome(Struct, frozen=True):
    """The answer to a Hello that was accepted."""

    protocol: int
    version: str
    job_id: str
    term: int
    beat_interval: float
    master_lost_timeout: float
    status_url: str  # "" until the page is up
    clock_us: int = 0  # the master's wall clock, microseconds since the epoch; for people only


class Refused(Struct, frozen=True):
    """The answer to a Hello that was not: the agent ends with `exit_code` and the sentence."""

    reason: str
    exit_code: int


class Wait(Struct, frozen=True):
    """Nothing to do yet, and why; told once per change of the sentence."""

    reason: str
    left: float = 0.0  # seconds after which the wait is over at the latest; 0: it has no end


class Start(Struct, frozen=True):
    """This node's place in a new round, and nothing about anybody else's, so that its size does not
    grow with the number of nodes."""

    round: RoundName
    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    role_first_rank: int
    role_world_size: int
    restart_count: int
    store: Endpoint
    host_store: bool  # this node's store is the one: keep it
    restore: Restore | None = None  # the snapshot that all ranks go on from; None: none in memory
    rewound_from: int = -1  # checkpoints of this step and later ones come last; -1: none does
    suspect: bool = False  # `restore` comes last too: ranks have failed soon after it
    restore_step: int = -1  # a person wants this step and no other; -1: nobody does
    why: str = ""  # what ended the round before it, in a clause; "": it is the first, or not known


class Stop(Struct, frozen=True):
    """Stop the ranks of `round` and join again."""

    round: RoundName
    reason: str


class End(Struct, frozen=True):
    """The job is over for this node."""

    exit_code: int
    reason: str
    failures: tuple[Failure, ...]  # the root cause first; empty on success


class Echo(Struct, frozen=True):
    """The answer to a Beat of the same number."""

    number: int
    beat_interval: float = 0.0  # how often to beat from now on; 0: as before


Order = Challenge | Welcome | Refused | Wait | Start | Stop | End | Echo | Probe | Park | SaveOrder


# ---------------------------------------------------------------- Status


StatusAnswer = Challenge | Refused | JobStatus | Reached
"""What a reader is sent: a challenge to its knock; to its proof the page, what its ReachMe led to,
or a refusal."""
