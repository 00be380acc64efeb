"""Every setting with its default: what it is, and what raising it does.

The constants are the numbers; the dataclasses are what the command line resolves to and what
the agent and the master are started with: as JSON (`wire.types`) over inherited descriptors,
between processes of one installation, so that there is no version to negotiate. Nothing here reads
the environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from elasticrun.wire.messages import JobSpec
from elasticrun.wire.types import Entrypoint

MAX_CONFIG_BYTES = 8 * 1024 * 1024
"""More than an environment and a command line can be (2 MB each on Linux) with JSON's escapes."""

# ---------------------------------------------------------------- rendezvous (seconds)

JOIN_TIMEOUT: Final = 600.0
"""How long nodes wait for `min` nodes before the job ends; raise it for slow schedulers."""

LAST_CALL_TIMEOUT: Final = 30.0
"""Cap of last call, the wait for more nodes once `min` are there; raise it when nodes start far
apart and a small first round costs more than the wait. Cut short when `max` are there."""

LAST_CALL_QUIET: Final = 0.5
"""Last call ends when no node has joined for this long (or for twice the largest gap between joins
so far, if that is longer); raise it and every elastic start takes longer."""

LAST_CALL_CAP_FACTOR: Final = 5.0
"""Last call ends this many times `last_call_timeout` after it began, whoever still joins."""

HEARTBEAT_TIMEOUT: Final = 5.0
"""Silence on every channel after which a node is dead; raise it for networks that pause."""

SUSPECT_CONFIRM: Final = 0.15
"""A node whose stream its kernel has closed is dead this much later if another node's ranks lost it
too: an agent that lives dials again at once after a reset, and twice more until then. Raise it and
node loss costs more, but fewer resets look like deaths."""

REDIAL_GRACE: Final = 0.5
"""After a silence a node has at least this long to dial again, once its stream is found broken."""

BEAT_INTERVAL: Final = 1.0
"""How often an agent's loop says that it lives; raise it to save CPU at thousands of nodes."""

SLUGGISH_DEAD: Final = 60.0
"""Missing beats alone, with pings answered, kill a node only after this long."""

STOPPED_AFTER: Final = 3.0
"""A stream on which nothing had come for so long was broken by pings that nobody answered: the node
stands still, or its network does. Where an agent dies, the kernel closes its streams at once."""

MASTER_LOST_TIMEOUT: Final = 600.0
"""How long ranks train on, and agents wait, with no master to be heard."""

REATTACH_GRACE: Final = 15.0
"""How long a master without a record waits for the nodes of the round that agents report."""

GROW_YOUNG: Final = 60.0
"""A round younger than this lets newcomers in at once: little work is lost."""

GROW_COOLDOWN: Final = 600.0
"""An older round lets them in when this long has passed since it began (`--grow=now`: at once)."""

MASS_SILENCE_HOLD: Final = 30.0
"""When more than half of a round's nodes (of three at least) fall silent together, the master takes
itself for the one cut off, and gives no verdict for this long."""

EXCLUDE_SILENT_AFTER: Final = 2
"""How many deaths by silence in ten minutes send a node to wait 2, 4, 8 ... minutes at the door."""

EXCLUDE_BRIEF_AFTER: Final = 3
"""How many lives of a node in ten minutes that died within RESTART_HEALTHY_AFTER of being let into
a round send it to the door likewise, where the others are enough; raise it and a node that crashes
whenever it trains costs more rounds before it is kept out."""

# ---------------------------------------------------------------- restarts

ELASTIC_RESTARTS: Final = 3
"""The default of --max-restarts for `--nnodes=MIN:MAX`, `submit` and ElasticJobs. A launch with a
fixed number of nodes has 0, as under torchrun."""

RESTART_BACKOFF: Final = 30.0
"""Longest wait between restarts of ranks that die again at once; 0 never waits."""

RESTART_HEALTHY_AFTER: Final = 30.0
"""A rank that lived this long was healthy: its next restart is immediate again."""

RESTART_WINDOW: Final = 0.0
"""The restart budget counts failures of this many seconds; 0 counts the whole job."""

EXCLUDE_FAILING_AFTER: Final = 3
"""A node whose ranks were the root cause of this many rounds in a row is left out, where the others
are enough; raise it and a bad machine costs more restarts before it is known for one."""

STORM_NODES: Final = 16
"""From this many nodes on, a second loss soon after the first is taken for part of a bigger event
(a switch, a rack): the next round waits until no more are lost."""

STORM_WINDOW: Final = 120.0
"""How soon after the one before a loss belongs to the same event."""

STORM_QUIET: Final = 60.0
"""Such an event is over when nothing more was lost for so long. Raise it where losses come further
apart; lower it and an event spread over minutes costs more than two rounds."""

STORM_LONGEST: Final = 300.0
"""An event that does not end holds a round back for this long in all."""

# ---------------------------------------------------------------- node health

PROBE_LIMIT: Final = 60.0
"""Seconds for one probe of the network check, after which it is killed and has failed; raise it
where NCCL takes long to find its links (`--rdzv-conf probe_timeout=`)."""

PROBE_ANSWER_SLACK: Final = 10.0
"""How much longer than its limit the master waits for a node's answer until it counts as failed."""


@dataclass(frozen=True, slots=True)
class ProbeLoad:
    """How much one probe does on one kind of device; raise a number and the check takes longer and
    measures better. What is timed comes to some 0.2 s, on a machine that is well."""

    matrix: int  # edge of the square matrices
    dtype: str  # torch's name of their type
    matmuls: int  # timed in a row; their mean is what counts
    size: int  # bytes of the all_reduce within a group of two or three nodes
    transfers: int  # timed all_reduces, of each size
    warmup: int  # matmuls and all_reduces before those that are timed
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
"""A matmul takes 3 to 5 ms on one core: 40 are long enough that a throttled core cannot hide."""

PROBE_LOAD_GPU: Final = ProbeLoad(
    matrix=8192,
    dtype="bfloat16",
    matmuls=100,
    size=64 * MIB,
    transfers=20,
    warmup=5,
    perf_sizes=(64 * MIB, 256 * MIB, 1024 * MIB),
)
"""1.1 TFLOP a matmul, which fills any chip; 64 MiB is beyond what latency hides."""

SLOW_RATIO: Final = 1.5
"""A node is slow when it takes this multiple of the median of the others, and is an outlier by
their median absolute deviation too; raise it where nodes differ by design."""

SLOW_FOR: Final = 30.0
"""While training, a node is suspected after it was slow for this long without a break."""

STRAGGLERS_PER_HOUR: Final = 2
"""At most so many nodes are excluded for being slow within an hour; raise it and a wrong measure
can shrink the job faster."""

EXCLUDE_FOR: Final = 3600.0
"""How long an excluded node is refused; then it may come back and is probed anew."""

# ---------------------------------------------------------------- snapshots

REPLICA_LIMIT: Final = 120.0
"""Longest time for copying one snapshot to second nodes (`Checkpointer(replicas=1)`), after which
this one has no replicas and older ones may be overwritten; raise it for large states on slow
networks."""

ORPHAN_GRACE: Final = 900.0
"""Seconds for which the memory of an agent that was killed waits for the next one of its job and
node, since another agent of this user found it so; raise it where agents take longer to come back.
It is given up sooner where another job has no room without it."""

SAVE_LIMIT: Final = 120.0
"""Seconds that one attempt to write a checkpoint may take until it is given up and its snapshot may
be overwritten (`--save-limit`); raise it for storage that is slow for the size of the state."""

# ---------------------------------------------------------------- stopping

SHUTDOWN_TIMEOUT: Final = 30
"""Seconds between SIGTERM and SIGKILL for a rank that handles SIGTERM (torchrun's default)."""

DEPARTURE_GRACE: Final = 25.0
"""Seconds from a death signal until a node leaves, where its ranks can save a step before
(`--departure-grace`); 5 below what Kubernetes gives a pod. 0: it leaves at once."""

CHILD_EXIT_TIMEOUT: Final = 30.0
"""Seconds for which processes that ranks have left running may go on after a clean end
(`--child-exit-timeout`): an upload that a script starts last, say. 0: they are ended at once."""

SPAWN_TIMEOUT: Final = 300.0
"""How long the fork server may take to start all ranks of a node before the agent gives it up;
raise it where executables come from a file system that takes minutes."""

STUCK_AFTER: Final = 30.0
"""A process still there this long after SIGKILL is in uninterruptible sleep: the node says so."""

LOG_DRAIN: Final = 0.5
"""How long the console copy of a dead rank's log is still read before the tail is given up."""

# ---------------------------------------------------------------- mastership by etcd (seconds)

LEADER_TTL: Final = 3
"""Lease of the leadership: a lost master is succeeded this long after its last word to etcd. Lower
it and a pause of etcd's costs a change of masters (which no rank notices); raise it and a lost host
costs more. etcd itself grants 2 s at the least."""

LEADER_RENEW: Final = 0.75
"""How often the master renews that lease; a renewal that is answered counts from its sending."""

CANDIDATE_TTL: Final = 5
"""How long one agent may take to start a master before the next one tries."""

LEADER_CALL_LIMIT: Final = 0.8
"""How long one etcd server may take to renew it: one that is down leaves time for two others."""

OUTCOME_KEPT: Final = 3600
"""How long etcd remembers how a job ended: who comes later is told, and starts nothing."""

SAVED_KEPT: Final = 30
"""The same for a job that ended with EXIT_SAVED: it is to be started again, under the same name
too; until then agents that did not hear of the end are told."""

RECORD_KEPT: Final = 7 * 24 * 3600
"""How long etcd keeps the record of a job whose nodes have all gone without an end."""

ETCD_CALL_LIMIT: Final = 2.0
"""How long one call to one etcd server may take before the next server is asked."""

# ---------------------------------------------------------------- bounds

MAX_SESSIONS: Final = 20_000
"""Streams one master serves; more are refused with a sentence."""

CONSOLE_QUEUE_LINES: Final = 10_000
"""Lines of rank output held for a frozen terminal; beyond it lines are dropped and counted."""

# ---------------------------------------------------------------- exit codes

# What a scheduler is told, which sees nothing else (docs/decisions/024). Which end of a job has
# which is a table in core/rounds/failures.py.

EXIT_OK: Final = 0
"""Done."""
EXIT_FAILED: Final = 1
"""Failed, or told to leave with nothing saved: may be tried again."""
EXIT_USAGE: Final = 2
"""The command line is wrong: trying it again cannot help."""
EXIT_BAD_NODE: Final = 75
"""This node is bad: try again on another one."""
EXIT_FINAL: Final = 93
"""Not to be tried again; also what a script ends with to say so."""
EXIT_SAVED: Final = 99
"""Told to leave, and a step that all ranks have saved is in storage: go on from there."""

EXIT_PORT_TAKEN: Final = 79
"""The master could not listen: somebody else holds its port (only the master ends with it)."""
EXIT_NOT_LEADING: Final = 80
"""Another master leads this job, or this one cannot prove any more that it does (only a master
whose leadership is in etcd ends with it; its agents go to the one that leads)."""


FIRST_PORT: Final = 29400
"""Where a master listens that nobody has named a port for, or at the first free one after it."""

# ---------------------------------------------------------------- what the command line resolves to


@dataclass(frozen=True, slots=True)
class LogPlan:
    """Where the output of ranks goes; the words are torchrun's (0 none, 1 out, 2 err, 3 both)."""

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
    fold: bool = True  # lines of several ranks on a terminal are told once


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Where the job's run folder is, and what is written into it of the launch."""

    folder: str = ""  # --run-dir, absolute; "": a fresh one below the user's own root
    name: str = ""  # for lists; "": the job's id
    unnamed: bool = False  # nobody has named it: `name` is its script's
    fresh: bool = False  # run again what has succeeded, from the beginning
    command: tuple[str, ...] = ()
    program: tuple[str, ...] = ()  # what each rank runs: `Entrypoint.words`
    nproc: str = ""  # as it was asked for
    where: str = "local"  # local, ssh, slurm, k8s
    workdir: str = ""  # where it was typed; "": here
    tensorboard: str = ""  # the folder that TensorBoard shows beside the master; "": none
    git_commit: str = ""  # of --git; "": what is checked out there


@dataclass(frozen=True, slots=True)
class JoinCommand:
    """What other nodes run to join: the words behind `elasticrun`, flags first."""

    words: tuple[str, ...]
    program_at: int  # index in `words` of the script, module or command
    folder: str  # working directory of the node that wrote this

    def with_flags(self, *flags: str) -> tuple[str, ...]:
        """The words with more flags in front of the program."""
        return (*self.words[: self.program_at], *flags, *self.words[self.program_at :])


@dataclass(frozen=True, slots=True)
class MasterPlace:
    """Where the master is and who starts it.

    kind "standalone": this agent starts one on loopback. "elastic": the agent whose address
    `host:port` names starts it. "static": node rank 0 does, behind a door on `port`, which the
    ranks see as MASTER_PORT. "external": somebody else has started it at `host:port`. "etcd": the
    agents choose one of them to start it, by way of `master_store`, on `port` (0: a free one).
    "file": whoever claims the file `path` first, on the first free port from `port` on; the file
    says where, and has the job's id and token. "open": this agent, likewise, and people are told.
    """

    kind: str
    host: str = ""
    port: int = 0
    is_host: bool | None = None  # --rdzv-conf is_host
    path: str = ""  # of the rendezvous file
    found: str = ""  # why that file, where nobody has named it
    named: bool = False  # the job's id is the user's


@dataclass(frozen=True, slots=True)
class Tls:
    """Files (PEM) of a node's TLS; `ca` alone checks the master and shows nothing of us."""

    cert: str = ""
    key: str = ""
    ca: str = ""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """All that one agent needs to know; made by `cli.resolve` or `elasticrun.launcher`."""

    spec: JobSpec
    rendezvous: MasterPlace
    entry: Entrypoint
    logs: LogPlan
    nproc_per_node: int
    node_rank: int = -1
    node_id: str = ""  # "": host id and slot
    local_addr: str | None = None
    role: str = "default"
    # processes
    launch: str = "auto"  # auto, fork, exec
    start_method: str = "spawn"
    preload: tuple[str, ...] = ()
    warm: bool = False  # leave a warm process behind
    python_exec: str = ""  # PYTHON_EXEC; "": this interpreter
    set_omp_threads: bool = False  # OMP_NUM_THREADS was unset and nproc > 1
    numa_binding: str | None = None
    numa_may_fail: bool = False  # ranks run unbound where that fails
    virtual_local_rank: bool = False
    # stopping
    signals_to_handle: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    shutdown_timeout: float = SHUTDOWN_TIMEOUT
    exit_barrier_timeout: float | None = None  # None: as long as the job runs
    departure_grace: float = DEPARTURE_GRACE
    child_exit_timeout: float = CHILD_EXIT_TIMEOUT
    # events, status
    event_log_handler: str = "null"
    console_fds: tuple[int, ...] = (1, 2)  # where tee'd output is shown: stdout's, stderr's
    status_port: int = 0  # 0: one that is free
    on_event: str = ""  # a command or URL that the master tells what happens; "": nobody
    notes: tuple[str, ...] = ()  # sentences to print once at the start
    # who set what of `spec`, for people
    sources: dict[str, str] = field(default_factory=dict, compare=False)
    to_join: JoinCommand | None = None  # what other nodes run, where the nodes meet here
    env: dict[str, str] = field(default_factory=dict)  # further variables for every rank
    delegate: str = ""  # a rendezvous plug-in, which torch's own launcher must serve
    token: str = field(default="", repr=False)  # the job's secret; "": none was given
    tls: Tls | None = None
    master_store: str = ""  # "etcd://host:port[,host:port]"; "": the master's own disk
    precheck: int = 0  # 0: what is wrong with this machine is told; 1, 2: a failure ends the agent
    accelerator: str = ""  # "": found by itself; nvidia, ascend, cpu
    called: bool = False  # from Python: the caller's exception tells of failures, not the agent
    run: RunPlan = field(default_factory=RunPlan)


@dataclass(frozen=True, slots=True)
class MasterConfig:
    """All that a job master needs to know."""

    job_id: str
    host: str  # address to bind
    port: int  # 0: any
    spec: JobSpec | None  # None: the first agent's
    status_host: str = "127.0.0.1"
    status_port: int = 0
    lifeline_fd: int = -1  # end when this pipe reaches EOF (standalone); -1: none
    ready_fd: int = -1  # write one JSON line {"port":, "status_port":} here when serving, then one
    # byte for each that comes on lifeline_fd; -1: none
    replaces: str = ""  # what became of the one that this agent had started before, and that has
    # served: "was killed by signal 9"; "": there was none
    linger: float = 5.0  # how long agents have to hear the outcome
    token: str = field(default="", repr=False)  # agents prove it; "": anyone may join
    tls: Tls | None = None
    record_dir: str = ""  # folder of record and trace, on a local disk; "": no record
    master_store: str = ""  # as in AgentConfig; the record is there then, the trace in record_dir
    advertise: str = ""  # host under which a master found by way of etcd is dialled
    holder: str = ""  # names the life of the agent that starts this master, in etcd's leader key
    log_dir: str = ""  # where incidents are written; "": the run folder
    on_event: str = ""  # as in AgentConfig
    sources: dict[str, str] = field(default_factory=dict)  # as in AgentConfig
    outlive: bool = False  # at EOF of the lifeline go on for as long as other agents are attached
    last_words: str = ""  # file that the job's result is left in; "": none
    to_join: JoinCommand | None = None  # as in AgentConfig: what a node with a join code is given
    run: RunPlan = field(default_factory=RunPlan)
