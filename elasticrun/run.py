"""The command line as a Python API, with the names of `torch.distributed.run`.

`run(args)` takes a namespace from our parser, from torch's, or built by a program (accelerate);
missing flags have their defaults. The job runs in a separate agent process, so the caller never
loads grpc. A failed job raises.
"""

from __future__ import annotations

if __name__ == "__main__":  # python -m elasticrun.run is the command, including the agent
    import _signal  # type: ignore[import-not-found]
    import os

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # as in __main__.py
        is_pid_1 = os.getpid() == 1
        _signal.signal(_signal.SIGINT, (lambda *_: os._exit(130)) if is_pid_1 else _signal.SIG_DFL)
    import sys

    from elasticrun.cli.main import main as command_line

    sys.exit(command_line())

import argparse
import importlib
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

from elasticrun.cli import flags, settings
from elasticrun.cli.devices import this_machine
from elasticrun.cli.main import check_program, notify
from elasticrun.cli.resolve import Resolved, resolve
from elasticrun.cli.settings import UsageError
from elasticrun.cli.trust import withdraw
from elasticrun.forkserver.functions.consoles import specs_of
from elasticrun.launcher import LaunchConfig, elastic_launch, run_program
from elasticrun.wire.types import EntryKind

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "elastic_launch",
    "get_args_parser",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]


def get_args_parser() -> argparse.ArgumentParser:
    """An argparse parser with every flag of torchrun and of elasticrun."""
    return flags.get_args_parser()


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line (None: sys.argv); exit the process on an error."""
    return get_args_parser().parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Parse a command line and run it; see `run`."""
    run(parse_args(args))


def run(args: argparse.Namespace) -> None:
    """Launch the job that the namespace describes; return when it has succeeded.

    Raises ChildFailedError if ranks failed and no restart was left, SignalException if this process
    received a death signal (torch's classes, if the caller has imported them), LaunchError for
    other failures, ValueError for invalid settings.
    """
    found = _resolve(args)
    for note in found.notes:
        notify(note)
    if found.delegate:
        notify(f"--rdzv-backend={found.delegate} is a torchrun plug-in: handing over to torchrun")
        importlib.import_module("torch.distributed.run").run(args)
        return
    run_program(found, found.launch.entry.target)


def config_from_args(
    args: argparse.Namespace,
) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """The namespace as arguments of `elastic_launch`: configuration, entry point, its arguments."""
    found = _resolve(args)
    entry = found.launch.entry
    command: Callable[..., Any] | str = found.launch.python_exec or sys.executable
    words = ["-u", entry.target]
    if entry.kind is EntryKind.RUN_PATH:
        command, words = run_script_path, [entry.target]
    elif entry.kind is EntryKind.MODULE:
        words = ["-u", "-m", entry.target]
    elif entry.kind is EntryKind.COMMAND:
        command, words = entry.target, []
    return _launch_config(args, found), command, [*words, *entry.args]


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """`N` or `MIN:MAX` as two numbers. Raises RuntimeError for more than one colon, and ValueError
    for other text, as torch's function does."""
    parts = nnodes.split(":")
    if len(parts) > 2:
        raise RuntimeError(f'nnodes={nnodes} is not in "MIN:MAX" format')
    return int(parts[0]), int(parts[-1])


def determine_local_world_size(nproc_per_node: str) -> int:
    """The number of local ranks that `N`, cpu, gpu, xpu, auto or the name of a private backend
    means on this node. Raises ValueError."""
    args = argparse.Namespace(
        nproc_per_node=str(nproc_per_node), standalone=True, training_script="-",
        training_script_args=(),
    )  # fmt: skip
    return _resolve(args).launch.nproc_per_node


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script in this interpreter, as `__main__`, with these arguments."""
    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")


def _resolve(args: argparse.Namespace) -> Resolved:
    try:
        found = resolve(args, withdraw(), this_machine(notify=notify))
        hint = check_program(found.launch.entry)
    except UsageError as error:
        raise ValueError(str(error)) from None
    if hint:
        notify(hint)
    return found


def _launch_config(args: argparse.Namespace, found: Resolved) -> LaunchConfig:
    launch, place = found.launch, found.place
    spec, logs = launch.spec, launch.logs
    static = place.kind in ("static", "open")  # torch's default if nothing is given
    endpoint = {
        "standalone": "localhost:0",
        "open": f"127.0.0.1:{settings.STATIC_PORT}",
        "file": f"file://{place.path}",
    }.get(place.kind, f"{place.host}:{place.port}")
    configs: dict[str, Any] = {**settings.pairs(getattr(args, "rdzv_conf", "") or "")}
    if static:
        configs["rank"] = launch.node_rank
    return LaunchConfig(
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        nproc_per_node=launch.nproc_per_node,
        logs_specs=specs_of(logs),
        run_id=found.identity.job_id,
        role=launch.role,
        rdzv_endpoint=endpoint,
        rdzv_backend="static" if static else "c10d",
        rdzv_configs=configs,
        max_restarts=spec.max_restarts,
        monitor_interval=float(getattr(args, "monitor_interval", 0.1)),
        start_method=launch.start_method,
        log_line_prefix_template=logs.prefix_template or None,
        local_addr=launch.local_addr,
        event_log_handler=launch.event_log_handler,
        numa_options=launch.numa_binding,
        signals_to_handle=",".join(launch.signals_to_handle),
        duplicate_stdout_filters=list(logs.stdout_filters) or None,
        duplicate_stderr_filters=list(logs.stderr_filters) or None,
        virtual_local_rank=launch.virtual_local_rank,
        shutdown_timeout=int(launch.shutdown_timeout),
    )
