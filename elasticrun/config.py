"""Every setting with its default, and the records that the command line resolves to.

The constants are the defaults; most texts say what raising one does. `Launch` is what the user
asked for; nothing changes it once the command line is read. `Place` is where the master is, as far
as that is known. `Identity` is who the job and the node are. A process that starts an agent or a
master passes these as JSON (`wire.types`) over an inherited descriptor. Both processes belong to
one installation, so no version is negotiated. Nothing here reads the environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from msgspec import structs

from elasticrun.wire.messages import JobSpec
from elasticrun.wire.types import Entrypoint

MAX_CONFIG_BYTES = 8 * 1024 * 1024
"""Maximum size of that JSON for an agent: more than an environment plus a command line (at most 2
MB each on Linux) with JSON's escapes."""

# ---------------------------------------------------------------- rendezvous (seconds)

JOIN_TIMEOUT: Final = 600.0
"""How long the job waits for `min` nodes before it ends; raise it for slow schedulers."""

LAST_CALL_TIMEOUT: Final = 30.0
"""Longest time without an arrival during last call, the wait for more nodes once `min` have joined.
Raise it when nodes start far apart and a small first round costs more than the wait. Last call ends
early when `max` have joined."""

LAST_CALL_QUIET: Final = 0.5
"""Last call ends when no node has arrived for this long (or for twice the largest gap between
arrivals so far, if that is longer). Raising it delays every elastic start."""

LAST_CALL_CAP_FACTOR: Final = 5.0
"""Last call ends this many times `last_call_timeout` after it began, even if nodes still arrive."""

HEARTBEAT_TIMEOUT: Final = 5.0
"""A node with a broken stream is dead after this long without traffic, counting the silence before
the break; raise it for networks that pause. Connected nodes: see SLUGGISH_DEAD."""

SUSPECT_CONFIRM: Final = 0.15
"""A node whose kernel closed its stream is declared dead after this time if ranks of its round
failed on another node too. A living agent redials immediately after a reset, and twice more within
this time. Raising it delays the detection of lost nodes, but fewer resets are taken for deaths."""

REDIAL_GRACE: Final = 0.5
"""Except under SUSPECT_CONFIRM, a node has at least this long to redial after its stream broke."""

BEAT_INTERVAL: Final = 1.0
"""Interval of an agent's heartbeats; raise it to save CPU at thousands of nodes."""

SLUGGISH_DEAD: Final = 60.0
"""A node that answers pings but sends no heartbeats is declared dead only after this long."""

STOPPED_AFTER: Final = 3.0
"""A stream that breaks after this long without traffic was broken by unanswered pings: the node is
stopped, or its network is down. If only the agent dies, the kernel closes its streams at once."""

MASTER_LOST_TIMEOUT: Final = 600.0
"""How long ranks keep training, and agents wait, without a reachable master."""

REATTACH_GRACE: Final = 15.0
"""How long a new master waits for nodes of the previous master's round that have not redialled."""

GROW_YOUNG: Final = 60.0
"""A round younger than this admits new nodes after a short last call: little work is lost."""

GROW_COOLDOWN: Final = 600.0
"""An older round admits new nodes once this much time has passed since it began (`--grow=now`:
without this wait)."""

MASS_SILENCE_HOLD: Final = 30.0
"""When more than half of a round's nodes fall silent together (in a round of three or more), the
master assumes that it is cut off itself, and declares no node dead for this long."""

EXCLUDE_SILENT_AFTER: Final = 2
"""After this many deaths by silence within ten minutes a node is in backoff for 2, 4, 8 ...
minutes."""

EXCLUDE_BRIEF_AFTER: Final = 3
"""A node is also put in backoff when this many of its incarnations died within ten minutes, each
less than RESTART_HEALTHY_AFTER after it entered a round. If this is raised, a node that crashes
whenever it trains costs more rounds before it is kept out."""

# ---------------------------------------------------------------- restarts

ELASTIC_RESTARTS: Final = 3
"""The default of --max-restarts for `--nnodes=MIN:MAX`, `submit` and ElasticJobs. A launch with a
fixed number of nodes has 0, as under torchrun."""

RESTART_BACKOFF: Final = 30.0
"""Longest wait before ranks that keep failing early are restarted; 0: never wait."""

RESTART_HEALTHY_AFTER: Final = 30.0
"""A round that ran this long was healthy: the restart after it is immediate again."""

RESTART_WINDOW: Final = 0.0
"""The restart budget counts failures within this many seconds; 0 counts the whole job."""

EXCLUDE_FAILING_AFTER: Final = 3
"""A node whose ranks were the root cause in this many consecutive rounds is put in backoff, if the
other nodes suffice. If this is raised, a bad machine costs more restarts before it is
recognised."""

STORM_NODES: Final = 16
"""In a round of this many nodes or more, a second loss soon after the first is treated as part of a
larger event (a switch, a rack): the next round waits until losses stop."""

STORM_WINDOW: Final = 120.0
"""A loss within this time of the previous one belongs to the same event."""

STORM_QUIET: Final = 60.0
"""Such an event is over after this long without a loss. Raise it if losses are further apart; if it
is lowered, an event spread over minutes costs more than two rounds."""

STORM_LONGEST: Final = 300.0
"""Longest time by which one such event delays a round."""

STANDBY_AFTER: Final = 10.0
"""Seconds after the start of ranks until their standbys are started (`--standby=auto`): by then the
script's own imports are done."""

# ---------------------------------------------------------------- node health

PROBE_LIMIT: Final = 60.0
"""Seconds for one probe of the network check; a probe that takes longer is killed and counts as
failed. Raise it if NCCL takes long to find its links (`--rdzv-conf probe_timeout=`)."""

PROBE_ANSWER_SLACK: Final = 10.0
"""Seconds beyond the probe's limit that the master waits for a node's answer; without an answer the
probe counts as failed."""


@dataclass(frozen=True, slots=True)
class ProbeLoad:
    """How much work one probe does on one kind of device. Raising a number makes the check slower
    and more accurate. The timed part takes about 0.2 s on a healthy machine."""

    matrix: int  # edge of the square matrices
    dtype: str  # torch's name of their type
    matmuls: int  # timed in a row; their mean counts
    size: int  # bytes of the all_reduce within a group of two or three nodes
    transfers: int  # timed all_reduces per size
    warmup: int  # matmuls and all_reduces before the timed ones
    perf_sizes: tuple[int, ...]  # bytes of the all_reduces of --comm-perf-test


MIB: Final = 1024 * 1024

PROBE_LOAD_CPU: Final = ProbeLoad(
    matrix=512,
    dtype="float32",
    matmuls=40,
    size=MIB,
    transfers=10,
    warmup=3,
    perf_sizes=(MIB, 4 * MIB, 16 * MIB),
)
"""A matmul takes 3 to 5 ms on one core: 40 run long enough to reveal a throttled core."""

PROBE_LOAD_GPU: Final = ProbeLoad(
    matrix=8192,
    dtype="bfloat16",
    matmuls=100,
    size=64 * MIB,
    transfers=20,
    warmup=5,
    perf_sizes=(64 * MIB, 256 * MIB, 1024 * MIB),
)
"""1.1 TFLOP per matmul fills any chip; at 64 MiB latency no longer dominates."""

SLOW_RATIO: Final = 1.5
"""A node is slow if it takes this multiple of the median of the others and is also an outlier by
their median absolute deviation. Raise it if nodes differ by design."""

SLOW_FOR: Final = 30.0
"""During training, a node is suspected after it was slow for this long without interruption."""

STRAGGLERS_PER_HOUR: Final = 2
"""Maximum number of nodes excluded as slow within an hour; if it is raised, wrong measurements can
shrink the job faster."""

EXCLUDE_FOR: Final = 3600.0
"""How long an excluded node is refused; after that it may return and is probed again."""

HEALTH_COMMAND_INTERVAL: Final = 60.0
HEALTH_COMMAND_TIMEOUT: Final = 30.0
"""Seconds between two runs of --health-cmd, and for one run."""

# ---------------------------------------------------------------- snapshots

REPLICA_LIMIT: Final = 120.0
"""Longest time for copying one snapshot to other nodes (`Checkpointer(replicas=1)`). After that the
snapshot gets no replicas and older ones may be overwritten. Raise it for large states on slow
networks."""

ORPHAN_GRACE: Final = 900.0
"""Seconds for which the shared memory of a killed agent is kept for the next agent of its job and
node, counted from when another agent of this user found it. It is released sooner if another job
needs the memory. Raise it if agents take longer to return."""

SAVE_LIMIT: Final = 120.0
"""Seconds that one attempt to write a checkpoint may take; after that it is abandoned and its
snapshot may be overwritten (`--save-limit`). Raise it for storage that is slow for the size of the
state."""

# ---------------------------------------------------------------- stopping

SHUTDOWN_TIMEOUT: Final = 30
"""Seconds between SIGTERM and SIGKILL for a rank that handles SIGTERM (torchrun's default)."""

DEPARTURE_GRACE: Final = 25.0
"""Seconds from a death signal until a node leaves, if its ranks can save a step first
(`--departure-grace`). It is 5 below Kubernetes' grace period for a pod. 0: the node leaves at
once."""

CHILD_EXIT_TIMEOUT: Final = 30.0
"""Seconds for which processes that ranks leave behind may keep running after a clean exit
(`--child-exit-timeout`), for example a final upload. 0: they are killed at once."""

SPAWN_TIMEOUT: Final = 300.0
"""How long the fork server may take to start all ranks of a node before the agent gives up on it;
raise it if executables are on a file system that takes minutes."""

RECALL_LIMIT: Final = 30.0
"""Seconds for a rank to leave its round without ending its process (`training.recoverable`); after
that it is stopped like any other. The limit of a node's first recall, and the maximum."""

MIN_RECALL_LIMIT: Final = 5.0
"""Minimum of the time limit that a node learns from its earlier recalls: a busy machine or a large
communicator takes seconds where the last time it took a tenth of one."""

STUCK_AFTER: Final = 30.0
"""A process that still exists this long after SIGKILL is in uninterruptible sleep: the node logs
it, and its agent exits with EXIT_BAD_NODE."""

LOG_DRAIN: Final = 0.5
"""How long the log of an exited rank is still copied to the console before the rest is dropped."""

# ---------------------------------------------------------------- leadership through etcd (seconds)

LEADER_TTL: Final = 3
"""Lease of the leadership: a master that is lost can be replaced this long after its last renewal.
If it is lowered, a pause of etcd causes a change of masters (which no rank notices); if it is
raised, losing a host costs more. etcd grants at least 2 s."""

LEADER_RENEW: Final = 0.75
"""Interval of the lease renewals; a confirmed renewal counts from the time it was sent."""

CANDIDATE_TTL: Final = 5
"""How long one agent may take to start a master before the next one tries."""

LEADER_CALL_LIMIT: Final = 0.8
"""Limit for a renewal at one etcd server: if it is down, there is time to try two others."""

OUTCOME_TTL: Final = 3600
"""How long etcd keeps the outcome of a job: an agent that arrives later reads it and starts
nothing."""

SAVED_OUTCOME_TTL: Final = 30
"""The same for a job that ended with EXIT_SAVED. Such a job is meant to be started again, even
under the same name; until then, agents that missed the end read its outcome."""

RECORD_TTL: Final = 7 * 24 * 3600
"""How long etcd keeps the record of a job whose nodes have all disappeared without ending it."""

ETCD_CALL_LIMIT: Final = 2.0
"""Limit for one call to one etcd server before the next server is tried."""

# ---------------------------------------------------------------- bounds

MAX_SESSIONS: Final = 20_000
"""Maximum number of nodes of one master; more are refused with a message."""

CONSOLE_QUEUE_LINES: Final = 10_000
"""Lines of rank output buffered while the terminal does not read; more are dropped and counted."""

# ---------------------------------------------------------------- exit codes

# A scheduler sees only the exit code (docs/decisions/024). The table in core/rounds/failures.py
# assigns one to each way a job ends.

EXIT_OK: Final = 0
"""Done."""
EXIT_FAILED: Final = 1
"""Failed, or ordered to leave with nothing saved: may be retried."""
EXIT_USAGE: Final = 2
"""The command line is wrong: a retry cannot help."""
EXIT_BAD_NODE: Final = 75
"""This node is bad: retry on another one."""
EXIT_FINAL: Final = 93
"""Must not be retried; a script also exits with it to say so."""
EXIT_SAVED: Final = 99
"""Ordered to leave, and a step that all ranks saved is in storage: resume from there."""

EXIT_PORT_TAKEN: Final = 79
"""The master's port is in use by another process (only the master exits with it)."""
EXIT_NOT_LEADING: Final = 80
"""Another master leads this job, or this one can no longer prove that it leads. Only a master whose
leadership is in etcd exits with it; its agents connect to the leader."""


FIRST_PORT: Final = 29400
"""The first port that the master tries if none was given; it takes the first free one."""

# ---------------------------------------------------------------- what the command line resolves to


@dataclass(frozen=True, slots=True)
class LogPlan:
    """Where the output of ranks goes; the numbers are torchrun's (0 none, 1 out, 2 err, 3 both)."""

    log_dir: str | None  # None: a fresh folder under $TMPDIR; "/dev/null": no files at all
    redirects: dict[int, int] = field(default_factory=dict)  # by local rank, else redirects_all
    redirects_all: int = 0
    tee: dict[int, int] = field(default_factory=dict)
    tee_all: int = 0
    local_ranks_filter: tuple[int, ...] | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    prefix_template: str = ""  # "": [${role_name}${local_rank}]:
    logs_specs: str | None = None  # name of an entry point of the group torchrun.logs_specs
    fold: bool = True  # lines that several ranks print are shown once on a terminal


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Where the job's run folder is, and what the launch writes into it."""

    folder: str = ""  # --run-dir, absolute; "": a fresh one below the user's own root
    name: str = ""  # for lists; "": the job's id
    unnamed: bool = False  # the user gave no name: `name` is the script's
    launch: str = ""  # 8 hexadecimal digits with which the job's id ends, if it was minted
    fresh: bool = False  # restart a succeeded job from the beginning
    command: tuple[str, ...] = ()
    program: tuple[str, ...] = ()  # what each rank runs: `Entrypoint.words`
    nproc: str = ""  # as the user asked for it
    where: str = "local"  # local, ssh, slurm, k8s
    workdir: str = ""  # where the command was typed; "": here
    tensorboard: str = ""  # folder of the TensorBoard served beside the master; "": none
    git_commit: str = ""  # of --git; "": what is checked out there


@dataclass(frozen=True, slots=True)
class JoinCommand:
    """What other nodes run to join: the words after `elasticrun`, flags first."""

    words: tuple[str, ...]
    program_at: int  # index in `words` of the script, module or command
    folder: str  # working directory of the node that wrote this

    def with_flags(self, *flags: str) -> tuple[str, ...]:
        """The words with more flags before the program."""
        return (*self.words[: self.program_at], *flags, *self.words[self.program_at :])


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files for a node's TLS. With `ca` alone, the node verifies the master and presents no
    certificate."""

    cert: str = ""
    key: str = ""
    ca: str = ""


@dataclass(frozen=True, slots=True)
class HealthCommandPlan:
    """The user's own health check, which each agent runs on its node."""

    command: str = ""  # for /bin/sh; "": none
    interval: float = HEALTH_COMMAND_INTERVAL
    timeout: float = HEALTH_COMMAND_TIMEOUT


@dataclass(frozen=True, slots=True)
class MasterPlan:
    """The part of a launch that the job's master needs."""

    status_port: int = 0  # 0: a free port
    on_event: str = ""  # a command or URL to which the master sends events; "": none
    # where each setting of the job's spec comes from, for display
    sources: dict[str, str] = field(default_factory=dict, compare=False)
    store: str = ""  # "etcd://host:port[,host:port]"; "": the master's own disk
    to_join: JoinCommand | None = None  # what other nodes run, if they join this master
    run: RunPlan = field(default_factory=RunPlan)


@dataclass(frozen=True, slots=True)
class Launch:
    """What the user asked of one agent; made by `cli.resolve`, and never changed."""

    spec: JobSpec  # without the job's id, which is in Identity
    entry: Entrypoint
    logs: LogPlan
    nproc_per_node: int
    node_rank: int = -1
    local_addr: str | None = None
    role: str = "default"
    # processes
    mode: str = "auto"  # auto, fork, exec
    start_method: str = "spawn"
    preload: tuple[str, ...] = ()
    warm: bool = False  # leave a warm process running
    standby: float = -1.0  # seconds after the ranks until their next life is started; -1: never
    python_exec: str = ""  # PYTHON_EXEC; "": this interpreter
    set_omp_threads: bool = False  # OMP_NUM_THREADS was unset and nproc > 1
    numa_binding: str | None = None
    numa_may_fail: bool = False  # ranks run unbound if binding fails
    virtual_local_rank: bool = False
    # stopping
    signals_to_handle: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    shutdown_timeout: float = SHUTDOWN_TIMEOUT
    exit_barrier_timeout: float | None = None  # None: as long as the job runs
    departure_grace: float = DEPARTURE_GRACE
    child_exit_timeout: float = CHILD_EXIT_TIMEOUT
    # events, checks
    event_log_handler: str = "null"
    precheck: int = 0  # 0: problems of this machine are logged; 1, 2: a failure ends the agent
    accelerator: str = ""  # "": detected; nvidia, ascend, cpu
    watch_devices: str = "auto"  # auto, tell, off
    health_command: HealthCommandPlan = field(default_factory=HealthCommandPlan)
    master: MasterPlan = field(default_factory=MasterPlan)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the master is and who starts it.

    kind "standalone": this agent starts one on loopback. "elastic": the agent whose address is in
    `host:port` starts it. "static": node rank 0 starts it, behind a port proxy on `port`, which the
    ranks see as MASTER_PORT. "external": it already runs at `host:port`. "etcd": the agents elect
    one of them, through `MasterPlan.store`, to start it on `port` (0: a free one). "file": the
    agent that claims the file `path` first starts it on the first free port from `port` on; the
    file contains its address, the job's id and the token. "open": this agent starts it, on the
    first free port too, and prints its address.
    """

    kind: str
    host: str = ""
    port: int = 0
    is_host: bool | None = None  # --rdzv-conf is_host
    path: str = ""  # path of the rendezvous file
    found: str = ""  # why that file was chosen, if the user gave none


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this job and this node are, and how they prove it. What the user does not give is minted:
    the job's id by `cli.resolve`, the token by `agent.link.trust`, the node's id by
    `agent.link.identity`. If `agent.rendezvous.finding` finds a job, its id and token are used
    instead."""

    job_id: str
    named: bool = False  # the user chose the job's id
    token: str = field(default="", repr=False)  # the job's secret; "": anyone may join
    tls: Tls | None = None
    node_id: str = ""  # "": not minted yet


def spec_of(launch: Launch, identity: Identity) -> JobSpec:
    """The job's spec as this node proposes it."""
    return structs.replace(launch.spec, job_id=identity.job_id)


@dataclass(frozen=True, slots=True)
class Caller:
    """The Python program that started the agent; failures reach it as exceptions."""

    console_fds: tuple[int, int]  # where tee'd output is shown: stdout's, stderr's
    variables: dict[str, str] = field(default_factory=dict)  # environment for every rank


@dataclass(frozen=True, slots=True)
class CalledLaunch:
    """What a Python program passes to the agent that it starts."""

    launch: Launch
    place: Place
    identity: Identity
    caller: Caller


@dataclass(frozen=True, slots=True)
class MasterConfig:
    """Everything a job master needs."""

    identity: Identity  # of the job; the node id in it has no effect
    host: str  # address to bind
    port: int  # 0: any
    spec: JobSpec | None  # None: that of the first agent
    launch: MasterPlan = field(default_factory=MasterPlan)
    status_host: str = "127.0.0.1"
    lifeline_fd: int = -1  # exit when this pipe reaches EOF (standalone); -1: none
    ready_fd: int = -1  # write one JSON line {"port":, "status_port":} here when serving, then one
    # byte for each byte received on lifeline_fd; -1: none
    replaces: str = ""  # how the previous master that this agent started ended, if it had served:
    # "was killed by signal 9"; "": there was none
    linger: float = 5.0  # seconds that agents have to receive the outcome
    record_dir: str = ""  # folder of record and trace, on a local disk; "": no record. If
    # `launch.store` is set, the record is in etcd and only the trace here
    advertise: str = ""  # host that agents dial if they find the master through etcd
    holder: str = ""  # incarnation of the agent that starts this master, in etcd's leader key
    log_dir: str = ""  # where incidents are written; "": the run folder
    outlive: bool = False  # at EOF of the lifeline, keep running while other agents are attached
    last_words: str = ""  # file for the job's result; "": none
