"""Resolves flags and environment to `Launch`, `Place` and `Identity`. Facts about the machine come
from `Machine`.

Variables inherited from an outer launcher (RANK, WORLD_SIZE, MASTER_ADDR, ...) are not read here;
if a Kubernetes operator uses them for its nodes, `detection` handles that.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elasticrun import config
from elasticrun.cli import rendezvous, settings, table, trust
from elasticrun.cli.detection.found import Machine
from elasticrun.cli.detection.kubernetes import POD
from elasticrun.cli.place import detect_place
from elasticrun.cli.rendezvous import RendezvousPlan, resolve_rendezvous
from elasticrun.cli.settings import FlagValues, NotHere, NothingToDo, UsageError
from elasticrun.cli.table import TORCHRUN
from elasticrun.config import (
    Identity,
    JoinCommand,
    Launch,
    LogPlan,
    MasterPlan,
    Place,
    RunPlan,
    Tls,
)
from elasticrun.core.words import did_you_mean, plural
from elasticrun.host import accelerators
from elasticrun.wire import env
from elasticrun.wire.messages import CheckSpec, JobSpec, SaveSpec, WatchSpec
from elasticrun.wire.types import EntryKind, Entrypoint

__all__ = ["Machine", "UsageError", "resolve"]

LOGS_GROUP: Final = "torchrun.logs_specs"

_TIMES: Final = {
    "join_timeout": config.JOIN_TIMEOUT,
    "last_call_timeout": config.LAST_CALL_TIMEOUT,
    "heartbeat_timeout": config.HEARTBEAT_TIMEOUT,
    "master_lost_timeout": config.MASTER_LOST_TIMEOUT,
    "grow_cooldown": config.GROW_COOLDOWN,
}
"""Keys of --rdzv-conf that are times, with their defaults."""
_MAY_BE_ZERO: Final = ("last_call_timeout", "grow_cooldown")

_HEALTH_TIMES: Final = {
    "probe_timeout": config.PROBE_LIMIT,
    "straggler_time": config.SLOW_FOR,
}
"""Keys of --rdzv-conf that are times of node health, with their defaults."""

AUTO_CHECK_NODES: Final = 4
"""Minimum number of nodes for which --auto-config checks the network, as in dlrover-run."""

_OTHER_KEYS: Final = ("is_host", "store_type", "node_unit", "rank")
_ALIASES: Final = {"lastcall_timeout": "last_call_timeout", "heartbeat": "heartbeat_timeout"}
_WITHOUT_EFFECT: Final = (
    "close_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "read_timeout",
    "pend_timeout",
    "timeout",
    "protocol",
)

MAX_UNKNOWN_LISTED: Final = 5
"""Maximum number of unknown variables listed in a note."""

_FOREIGN_VARIABLES: Final = re.compile(
    r"ELASTICRUN_((JOB_UID|TRAINJOB)$|(TEST|STEP|LAB|REWRITE)(_|$)|(.*_)?SERVICE_(HOST|PORT)|(.*_)?PORT(_\d|$))"
)
"""Variables set by manifests and tests, or by Kubernetes in every pod if a Service has our name."""

_ONE_THREAD: Final = (
    "OMP_NUM_THREADS is 1 in each rank, so that together they do not overload this machine; set it "
    "to override this"
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A command line or a LaunchConfig, resolved."""

    launch: Launch
    place: Place
    identity: Identity
    notes: tuple[str, ...] = ()  # sentences to print once at the start
    delegate: str = ""  # the rendezvous plug-in that needs torch's own launcher


@dataclass(frozen=True, slots=True)
class EntryPlan:
    """What ranks run and how: from a Python caller's objects, or from the command line's flags."""

    entry: Entrypoint
    logs: LogPlan
    set_omp_threads: bool = False
    numa_binding: str | None = None
    numa_may_fail: bool = False


def resolve(
    ns: argparse.Namespace,
    environ: Mapping[str, str],
    machine: Machine,
    command: Sequence[str] = (),
    program: EntryPlan | None = None,
) -> Resolved:
    """Resolve what the user asked for. `command`: the words typed; `program`: from a Python caller,
    who has typed none. Raises `UsageError` if it is impossible, and `NothingToDo` if another task
    on this node is the agent."""
    place = detect_place(FlagValues(ns, environ), machine)
    if place.idle:
        raise NothingToDo(place.idle)
    flags = FlagValues(ns, environ, place.filled)
    notes: list[str] = [place.note] if place.note else []
    conf = conf_keys(flags)
    # Python callers provide no facts; for them torchrun's rules apply
    bare = machine.facts is not None and place.found is None
    plan = resolve_rendezvous(flags, conf, machine, bare=bare)
    if plan.delegate:
        _require_torchrun_flags(flags, plan.delegate)
    notes += plan.notes
    notes += _conf_notes(conf, plan.place.kind)
    nproc = ranks_per_node(flags, machine, notes)
    spec = job_spec(flags, conf, plan, debugged=machine.debugged)
    # with --git the ranks run in a folder other than the one in which the command was typed
    typed_in = rendezvous.working_folder() if command and flags.text("git") else ""
    ranks = program or _program(flags, machine, nproc, typed_in)
    notes += [_ONE_THREAD] if ranks.set_omp_threads else []
    _check_choices(flags)
    notes += [
        *health_notes(flags, spec.checks),
        *_no_effect_notes(flags),
        *_unknown_variable_notes(environ),
    ]
    token, tls = trust.token(flags), _tls(flags, typed_in)
    if not plan.delegate:
        settings.name(plan.job_id, "--rdzv-id")
        notes += trust.notes(plan.place, plan.max_nodes, token, tls)
    master = MasterPlan(
        status_port=settings.port(flags.number("status_port"), "--status-port"),
        on_event=flags.text("on_event"),
        sources=settings.sources(flags, conf),
        store=plan.store,
        to_join=None if program else _join_command(flags, plan, spec, command),
        run=run_plan(flags, command, () if program else ranks.entry.words(), typed_in, plan.minted),
    )
    launch = _launch(flags, plan.node_rank, nproc, spec, ranks, master)
    node_id = _node_id(flags, plan)
    identity = Identity(plan.job_id, plan.named, token, tls, node_id)
    return Resolved(launch, plan.place, identity, tuple(notes), plan.delegate)


def _launch(
    flags: FlagValues,
    node_rank: int,
    nproc: int,
    spec: JobSpec,
    ranks: EntryPlan,
    master: MasterPlan,
) -> Launch:
    return Launch(
        spec=spec,
        entry=ranks.entry,
        logs=ranks.logs,
        nproc_per_node=nproc,
        node_rank=node_rank,
        local_addr=flags.value("local_addr") or None,
        role=settings.name(flags.text("role"), "--role"),
        mode=flags.text("launch"),
        start_method=flags.text("start_method"),
        preload=settings.modules(flags.text("preload")),
        warm=flags.switch("warm"),
        standby=settings.standby(flags.text("standby")),
        python_exec=flags.environ.get("PYTHON_EXEC", ""),
        set_omp_threads=ranks.set_omp_threads,
        numa_binding=ranks.numa_binding,
        numa_may_fail=ranks.numa_may_fail,
        virtual_local_rank=flags.switch("virtual_local_rank"),
        **_stopping(flags),
        event_log_handler=flags.text("event_log_handler"),
        precheck=precheck(flags),
        accelerator=accelerator(flags),
        watch_devices=flags.text("watch_devices"),
        health_command=health_command(flags),
        master=master,
    )


def _program(flags: FlagValues, machine: Machine, nproc: int, typed_in: str) -> EntryPlan:
    """The program and its logs, from the flags. Raises `UsageError`."""
    binding, affinity = flags.value("numa_binding"), flags.switch("numa_affinity")
    return EntryPlan(
        entry=entry_of(flags),
        logs=_log_plan(flags, machine, typed_in),
        set_omp_threads="OMP_NUM_THREADS" not in flags.environ and nproc > 1,
        numa_binding=binding or ("node" if affinity else None),
        numa_may_fail=affinity and not binding,
    )


def _join_command(
    flags: FlagValues, plan: RendezvousPlan, spec: JobSpec, command: Sequence[str]
) -> JoinCommand | None:
    """The command with which other nodes join, if a file or this node is the rendezvous."""
    if plan.place.kind not in ("file", "open") or not command:
        return None
    # nodes that meet through a file have the same command line, which implies the same --grow
    grow = spec.grow if plan.place.kind == "open" else ""
    typed = FlagValues(flags.ns, flags.environ)
    return rendezvous.join_command(command[1:], typed, rendezvous.working_folder(), grow)


def _path(path: str, typed_in: str) -> str:
    """A flag's path, made absolute with the folder in which the command was typed. With "" for that
    folder it is unchanged, because the ranks run there too."""
    return str(Path(typed_in, path)) if path and typed_in else path


def _tls(flags: FlagValues, typed_in: str) -> Tls | None:
    files = trust.tls(flags)
    if files is None:
        return None
    return Tls(*(_path(path, typed_in) for path in (files.cert, files.key, files.ca)))


def run_plan(
    flags: FlagValues, command: Sequence[str], program: Sequence[str], typed_in: str, minted: str
) -> RunPlan:
    """The run folder, and what is known of the job when it begins. `minted`: as in RendezvousPlan.
    Raises `UsageError`."""
    folder, fresh = flags.text("run_dir"), flags.switch("fresh")
    if fresh and not folder:
        raise UsageError("--fresh needs --run-dir")
    logdir, shows = flags.text("logdir"), flags.switch("tensorboard")
    if shows != bool(logdir):
        raise UsageError("--tensorboard and --logdir DIR belong together: give both")
    stem = str(flags.ns.training_script).rstrip("/").rpartition("/")[2].removesuffix(".py")
    own = flags.text("rdzv_id") if flags.is_given("rdzv_id") else ""
    on = {env.BY_SSH: "ssh", "SLURM_JOB_ID": "slurm", POD: "k8s"}
    return RunPlan(
        folder=_path(folder, typed_in),
        name=settings.job_name(flags.text("name"), own or stem),
        unnamed=not (flags.text("name") or own),
        launch=minted,
        fresh=fresh,
        command=tuple(command),
        program=tuple(program) if command else (),
        workdir=typed_in,
        git_commit=_commit(flags) if typed_in else "",
        tensorboard=_path(logdir, typed_in),
        nproc=flags.text("nproc_per_node"),
        where=next((place for name, place in on.items() if name in flags.environ), "local"),
    )


def _commit(flags: FlagValues) -> str:
    """The commit in --git."""
    from elasticrun.agent.workers.checkout import parse_source  # late: few jobs use it

    return parse_source(flags.text("git")).ref


def _node_id(flags: FlagValues, plan: RendezvousPlan) -> str:
    """The node's id. In a static job the node rank identifies a node across its restarts."""
    static = plan.place.kind == "static" and plan.node_rank >= 0
    given = settings.name(flags.text("node_id"), "--node-id")
    return given or (f"rank-{plan.node_rank}" if static else "")


def conf_keys(flags: FlagValues) -> dict[str, str]:
    """The pairs of --rdzv-conf, with the key aliases replaced by our keys. Raises `UsageError`."""
    found = settings.pairs(flags.text("rdzv_conf"))
    return {_ALIASES.get(key, key): value for key, value in found.items()}


def job_spec(
    flags: FlagValues, conf: Mapping[str, str], plan: RendezvousPlan, *, debugged: bool = False
) -> JobSpec:
    """The job's settings, without its id. `debugged`: a debugger may stop the ranks. Raises
    `UsageError`."""
    restarts = flags.number("max_restarts")
    if not flags.is_given("max_restarts") and plan.min_nodes < plan.max_nodes:
        restarts = config.ELASTIC_RESTARTS
    if restarts < 0:
        raise UsageError(f"--max-restarts={restarts}: must not be negative")
    unit = flags.number("node_unit")
    if not flags.is_given("node_unit") and "node_unit" in conf:
        text = conf["node_unit"]
        unit = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= unit <= plan.max_nodes:
        raise UsageError(
            f"--node-unit={unit}: no multiple of it fits into at most "
            f"{plural(plan.max_nodes, 'node')}"
        )
    times = _times(conf, _TIMES)
    if plan.place.kind == "static" and "join_timeout" not in conf and "timeout" in conf:
        times["join_timeout"] = settings.seconds(conf["timeout"], "--rdzv-conf: timeout")
    grace = _optional_time(flags, "restart_grace")
    implied = not flags.is_given("grow") and rendezvous.is_started_by_hand(plan.place)
    return JobSpec(
        job_id="",
        min_nodes=plan.min_nodes,
        max_nodes=plan.max_nodes,
        node_unit=unit,
        max_restarts=restarts,
        restart_backoff=_time(flags, "restart_backoff"),
        restart_window=_time(flags, "restart_window"),
        join_timeout=times["join_timeout"],
        last_call_timeout=times["last_call_timeout"],
        heartbeat_timeout=times["heartbeat_timeout"],
        grow="now" if implied else flags.text("grow"),
        grow_cooldown=times["grow_cooldown"],
        restart_grace=shutdown_timeout(flags) if grace is None else grace,
        master_lost_timeout=times["master_lost_timeout"],
        checks=checks(flags, conf, plan.min_nodes),
        saves=_saves(flags),
        # the specs of all nodes must be equal, so one node's debugger must not change its spec
        watch=_watch(flags, debugged=debugged and plan.max_nodes == 1),
        scheduler_codes=flags.text("exit_codes") == "scheduler",
        nodes_return=POD in flags.environ,  # its controller recreates lost pods
    )


def _times(conf: Mapping[str, str], defaults: Mapping[str, float]) -> dict[str, float]:
    return {
        key: settings.seconds(
            conf.get(key, str(default)), f"--rdzv-conf: {key}", zero=key in _MAY_BE_ZERO
        )
        for key, default in defaults.items()
    }


def _saves(flags: FlagValues) -> SaveSpec:
    """The snapshot settings. Raises `UsageError`."""
    limit = settings.seconds(str(flags.value("save_limit")), "--save-limit")
    step = flags.value("restore_step")
    if step is not None and not 0 <= step < 2**53:
        raise UsageError(f"--restore-step={step} is not a step: use a number from 0")
    breakpoint_ = flags.switch("save_at_breakpoint")
    step = -1 if step is None else step
    return SaveSpec(breakpoint_, limit, step, flags.text("on_corruption"))


def _watch(flags: FlagValues, *, debugged: bool) -> WatchSpec:
    """The settings of the hang watch, and the price of a slot. If ranks are `debugged`, hangs are
    by default only reported, because a rank may be at a breakpoint. Raises `UsageError`."""
    limit = settings.seconds(str(flags.value("hang_limit")), "--hang-limit", zero=True)
    price = _number(flags, "slot_price", "a price, 0 or more", lambda x: x >= 0)
    on_hang = flags.text("on_hang")
    on_hang = "tell" if debugged and on_hang == "auto" else on_hang
    return WatchSpec(on_hang=on_hang, hang_limit=limit, slot_price=price)


def ranks_per_node(flags: FlagValues, machine: Machine, notes: list[str]) -> int:
    """The number of ranks that --nproc-per-node means on this machine. May add to `notes`. Raises
    `UsageError`."""
    text = flags.text("nproc_per_node").strip()
    if flags.switch("auto_config") and not flags.is_given("nproc_per_node"):
        found = machine.accelerators("gpu")
        if found:
            return found
        notes.append(f"--auto-config: this node has no GPU, so it gets {text} rank")
    try:
        number = int(text)
    except ValueError:
        return _device_count(text, machine)
    if number < 1:
        raise UsageError(f"--nproc-per-node={number}: a node needs at least one rank")
    return number


def _device_count(word: str, machine: Machine) -> int:
    if word == "cpu":
        return machine.cores()
    found = machine.accelerators(word)
    if found is None:
        raise UsageError(
            f"--nproc-per-node={word} is not known: use a number, auto, cpu, gpu or xpu"
        )
    if found == 0 and word == "auto":
        return machine.cores()
    if found == 0:
        name = {"gpu": "GPU", "xpu": "XPU"}.get(word, f"device of type {word}")
        raise NotHere(
            f"--nproc-per-node={word}: the installed torch finds no {name} here; use a "
            "number or cpu"
        )
    return found


def entry_of(flags: FlagValues) -> Entrypoint:
    args = tuple(str(arg) for arg in flags.ns.training_script_args or ())
    if not getattr(flags.ns, "use_env", True):  # an old torch.distributed.launch
        args = ("--local-rank=${local_rank}", *args)
    if flags.switch("run_path"):
        kind = EntryKind.RUN_PATH
    elif flags.switch("no_python") and flags.switch("module"):
        raise UsageError("--no-python and --module contradict each other: use one of them")
    elif flags.switch("no_python"):
        kind = EntryKind.COMMAND
    else:
        kind = EntryKind.MODULE if flags.switch("module") else EntryKind.SCRIPT
    return Entrypoint(kind, str(flags.ns.training_script), args)


def _log_plan(flags: FlagValues, machine: Machine, typed_in: str) -> LogPlan:
    redirects_all, redirects = settings.streams(flags.text("redirects"), "--redirects")
    tee_all, tee = settings.streams(flags.text("tee"), "--tee")
    name = flags.value("logs_specs")
    if name is not None and name not in set(machine.entry_points(LOGS_GROUP)):
        raise UsageError(
            f"--logs-specs={name}: no installed plug-in of the group {LOGS_GROUP} has this name"
        )
    template, folder = flags.text("log_line_prefix_template"), flags.text("run_dir")
    log_dir = flags.value("log_dir")
    if folder and log_dir is None:
        log_dir = f"{folder}/logs"
        if not (flags.is_given("redirects") or flags.is_given("tee")):
            tee_all = 3
    return LogPlan(
        log_dir=log_dir and _path(log_dir, typed_in),
        redirects=redirects,
        redirects_all=redirects_all,
        tee=tee,
        tee_all=tee_all,
        local_ranks_filter=settings.ranks(flags.text("local_ranks_filter"), "--local-ranks-filter"),
        stdout_filters=tuple(flags.value("duplicate_stdout_filters") or ()),
        stderr_filters=tuple(flags.value("duplicate_stderr_filters") or ()),
        prefix_template=template or flags.environ.get(env.LOG_LINE_PREFIX_TEMPLATE, ""),
        logs_specs=name,
        fold=not flags.switch("no_fold"),
    )


def shutdown_timeout(flags: FlagValues) -> float:
    """Seconds between SIGTERM and SIGKILL: from the flag or its variable, else from torch's
    variable, else 30."""
    found = _optional_time(flags, "shutdown_timeout", env.SHUTDOWN_TIMEOUT)
    return float(config.SHUTDOWN_TIMEOUT) if found is None else found


def _stopping(flags: FlagValues) -> dict[str, Any]:
    """The signals that end a node, and the time limits."""
    return {
        "signals_to_handle": settings.signals(flags.text("signals_to_handle")),
        "shutdown_timeout": shutdown_timeout(flags),
        "exit_barrier_timeout": _optional_time(
            flags, "exit_barrier_timeout", env.EXIT_BARRIER_TIMEOUT
        ),
        "departure_grace": _time(flags, "departure_grace"),
        "child_exit_timeout": _time(flags, "child_exit_timeout"),
    }


def _optional_time(flags: FlagValues, dest: str, variable: str = "") -> float | None:
    """A time from a flag, else from a variable, else None."""
    if flags.value(dest) is not None:
        return _time(flags, dest)
    text = flags.environ.get(variable, "") if variable else ""
    return settings.seconds(text, variable, zero=True) if text else None


def _time(flags: FlagValues, dest: str) -> float:
    return settings.seconds(str(flags.value(dest)), "--" + dest.replace("_", "-"), zero=True)


def _check_choices(flags: FlagValues) -> None:
    """Raise UsageError for an invalid choice, which only another parser's namespace can contain."""
    for flag in table.FLAGS:
        if flag.choices:
            value = flags.value(flag.dest)
            if value is not None and value not in flag.choices:
                raise UsageError(f"{flag.name}={value}: use one of {', '.join(flag.choices)}")


def _conf_notes(conf: Mapping[str, str], kind: str) -> list[str]:
    """Notes about parts of --rdzv-conf without effect."""
    notes = []
    used = {"static": ("timeout",), "etcd": ("protocol",)}.get(kind, ())
    idle = [key for key in conf if key in _WITHOUT_EFFECT and key not in used]
    if idle:
        notes.append(f"--rdzv-conf: {', '.join(idle)} has no effect here")
    times = (*_TIMES, *_HEALTH_TIMES)
    unknown = [key for key in conf if key not in {*times, *_OTHER_KEYS, *_WITHOUT_EFFECT}]
    if unknown:
        keys = [*times, "is_host", "node_unit"]
        hint = did_you_mean(unknown[0], keys)
        known = f"{hint} The keys are" if hint else "; the keys are"
        notes.append(f"--rdzv-conf: {', '.join(unknown)} is not known and has no effect"
                     f"{known} {', '.join(keys)}")  # fmt: skip
    return notes


def _no_effect_notes(flags: FlagValues) -> list[str]:
    """One note for each dlrover-run flag that has been set but has no effect in this version."""
    notes = []
    defaults = {flag.dest: flag.default or False for flag in table.FLAGS}
    for dest in table.NO_EFFECT:
        if flags.value(dest) != defaults[dest]:
            name = "--" + dest.replace("_", "-")
            notes.append(f"{name} is accepted, but has no effect in this version")
    return notes


def _unknown_variable_notes(environ: Mapping[str, str]) -> list[str]:
    """A note that names the variables with our prefix that nothing reads; [] without any."""
    begins = "ELASTICRUN_"
    known = {value for value in vars(env).values() if isinstance(value, str)}
    known |= {f"{begins}{flag.dest.upper()}" for flag in table.FLAGS if flag.env == "*"}
    known |= {flag.variable for flag in table.FLAGS} | {trust.TOKEN_VARIABLE, *trust.GIT_SECRETS}
    names = sorted(n for n in environ if n.startswith(begins) and n not in known)
    names = [name for name in names if not _FOREIGN_VARIABLES.match(name)]
    if not names:
        return []
    shown = ", ".join(names[:MAX_UNKNOWN_LISTED]) + (
        " ..." if len(names) > MAX_UNKNOWN_LISTED else ""
    )
    are = "is" if len(names) == 1 else "are"
    return [
        f"{shown} in the environment {are} unknown and ignored"
        f"{did_you_mean(names[0], sorted(known))}"
    ]


def _require_torchrun_flags(flags: FlagValues, plugin: str) -> None:
    """Raise UsageError for a flag that torchrun lacks, because torchrun runs a plug-in's job."""
    given: Mapping[str, str] = getattr(flags.ns, "given", {})
    contract = {flag.dest for flag in table.FLAGS if flag.origin == TORCHRUN}
    for dest, spelling in given.items():
        if dest not in contract and dest not in ("dry_run", "config", "profile", "no_config"):
            raise UsageError(
                f"{spelling} is not a flag of torchrun, which runs jobs with "
                f"--rdzv-backend={plugin}: leave it out",
                config.EXIT_USAGE,
            )


# ---------------------------------------------------------------- node health


def checks(flags: FlagValues, conf: Mapping[str, str], min_nodes: int) -> CheckSpec:
    """The node health checks. Raises `UsageError`."""
    level = precheck(flags)
    auto = flags.switch("auto_config") and min_nodes >= AUTO_CHECK_NODES
    times = _times(conf, _HEALTH_TIMES)
    return CheckSpec(
        network=flags.switch("network_check") or level >= 1 or auto,
        perf=flags.switch("comm_perf_test") or level >= 2,
        perf_floor=_number(flags, "comm_perf_threshold", "0 GB/s or more", lambda x: x >= 0),
        exclude_stragglers=flags.switch("exclude_straggler"),
        slow_ratio=_number(flags, "straggler_ratio", "a ratio above 1", lambda x: x > 1),
        slow_for=times["straggler_time"],
        probe_limit=times["probe_timeout"],
        exclude_for=settings.seconds(str(flags.value("exclude_for")), "--exclude-for"),
    )


def precheck(flags: FlagValues) -> int:
    """The level of --precheck. Raises `UsageError` for an unknown level."""
    level = flags.number("precheck")
    if level not in (0, 1, 2):
        raise UsageError(f"--precheck={level}: use 0, 1 or 2", config.EXIT_USAGE)
    return level


def health_command(flags: FlagValues) -> config.HealthCommandPlan:
    """The user's own health check. Raises `UsageError`."""
    times = [f"--health-cmd-{name}" for name in ("interval", "timeout")]
    interval, timeout = (
        settings.seconds(str(flags.value(name[2:].replace("-", "_"))), name) for name in times
    )
    return config.HealthCommandPlan(flags.text("health_cmd").strip(), interval, timeout)


def accelerator(flags: FlagValues) -> str:
    """The name in `accelerators.NAMES` that --accelerator means; "" if the accelerator is to be
    detected. Raises `UsageError`."""
    word = flags.text("accelerator")
    if not word or word in accelerators.UNSUPPORTED:
        return ""
    name = accelerators.ALIASES.get(word, word)
    if name not in accelerators.NAMES:
        known = ", ".join(accelerators.NAMES)
        raise UsageError(f"--accelerator={word} is not known: use {known}", config.EXIT_USAGE)
    return name


def health_notes(flags: FlagValues, spec: CheckSpec) -> list[str]:
    """Notes about health settings without effect, and about what --auto-config has enabled."""
    notes = []
    word = flags.text("accelerator")
    if word in accelerators.UNSUPPORTED:
        notes.append(
            f"--accelerator={word} is not supported: probes use the detected accelerator "
            f"({', '.join(accelerators.NAMES)})"
        )
    if spec.perf_floor and not spec.perf:
        notes.append("--comm-perf-threshold has no effect without --comm-perf-test")
    if spec.network and not flags.switch("network_check") and not flags.number("precheck"):
        notes.append(
            f"--auto-config: the network is checked before training, because there are at least "
            f"{AUTO_CHECK_NODES} nodes"
        )
    return notes


def _number(flags: FlagValues, dest: str, expects: str, fits: Callable[[float], bool]) -> float:
    value = float(flags.value(dest))
    if not (math.isfinite(value) and fits(value)):
        raise UsageError(
            f"--{dest.replace('_', '-')}={value:g} is not {expects}", config.EXIT_USAGE
        )
    return value
