"""The messages between an agent and the job master, one frozen dataclass each.

An agent sends Reports and the master sends Orders, on one `Attend` stream per agent. Orders are
level-triggered: they describe what the node should be doing now, so a repeated order is harmless.
All durations are seconds as floats and relative; no message carries a clock reading that the
receiver would compare with its own clock (`Failure.time_us` is shown to people only).
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field

from elasticrun.wire.health import (
    MAX_EXCLUDED as MAX_EXCLUDED,
    MAX_TRANSFERS as MAX_TRANSFERS,
    CheckSpec as CheckSpec,
    ExcludedNode as ExcludedNode,
    Park as Park,
    Probe as Probe,
    Probed as Probed,
    ProbePhase as ProbePhase,
    Reached as Reached,
    ReachMe as ReachMe,
    Steps as Steps,
    Transfer as Transfer,
)
from elasticrun.wire.ids import Endpoint, RoundName
from elasticrun.wire.page import JobStatus as JobStatus, NodeStatus as NodeStatus
from elasticrun.wire.saving import (
    MAX_ATTEMPT as MAX_ATTEMPT,
    MAX_CONTENTS as MAX_CONTENTS,
    MAX_HOLDINGS as MAX_HOLDINGS,
    MAX_MARGIN as MAX_MARGIN,
    CommitCheckpoint as CommitCheckpoint,
    Departing as Departing,
    Holder as Holder,
    Holding as Holding,
    Holdings as Holdings,
    LastRound as LastRound,
    Missed as Missed,
    NotReplicated as NotReplicated,
    Persist as Persist,
    Persisted as Persisted,
    PersistOver as PersistOver,
    Replicate as Replicate,
    Restore as Restore,
    SaveAt as SaveAt,
    SaveOrder as SaveOrder,
    SaveReport as SaveReport,
    SaveSpec as SaveSpec,
    ShardBad as ShardBad,
    Watermark as Watermark,
    WentOn as WentOn,
    WhereIs as WhereIs,
)

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
    """What a failed rank died of, as `core/failures.py` classifies it."""

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
