"""The names of all environment variables, the only place with these strings; and fault injection.

There are three groups: what a rank gets (torchrun's table, plus names that no script uses), what
the launcher reads, and elasticrun's own. `PET_*` names are formed by the table of flags from the
flags' names and are not listed.

ELASTICRUN_FAULT injects faults into nodes; nothing is injected unless it is set.
`probe-fail@n2,slow=3x@n5` is a list of faults, each with the id of its node (`--node-id`; `rank-N`
in a static job) or `*` for every node:

probe-fail[=compute|comm|wrong]   its probes fail: in the matmul, in the all_reduce (the default),
                                  or by a matmul with a wrong result
probe-hang[=compute|meet|comm]    its probes hang forever in that phase (default: comm)
slow=3x                           its matmuls and all_reduces take three times as long (and at
                                  least 10 ms longer, so that it shows on a busy machine), and so
                                  does its own part of every step reported to
                                  `elasticrun.training`

Faults are for tests, and for people who want to see the consequences; the agent logs them
prominently. A rank or a probe gets the faults of its own node (`write_own_faults`), without the
node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# ---------------------------------------------------------------- what every rank is given

RANK: Final = "RANK"
LOCAL_RANK: Final = "LOCAL_RANK"
GROUP_RANK: Final = "GROUP_RANK"
ROLE_RANK: Final = "ROLE_RANK"
ROLE_NAME: Final = "ROLE_NAME"
WORLD_SIZE: Final = "WORLD_SIZE"
LOCAL_WORLD_SIZE: Final = "LOCAL_WORLD_SIZE"
GROUP_WORLD_SIZE: Final = "GROUP_WORLD_SIZE"
ROLE_WORLD_SIZE: Final = "ROLE_WORLD_SIZE"
MASTER_ADDR: Final = "MASTER_ADDR"
MASTER_PORT: Final = "MASTER_PORT"
RESTART_COUNT: Final = "TORCHELASTIC_RESTART_COUNT"
MAX_RESTARTS: Final = "TORCHELASTIC_MAX_RESTARTS"
RUN_ID: Final = "TORCHELASTIC_RUN_ID"
"""`torch.distributed.is_torchelastic_launched()` checks for its presence."""
USE_AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
SIGNALS_TO_HANDLE: Final = "TORCHELASTIC_SIGNALS_TO_HANDLE"
NCCL_ASYNC_ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
OMP_NUM_THREADS: Final = "OMP_NUM_THREADS"
CUDA_VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
HIP_VISIBLE_DEVICES: Final = "HIP_VISIBLE_DEVICES"

RANK_VARIABLES: Final = frozenset(
    {
        RANK,
        LOCAL_RANK,
        GROUP_RANK,
        ROLE_RANK,
        ROLE_NAME,
        WORLD_SIZE,
        LOCAL_WORLD_SIZE,
        GROUP_WORLD_SIZE,
        ROLE_WORLD_SIZE,
        MASTER_ADDR,
        MASTER_PORT,
        RESTART_COUNT,
        MAX_RESTARTS,
        RUN_ID,
        USE_AGENT_STORE,
        ERROR_FILE,
    }
)
"""Variables that identify the rank: a module that reads one of them at import must not be
preloaded, because every rank forked from that import would see the same value.
"""

# ---------------------------------------------------------------- what the launcher reads

LOGLEVEL: Final = "LOGLEVEL"
PYTHON_EXEC: Final = "PYTHON_EXEC"
LOG_LINE_PREFIX_TEMPLATE: Final = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
SHUTDOWN_TIMEOUT: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
EXIT_BARRIER_TIMEOUT: Final = "TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT"
XDG_RUNTIME_DIR: Final = "XDG_RUNTIME_DIR"
HOME: Final = "HOME"

DLROVER_MASTER_ADDR: Final = "DLROVER_MASTER_ADDR"
NODE_RANK: Final = "NODE_RANK"
NODE_NUM: Final = "NODE_NUM"

# ---------------------------------------------------------------- what fixes thread placement

PLACEMENT_VARIABLES: Final = (
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
)
"""An OpenMP runtime fixes its places according to these variables when it is loaded, so an affinity
mask set after a fork is too late: ranks bound to cores are exec'd if one of them is set.
"""

# ---------------------------------------------------------------- elasticrun's own

LAUNCH: Final = "ELASTICRUN_LAUNCH"
RUN_FOLDER: Final = "ELASTICRUN_RUN_FOLDER"
"""The value of --run-dir, for the ranks."""
RUNS: Final = "ELASTICRUN_RUNS"
"""Where this user's run folders are, instead of the state folder in the home."""
ON: Final = "ELASTICRUN_ON"
"""Where `elasticrun submit` starts jobs, instead of this host."""
WARM_SERVER: Final = "ELASTICRUN_WARM_SERVER"
"""The socket of the warm process to use, instead of the one in the user's folder; `off`: none."""
RESTART_BACKOFF: Final = "ELASTICRUN_RESTART_BACKOFF"

STATE_DIR: Final = "ELASTICRUN_STATE_DIR"
"""The default of `elasticrun master --state-dir`."""

LAST_WORDS: Final = "ELASTICRUN_LAST_WORDS"
"""The file from which a pod's termination message is read. `elasticrun master` writes the job's
result to it, every other launcher the reason for its exit (`host/runs/last_word.py`).
"""

CLUSTER_NODE: Final = "ELASTICRUN_CLUSTER_NODE"
"""In a pod: its node in the cluster; the pod's successor may be on another one."""

TRACE_DIR: Final = "ELASTICRUN_TRACE_DIR"
"""Where masters that agents host keep their traces permanently, one folder per launch; without it a
trace is deleted with the record when the job ends.
"""

GIT_USERNAMES: Final = ("ELASTICRUN_GIT_USERNAME", "GIT_SYNC_USERNAME")
GIT_PASSWORDS: Final = ("ELASTICRUN_GIT_PASSWORD", "GIT_SYNC_PASSWORD")
"""Credentials of --git; of each, the first that is set is used. The second names are git-sync's."""

BY_SSH: Final = "ELASTICRUN_BY_SSH"
"""Set if --hosts has started this agent."""

CALLER: Final = "ELASTICRUN_CALLER"
"""In ranks that run a function: a mark by which their caller finds the processes that they leave
behind.
"""

FAULT: Final = "ELASTICRUN_FAULT"
"""Faults to inject for tests, with their nodes; read by the agent (`wire/env.py`)."""

NODE_FAULT: Final = "ELASTICRUN_NODE_FAULT"
"""In ranks of a node with injected faults: these faults. Otherwise it is not set."""

PROGRESS: Final = "ELASTICRUN_PROGRESS"
"""In ranks: where `elasticrun.training.progress` reports steps (`wire/progress.py`)."""

SNAPSHOTS: Final = "ELASTICRUN_SNAPSHOTS"
"""In ranks: where `elasticrun.training.Checkpointer` connects to its agent
(`wire/snapshots.py`)."""

SHIM: Final = "ELASTICRUN_SHIM"
"""The folder of `elasticrun shim`, in the environment of its command; never in ranks."""

SHM_DIR: Final = "ELASTICRUN_SHM_DIR"
"""Where segments are stored: a folder on a tmpfs; default: /dev/shm."""

# ---------------------------------------------------------------- torch's own recorder

FLIGHT_RECORDER_SIZE: Final = "TORCH_FR_BUFFER_SIZE"
NCCL_TRACE_SIZE: Final = "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""The older name of the same variable."""
NCCL_ENABLE_TIMING: Final = "TORCH_NCCL_ENABLE_TIMING"


EVERY_NODE: Final = "*"

MAX_SLOW: Final = 100.0
"""Maximum factor; a larger one is a typo."""

MAX_FAULTS: Final = 1000
"""Maximum number of faults in a list."""


class FaultKind(StrEnum):
    """Kinds of injected faults."""

    PROBE_FAIL = "probe-fail"
    PROBE_HANG = "probe-hang"
    SLOW = "slow"


VALUES: Final[Mapping[FaultKind, tuple[str, ...]]] = {
    FaultKind.PROBE_FAIL: ("comm", "compute", "wrong"),
    FaultKind.PROBE_HANG: ("comm", "compute", "meet"),
}
"""Allowed values after `=`; the first one is the default."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One injected fault. `node` is a node id, or `*`; it is "" in the list that a node passes to
    its own processes."""

    kind: FaultKind
    value: str  # one of VALUES, or the factor of a slow node: `3x`
    node: str

    @property
    def text(self) -> str:
        """The fault as text, without the node."""
        return f"{self.kind}={self.value}"


class BadFault(ValueError):
    """The list of faults is invalid; the text is one sentence that names the invalid part."""


def read_faults(text: str) -> tuple[Fault, ...]:
    """All faults in a list. Raises BadFault."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) > MAX_FAULTS:
        raise BadFault(f"{FAULT} lists {len(parts)} faults; at most {MAX_FAULTS} are allowed")
    found = []
    for part in parts:
        what, at, node = part.rpartition("@")
        if not at or not node.strip():
            raise BadFault(f"{FAULT}: {part[:60]!r} names no node: it is written name[=value]@node")
        found.append(_read_fault(what, part, node.strip()))
    return tuple(found)


def faults_of_node(text: str, node: str) -> tuple[Fault, ...]:
    """The faults in a list that concern this node, in order. Raises BadFault."""
    return tuple(fault for fault in read_faults(text) if fault.node in (node, EVERY_NODE))


def write_own_faults(faults: Iterable[Fault]) -> str:
    """The text for processes of the node with these faults (`wire.env.NODE_FAULT`, and
    `ProbePlan.fault`); "" for none."""
    return ",".join(fault.text for fault in faults)


def read_own_faults(text: str) -> tuple[Fault, ...]:
    """The inverse of `write_own_faults`; the faults have no node. Ignores invalid parts: a training
    script must not fail because of them."""
    found = []
    for part in text.split(",")[:MAX_FAULTS]:
        with suppress(BadFault):
            found.append(_read_fault(part, part, ""))
    return tuple(found)


def fault_value(faults: Iterable[Fault], kind: FaultKind) -> str:
    """The value of the first fault of this kind, "" if there is none."""
    return next((fault.value for fault in faults if fault.kind is kind), "")


def slowness(faults: Iterable[Fault]) -> float:
    """The factor by which the node's own work is slowed down; 1.0 without such a fault."""
    return _factor(fault_value(faults, FaultKind.SLOW)) or 1.0


def _read_fault(what: str, part: str, node: str) -> Fault:
    name, equals, value = (word.strip() for word in what.partition("="))
    try:
        kind = FaultKind(name)
    except ValueError:
        known = ", ".join(FaultKind)
        raise BadFault(f"{FAULT}: {part[:60]!r} is no fault; there are {known}") from None
    if kind is FaultKind.SLOW:
        if not _factor(value):
            most = f"{MAX_SLOW:g}"
            raise BadFault(f"{FAULT}: {part[:60]!r} needs a factor from 1x to {most}x: slow=3x")
        return Fault(kind, value, node)
    values = VALUES[kind]
    if equals and value not in values:
        raise BadFault(f"{FAULT}: {part[:60]!r}: {kind} may be {', '.join(values)}")
    return Fault(kind, value or values[0], node)


def _factor(value: str) -> float:
    """The factor in the text; 0.0 if it is invalid."""
    try:
        factor = float(value.removesuffix("x"))
    except ValueError:
        return 0.0
    return factor if 1.0 <= factor <= MAX_SLOW else 0.0
