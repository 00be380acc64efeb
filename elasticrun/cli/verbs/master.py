"""`elasticrun master`: a job master started by hand, for a host or a pod that runs no ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import structs

from elasticrun.cli import settings, trust
from elasticrun.cli.flags import PROG, Parser, add_group
from elasticrun.cli.rendezvous import RendezvousPlan
from elasticrun.cli.resolve import conf_keys, job_spec
from elasticrun.cli.settings import FlagValues, UsageError
from elasticrun.cli.table import FLAGS, TRUST
from elasticrun.config import EXIT_USAGE, Identity, MasterConfig, MasterPlan, Place, RunPlan
from elasticrun.host import user_folder
from elasticrun.wire import env

JOB_FLAGS: Final = (
    "nnodes",
    "node_unit",
    "rdzv_conf",
    "max_restarts",
    "restart_window",
    "restart_backoff",
    "restart_grace",
    "grow",
    "exit_codes",
    "network_check",
    "comm_perf_test",
    "comm_perf_threshold",
    "precheck",
    "exclude_straggler",
    "straggler_ratio",
    "exclude_for",
    "save_at_breakpoint",
    "save_limit",
    "restore_step",
    "on_corruption",
    "on_hang",
    "hang_limit",
    "slot_price",
)
"""Flags that form the job's spec. If none of them is given, the first agent's spec applies."""


def parser(environ: dict[str, str]) -> Parser:
    """The parser of `elasticrun master`; the job's flags are the launcher's."""
    made = Parser(
        prog=f"{PROG} master",
        description="Run the job master, which agents reach by --rdzv-endpoint=HOST:PORT.",
        epilog="Without flags of the job, those of the first agent apply. --precheck means the "
        "checks of the job here (1: --network-check; 2: also --comm-perf-test); a node checks its "
        "own machine if it has the flag itself.",
    )
    made.add_argument(
        "--host", default="0.0.0.0", metavar="HOST", help="Address to bind. [default 0.0.0.0]"
    )
    made.add_argument(
        "--port", type=int, default=settings.C10D_PORT, metavar="PORT",
        help=f"Port to bind; 0: any free port. [default {settings.C10D_PORT}]",
    )  # fmt: skip
    made.add_argument(
        "--status-host", "--status_host", default="127.0.0.1", metavar="HOST",
        help="Address of the status page. [default 127.0.0.1]",
    )  # fmt: skip
    made.add_argument(
        "--state-dir", "--state_dir", default=environ.get(env.STATE_DIR, ""), metavar="DIR",
        help="Folder on a disk of this host in which the job's record is kept: a restarted "
        "master continues from it, and knows if the job is over "
        f"(or ${env.STATE_DIR}). [default none: agents report the round]",
    )  # fmt: skip
    names = ("rdzv_id", "status_port", "on_event", "run_dir", "fresh", *JOB_FLAGS)
    add_group(made, "the job", [flag for flag in FLAGS if flag.dest in names], environ)
    add_group(made, "who may join", TRUST, environ)
    return made


def configure(argv: Sequence[str], environ: dict[str, str]) -> MasterConfig:
    """The configuration for the words after `elasticrun master`. Raises `UsageError`."""
    ns = parser(environ).parse_args(argv)
    flags = FlagValues(ns, environ)
    job_id = settings.name(flags.text("rdzv_id"), "--rdzv-id")
    spec, conf = None, conf_keys(flags)
    if any(flags.is_given(dest) for dest in JOB_FLAGS):
        low, high = settings.nodes(flags.text("nnodes"))
        plan = RendezvousPlan(Place("elastic"), job_id, low, high, -1)
        spec = job_spec(flags, conf, plan)
        spec = structs.replace(spec, job_id=job_id)
    return MasterConfig(
        identity=Identity(job_id, token=trust.token(flags), tls=trust.tls(flags)),
        host=settings.host_name(ns.host, "--host"),
        port=settings.port(ns.port, "--port"),
        spec=spec,
        launch=MasterPlan(
            status_port=settings.port(flags.number("status_port"), "--status-port"),
            on_event=flags.text("on_event"),
            sources=settings.sources(flags, conf),
            run=RunPlan(
                folder=flags.text("run_dir"),
                name=job_id,
                fresh=flags.switch("fresh"),
                command=("elasticrun", "master", *argv),
            ),
        ),
        status_host=settings.host_name(ns.status_host, "--status-host"),
        record_dir=state_dir(ns.state_dir),
        last_words=environ.get(env.LAST_WORDS, ""),
    )


def state_dir(text: str) -> str:
    """The absolute path of the record's folder, created and checked; "" for "". Raises
    `UsageError`."""
    if not text:
        return ""
    folder = Path(text).absolute()
    try:
        user_folder.prepare_folder(folder)
    except user_folder.Unusable as wrong:
        raise UsageError(f"--state-dir: {wrong}", EXIT_USAGE) from None
    return str(folder)
