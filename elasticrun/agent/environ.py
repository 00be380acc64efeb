"""The environment and the arguments of a rank: torchrun's table, as pure functions.

What a rank sees is the launcher's own environment (which the spawner inherited) with these
variables set over it. The strings stand in `wire.env`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from string import Template

from elasticrun.config import AgentConfig
from elasticrun.wire import env
from elasticrun.wire.entry import Entry, EntryKind
from elasticrun.wire.ids import Endpoint
from elasticrun.wire.messages import Start


class BadEnvironment(Exception):
    """What the user set cannot be given to a rank; the text is one sentence."""


def master_endpoint(config: AgentConfig, start: Start) -> Endpoint:
    """What the ranks see as MASTER_ADDR and MASTER_PORT.

    Of a static job it is exactly what the user named, as under torchrun: the door there leads on to
    the round's store (decision 008). Else it is the round's store itself."""
    where = config.rendezvous
    if where.kind == "static":
        return Endpoint(where.host, where.port)
    return start.store


def rank_environment(
    config: AgentConfig,
    start: Start,
    local_rank: int,
    environ: Mapping[str, str],
    error_file: str,
    progress: str = "",
    snapshots: str = "",
) -> dict[str, str]:
    """Every variable that this rank gets over the launcher's own environment.

    `environ` is the launcher's environment; `error_file` is "" where no file is written, `progress`
    where nobody hears of its steps, `snapshots` where nobody takes its snapshots. Raises
    BadEnvironment when CUDA_VISIBLE_DEVICES names fewer devices than virtual local ranks need."""
    master = master_endpoint(config, start)
    table = {
        env.RANK: str(start.first_rank + local_rank),
        env.LOCAL_RANK: str(local_rank),
        env.GROUP_RANK: str(start.group_rank),
        env.ROLE_RANK: str(start.role_first_rank + local_rank),
        env.ROLE_NAME: config.role,
        env.WORLD_SIZE: str(start.world_size),
        env.LOCAL_WORLD_SIZE: str(config.nproc_per_node),
        env.GROUP_WORLD_SIZE: str(start.group_world_size),
        env.ROLE_WORLD_SIZE: str(start.role_world_size),
        env.MASTER_ADDR: master.host,
        env.MASTER_PORT: str(master.port),
        env.RESTART_COUNT: str(start.restart_count),
        env.MAX_RESTARTS: str(config.spec.max_restarts),
        env.RUN_ID: config.spec.job_id,
        env.USE_AGENT_STORE: "True",
        env.ERROR_FILE: error_file,
        env.SIGNALS_TO_HANDLE: ",".join(config.signals_to_handle),
        env.NCCL_ASYNC_ERROR_HANDLING: environ.get(env.NCCL_ASYNC_ERROR_HANDLING, "1"),
    }
    if config.set_omp_threads:
        table[env.OMP_NUM_THREADS] = "1"
    if progress:
        table[env.PROGRESS] = progress
    if snapshots:
        table[env.SNAPSHOTS] = snapshots
    if config.virtual_local_rank:
        table[env.LOCAL_RANK] = "0"
        table[env.CUDA_VISIBLE_DEVICES] = _only_device(local_rank, environ)
    table.update(config.env)
    return table


def probe_environment(
    config: AgentConfig, local_rank: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """What a probe gets over the launcher's own environment: that of the rank in whose place it
    computes, without what says which rank that is. Raises BadEnvironment as for a rank."""
    table = {}
    if config.set_omp_threads:
        table[env.OMP_NUM_THREADS] = "1"
    if config.virtual_local_rank:
        table[env.CUDA_VISIBLE_DEVICES] = _only_device(local_rank, environ)
    table.update(config.env)
    return table


def _only_device(local_rank: int, environ: Mapping[str, str]) -> str:
    visible = environ.get(env.CUDA_VISIBLE_DEVICES)
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise BadEnvironment(
            f"--virtual-local-rank: local rank {local_rank} has no device of its own in "
            f"{env.CUDA_VISIBLE_DEVICES}={visible}"
        )
    return devices[local_rank].strip()


def rank_entry(entry: Entry, local_rank: int) -> Entry:
    """The entry with `${local_rank}` filled in, where torchrun does: in the arguments and, unless
    the program is executed itself, in its name. Other `$` words stay as they are."""

    def fill(word: str) -> str:
        return Template(word).safe_substitute(local_rank=local_rank)

    target = entry.target if entry.kind is EntryKind.COMMAND else fill(entry.target)
    return replace(entry, target=target, args=tuple(fill(word) for word in entry.args))
