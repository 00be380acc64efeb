"""Every environment variable by name; the only place where the strings stand.

Three groups: what a rank is given (torchrun's table, and nothing of ours that a script could
stumble over), what the launcher reads, and what elasticrun itself adds. `PET_*` names are formed by
the table of flags from the flags' own names and are not listed.
"""

from __future__ import annotations

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
"""Its presence is what `torch.distributed.is_torchelastic_launched()` means."""
USE_AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
SIGNALS_TO_HANDLE: Final = "TORCHELASTIC_SIGNALS_TO_HANDLE"
NCCL_ASYNC_ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
OMP_NUM_THREADS: Final = "OMP_NUM_THREADS"
CUDA_VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"

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
"""What says *which* rank a process is: a module that reads one of them while it is imported must
not be preloaded, since every rank forked from that import would believe the same."""

# ---------------------------------------------------------------- what the launcher reads

LOGLEVEL: Final = "LOGLEVEL"
PYTHON_EXEC: Final = "PYTHON_EXEC"
LOG_LINE_PREFIX_TEMPLATE: Final = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
SHUTDOWN_TIMEOUT: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
EXIT_BARRIER_TIMEOUT: Final = "TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT"
PET_PREFIX: Final = "PET_"
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
"""An OpenMP runtime fixes its places by these when it is loaded, so a mask that is set after a fork
comes too late; ranks that are bound to cores are exec'd where one is set."""

# ---------------------------------------------------------------- elasticrun's own

LAUNCH: Final = "ELASTICRUN_LAUNCH"
PRELOAD: Final = "ELASTICRUN_PRELOAD"
WARM_SERVER: Final = "ELASTICRUN_WARM_SERVER"
"""The socket of the warm process to use, in the place of the one in the run folder; `off`: none."""
RESTART_BACKOFF: Final = "ELASTICRUN_RESTART_BACKOFF"

STATE_DIR: Final = "ELASTICRUN_STATE_DIR"
"""The default of `elasticrun master --state-dir`."""

TRACE_DIR: Final = "ELASTICRUN_TRACE_DIR"
"""Where masters that agents host leave their traces for good, a folder for each launch; without it
a trace goes with the record when the job ends."""

CALLER: Final = "ELASTICRUN_CALLER"
"""In ranks whose program is a function: by this mark their caller knows what they left behind."""

FAULT: Final = "ELASTICRUN_FAULT"
"""Faults to plant for tests, with the nodes that shall have them; read by the agent
(`wire/faults.py`)."""

NODE_FAULT: Final = "ELASTICRUN_NODE_FAULT"
"""In ranks of a node with planted faults: which they are. Not set otherwise."""

PROGRESS: Final = "ELASTICRUN_PROGRESS"
"""In ranks: where `elasticrun.training.progress` tells their steps (`wire/progress.py`)."""

SNAPSHOTS: Final = "ELASTICRUN_SNAPSHOTS"
"""In ranks: where `elasticrun.training.Checkpointer` speaks to its agent (`wire/snapshots.py`)."""

SHM_DIR: Final = "ELASTICRUN_SHM_DIR"
"""Where segments are kept; a folder on a tmpfs, /dev/shm if it is not set."""

# ---------------------------------------------------------------- torch's own recorder

FLIGHT_RECORDER_SIZE: Final = "TORCH_FR_BUFFER_SIZE"
NCCL_TRACE_SIZE: Final = "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""The older name of the same."""
NCCL_ENABLE_TIMING: Final = "TORCH_NCCL_ENABLE_TIMING"
