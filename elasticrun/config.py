"""Every setting with its default: what it is, and what raising it does.

`Default*` constants are the numbers; the dataclasses are what the command line resolves to and what
the agent and the master are started with. Nothing here reads the environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from elasticrun.wire.messages import JobSpec
from elasticrun.wire.spawner import Entry

# ---------------------------------------------------------------- rendezvous (seconds)

JOIN_TIMEOUT: Final = 600.0
"""How long nodes wait for `min` nodes before the job ends; raise it for slow schedulers."""

LAST_CALL_TIMEOUT: Final = 30.0
"""Cap of last call, the wait for more nodes once `min` are there; raise it when nodes start far
apart and a small first round costs more than the wait. Cut short when `max` are there."""

LAST_CALL_QUIET: Final = 1.0
"""Last call ends when no node has joined for this long (or for twice the largest gap between joins
so far, if that is longer); raise it and every elastic start takes longer."""

LAST_CALL_CAP_FACTOR: Final = 5.0
"""Last call ends this many times `last_call_timeout` after it began, whoever still joins."""

HEARTBEAT_TIMEOUT: Final = 5.0
"""Silence on every channel after which a node is dead; raise it for networks that pause."""

SUSPECT_CONFIRM: Final = 0.5
"""A node whose stream broke is dead this much later if another node's ranks lost it too; raise it
and node loss costs more, but fewer resets look like deaths."""

BEAT_INTERVAL: Final = 1.0
"""How often an agent's loop says that it lives; raise it to save CPU at thousands of nodes."""

SLUGGISH_DEAD: Final = 60.0
"""Missing beats alone, with pings answered, kill a node only after this long."""

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

# ---------------------------------------------------------------- restarts

RESTART_BACKOFF: Final = 30.0
"""Longest wait between restarts of ranks that die again at once; 0 never waits."""

RESTART_HEALTHY_AFTER: Final = 30.0
"""A rank that lived this long was healthy: its next restart is immediate again."""

RESTART_WINDOW: Final = 0.0
"""The restart budget counts failures of this many seconds; 0 counts the whole job."""

# ---------------------------------------------------------------- stopping

SHUTDOWN_TIMEOUT: Final = 30
"""Seconds between SIGTERM and SIGKILL for a rank that handles SIGTERM (torchrun's default)."""

STUCK_AFTER: Final = 30.0
"""A process still there this long after SIGKILL is in uninterruptible sleep: the node says so."""

LOG_DRAIN: Final = 0.5
"""How long the console copy of a dead rank's log is still read before the tail is given up."""

# ---------------------------------------------------------------- bounds

MAX_NODES: Final = 100_000
"""A claim above this is a typing error."""

MAX_SESSIONS: Final = 20_000
"""Streams one master serves; more are refused with a sentence."""

CONSOLE_QUEUE_LINES: Final = 10_000
"""Lines of rank output held for a frozen terminal; beyond it lines are dropped and counted."""

# ---------------------------------------------------------------- exit codes

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_STUCK: Final = 75
"""A process the kernel would not let die is left on this node."""
EXIT_BELOW_MIN: Final = 76
"""Too few nodes, for `join_timeout` long."""
EXIT_MASTER_LOST: Final = 77
"""Ranks had failed or could not finish, and no master answered for `master_lost_timeout`."""
EXIT_REFUSED: Final = 78
"""The master would not have this node: wrong version, wrong job, a node id that is taken."""
EXIT_PORT_TAKEN: Final = 79
"""The master could not listen: somebody else holds its port (only the master ends with it)."""


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


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the master is and who starts it.

    kind "standalone": this agent starts one on loopback. "elastic": the agent whose address
    `host:port` names starts it. "static": node rank 0 does, behind a door on `port`, which the
    ranks see as MASTER_PORT. "external": somebody else has started it at `host:port`.
    """

    kind: str
    host: str = ""
    port: int = 0
    is_host: bool | None = None  # --rdzv-conf is_host


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """All that one agent needs to know; made by `cli.resolve` or `elasticrun.launcher`."""

    spec: JobSpec
    rendezvous: Rendezvous
    entry: Entry
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
    preload_learn: bool = False
    python_exec: str = ""  # PYTHON_EXEC; "": this interpreter
    set_omp_threads: bool = False  # OMP_NUM_THREADS was unset and nproc > 1
    numa_binding: str | None = None
    numa_affinity: bool = False  # dlrover-run's word
    membind_policy: str | None = None
    virtual_local_rank: bool = False
    # stopping
    signals_to_handle: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    shutdown_timeout: float = SHUTDOWN_TIMEOUT
    exit_barrier_timeout: float | None = None  # None: as long as the job runs
    # events, status
    event_log_handler: str = "null"
    status_port: int = 0  # 0: one that is free
    notes: tuple[str, ...] = ()  # sentences to print once at the start
    env: dict[str, str] = field(default_factory=dict)  # further variables for every rank
    delegate: str = ""  # a rendezvous plug-in, which torch's own launcher must serve
    called: bool = False  # from Python: the caller's exception tells of failures, not the agent


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
    ready_fd: int = -1  # write one JSON line {"port":, "status_port":} here when serving; -1: none
    linger: float = 5.0  # how long agents have to hear the outcome
    outlive: bool = False  # at EOF of the lifeline go on for as long as other agents are attached
