"""Launches ranks from Python: `LaunchConfig`, `elastic_launch`, `launch_agent`.

Names, fields, defaults and results are those of `torch.distributed.launcher`. The agent runs in a
separate process, so the caller has no grpc threads and may fork its ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import os
import secrets
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elasticrun.cli.devices import this_machine
from elasticrun.cli.resolve import EntryPlan, Resolved, resolve
from elasticrun.cli.settings import UsageError
from elasticrun.cli.trust import withdraw
from elasticrun.config import CHILD_EXIT_TIMEOUT
from elasticrun.core.events import Exit
from elasticrun.errors import LaunchError, child_failed_error, signal_exception
from elasticrun.forkserver.functions.agent_process import AgentProcess, signals_passed_on
from elasticrun.forkserver.functions.consoles import log_plan_of
from elasticrun.forkserver.functions.function_spawner import FunctionSpawner
from elasticrun.wire import env
from elasticrun.wire.types import EntryKind, Entrypoint

__all__ = ["LaunchConfig", "LaunchError", "elastic_launch", "launch_agent"]

logger = logging.getLogger("elasticrun")

T = TypeVar("T")


def _ignore_unknown_fields(cls: type[T]) -> type[T]:
    """Class decorator: `__init__` ignores unknown fields (of a later torch), and logs a warning
    that names them."""
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    generated = cls.__init__

    @functools.wraps(generated)
    def init(self: T, *args: Any, **fields: Any) -> None:
        unknown = [name for name in fields if name not in known]
        if unknown:
            logger.warning("LaunchConfig: %s has no effect here", ", ".join(unknown))
        generated(self, *args, **{name: fields[name] for name in fields if name in known})

    cls.__init__ = init  # type: ignore[assignment]
    return cls


@_ignore_unknown_fields
@dataclass
class LaunchConfig:
    """What to launch on how many nodes; fields and defaults are torch's (2.13 and later).

    `rdzv_backend` defaults to "etcd", as in torch, but etcd is never used: a job of one node
    without an endpoint needs no rendezvous, and with more nodes `rdzv_endpoint` names the node
    whose agent starts the job master, whatever the backend's name. `monitor_interval` and
    `metrics_cfg` have no effect (nothing is polled; the job master's status page has metrics).
    $ELASTICRUN_ON_HANG, $ELASTICRUN_HANG_LIMIT and $ELASTICRUN_CHILD_EXIT_TIMEOUT set what has no
    field. `logs_specs` is torch's DefaultLogsSpecs or None; for your own class use the entry-point
    group `torchrun.logs_specs`.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        elif "timeout" not in self.rdzv_configs:
            self.rdzv_configs["timeout"] = 900
        if self.shutdown_timeout is None:
            self.shutdown_timeout = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
        elif self.shutdown_timeout < 0:
            raise ValueError(
                f"shutdown_timeout must not be negative, it is {self.shutdown_timeout}"
            )


class elastic_launch:
    """`elastic_launch(config, entrypoint)(*args)` runs the entry point as ranks of this node.

    The entry point is a function (called with `args` in every rank) or the path of a program
    (executed with `args`). Returns the results of this node's ranks by global rank (None for
    programs).
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: Any = None,
    ) -> None:
        if health_check_server is not None:
            logger.warning("elastic_launch: health_check_server has no effect here")
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, list(args))


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any = None,
) -> dict[int, Any]:
    """Run one agent to the end of its job; see `elastic_launch`. Sets an empty `config.run_id`, and
    TORCHELASTIC_SIGNALS_TO_HANDLE in the environment of this process.

    Raises ChildFailedError if ranks failed and no restart was left, SignalException if this process
    received a death signal meanwhile (both are torch's classes if the caller has imported them),
    LaunchError for other failures, ValueError for an invalid configuration.
    """
    if health_check_server is not None:
        logger.warning("launch_agent: health_check_server has no effect here")
    if entrypoint is None:
        raise ValueError("there is no entry point: pass a function or the path of a program")
    if not config.run_id:
        config.run_id = str(uuid.uuid4().int)
        logger.warning("config has no run_id, generated a random run_id: %s", config.run_id)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    found = resolve_config(config, entrypoint, args)
    for note in found.notes:
        logger.warning("%s", note)
    name = entrypoint_name(entrypoint, args)
    if callable(entrypoint):
        return run_function(found, entrypoint, tuple(args), name)
    return run_program(found, name)


def entrypoint_name(entrypoint: Callable[..., Any] | str | None, args: list[Any]) -> str:
    """The entry point's name in a summary of failures: the function's name, the program, or, if the
    program is this interpreter, its script."""
    if callable(entrypoint):
        return str(getattr(entrypoint, "__name__", type(entrypoint).__name__))
    if entrypoint == sys.executable:
        return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
    return entrypoint or ""


def resolve_config(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: list[Any]
) -> Resolved:
    """Resolve the configuration as the command line does. Raises ValueError if it is invalid."""
    numa = config.numa_options
    program = EntryPlan(
        entry=entry_of(entrypoint, args),
        logs=log_plan_of(config),
        set_omp_threads=False,  # as in torch, only the command line sets it
        numa_binding=_numa_word(numa),
        numa_may_fail=getattr(numa, "should_fall_back_if_binding_fails", False),
    )
    try:
        found = resolve(_as_flags(config), withdraw(), this_machine(), sys.argv, program)
    except UsageError as error:
        raise ValueError(str(error)) from None
    if found.delegate:
        raise ValueError(
            f"rdzv_backend={config.rdzv_backend} is a torch plug-in: use torch.distributed."
            "launcher for it"
        )
    return found


def entry_of(entrypoint: Callable[..., Any] | str, args: list[Any]) -> Entrypoint:
    """The entry point as the spawner needs it. This interpreter with a script or a module becomes
    SCRIPT or MODULE, so that its ranks can be forked."""
    if callable(entrypoint):
        return Entrypoint(EntryKind.FUNCTION, entrypoint_name(entrypoint, args))
    words = [str(arg) for arg in args]
    if entrypoint == sys.executable:
        rest = words[1:] if words[:1] == ["-u"] else words
        if len(rest) > 1 and rest[0] == "-m":
            return Entrypoint(EntryKind.MODULE, rest[1], tuple(rest[2:]))
        if rest and not rest[0].startswith("-"):
            return Entrypoint(EntryKind.SCRIPT, rest[0], tuple(rest[1:]))
    return Entrypoint(EntryKind.COMMAND, entrypoint, tuple(words))


def run_program(found: Resolved, name: str) -> dict[int, Any]:
    """Run an agent whose ranks are programs. Return None for each rank of this node; the global
    ranks assume that every node has as many ranks. Raises as `launch_agent` does."""
    raise_for(_outcome(found), name)
    nproc = found.launch.nproc_per_node
    first = max(found.launch.node_rank, 0) * nproc
    return dict.fromkeys(range(first, first + nproc))


def run_function(
    found: Resolved, function: Callable[..., Any], args: tuple[Any, ...], name: str
) -> dict[int, Any]:
    """Run an agent whose ranks call a function. Return their results by global rank. Raises as
    `launch_agent` does."""
    token = secrets.token_hex(8)
    mark = f"{env.CALLER}={token}".encode()
    spawner = FunctionSpawner(function, args, found.launch.start_method, mark)
    raise_for(_outcome(found, spawner, {env.CALLER: token}), name)
    return spawner.results()


def _outcome(
    found: Resolved,
    spawner: FunctionSpawner | None = None,
    variables: Mapping[str, str] | None = None,
) -> Exit:
    """Run an agent until it exits; neither the agent nor its ranks are left. `variables`: extra
    environment variables of every rank."""
    end = None if spawner is None else spawner.agents_end
    agent = AgentProcess(found.launch, found.place, found.identity, end, variables or {})
    try:
        with signals_passed_on(agent, found.launch.signals_to_handle) as handlers:
            if spawner is not None:
                spawner.handlers = handlers
                spawner.serve(agent)
            return agent.wait()
    finally:
        agent.give_up()
        agent.close()


def raise_for(outcome: Exit, name: str) -> None:
    """Raise the exception that this outcome stands for; no-op for success."""
    if outcome.signum:
        raise signal_exception(outcome.signum)
    if outcome.failures:
        raise child_failed_error(name, outcome.failures)
    if outcome.code:
        raise LaunchError(outcome.reason, outcome.code)


def _as_flags(config: LaunchConfig) -> argparse.Namespace:
    """The configuration as command-line flags; missing ones have their defaults."""
    one_node = config.max_nodes == 1
    backend, endpoint = config.rdzv_backend, config.rdzv_endpoint.strip()
    if backend in ("etcd", "etcd-v2") and not endpoint:  # torch's default is etcd
        if not one_node:
            raise ValueError(
                "with more than one node LaunchConfig needs rdzv_backend='c10d' and "
                "rdzv_endpoint='HOST:PORT', the node whose agent starts the job master"
            )
        backend = "c10d"
    conf = {key: value for key, value in config.rdzv_configs.items() if value is not None}
    rank = conf.pop("rank", -1)
    if backend != "static":
        conf.pop("timeout", None)  # torch's default for all backends; only static uses it
    return argparse.Namespace(
        nnodes=f"{config.min_nodes}:{config.max_nodes}",
        nproc_per_node=str(config.nproc_per_node),
        rdzv_backend=backend,
        rdzv_endpoint=endpoint or ("localhost:0" if one_node else ""),
        rdzv_id=config.run_id,
        rdzv_conf=",".join(f"{key}={value}" for key, value in conf.items()),
        node_rank=rank,
        role=config.role,
        max_restarts=config.max_restarts,
        start_method=config.start_method,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        signals_to_handle=config.signals_to_handle,
        virtual_local_rank=config.virtual_local_rank,
        shutdown_timeout=config.shutdown_timeout,
        on_hang=os.environ.get("ELASTICRUN_ON_HANG") or "auto",
        hang_limit=os.environ.get("ELASTICRUN_HANG_LIMIT") or 0,
        child_exit_timeout=os.environ.get("ELASTICRUN_CHILD_EXIT_TIMEOUT") or CHILD_EXIT_TIMEOUT,
        training_script="",
        training_script_args=[],
    )


def _numa_word(options: Any) -> str | None:
    """The --numa-binding value for torch's NumaOptions."""
    if options is None:
        return None
    mode = getattr(options, "affinity_mode", options)
    return str(getattr(mode, "value", mode))
