"""--dry-run: shows what would run, and the source of each setting."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping

from elasticrun.cli.resolve import Resolved
from elasticrun.cli.settings import NOT_DETECTED, DetectedPlace, FlagValues, Setting, setting
from elasticrun.cli.table import FLAGS
from elasticrun.config import EXIT_OK, Launch
from elasticrun.core.words import plural
from elasticrun.wire.types import Endpoint, EntryKind


def show(
    found: Resolved, ns: argparse.Namespace, environ: Mapping[str, str], place: DetectedPlace
) -> int:
    """Print the text of `describe`. Returns the exit code."""
    print(describe(found, ns, environ, place), end="")
    return EXIT_OK


def describe(
    found: Resolved,
    ns: argparse.Namespace,
    environ: Mapping[str, str],
    place: DetectedPlace = NOT_DETECTED,
) -> str:
    """The resolved settings as text: a summary, then each flag that is not at its default, with its
    source, and with --verbose all other flags too."""
    flags = FlagValues(ns, environ, {**place.shown, **place.filled})
    launch = found.launch
    spec = launch.spec
    low, high = spec.min_nodes, spec.max_nodes
    nodes = f"{low}" if low == high else f"{low} to {high}"
    rows = [
        ("each rank runs", _command(launch)),
        ("ranks on this node", str(launch.nproc_per_node)),
        ("nodes", nodes),
        ("node rank", "by order of arrival" if launch.node_rank < 0 else str(launch.node_rank)),
        ("job master", _master(found)),
        ("job id", found.identity.job_id),
        *_attempt(place),
        ("restarts", _restarts(launch)),
        ("stopping", f"SIGTERM, then SIGKILL after {launch.shutdown_timeout:g} s"),
        ("node health", _health(launch)),
        ("after a failure", _saves(launch)),
        ("launch", launch.mode),
    ]
    lines = [f"{name:<22}{value}" for name, value in rows]
    lines += ["", *(f"note: {note}" for note in found.notes), ""] if found.notes else [""]
    settings = [
        _in_effect(setting(flags, flag.dest), found, environ)
        for flag in FLAGS
        if flag.dest not in ("dry_run", "verbose", "version", "print_completion", "no_config")
    ]
    usual = [row for row in settings if row.source == "default"]
    shown = [row for row in settings if row.source != "default"] + (usual if ns.verbose else [])
    if shown:
        lines.append(f"{'setting':<28}{'value':<38}source")
        lines += [f"{name:<28}{value:<38}{source}" for name, value, source in shown]
    if usual and not ns.verbose:
        lines.append(f"{plural(len(usual), 'other setting')} at the default; -v shows them")
    return "\n".join(lines) + "\n"


def _in_effect(row: Setting, found: Resolved, environ: Mapping[str, str]) -> Setting:
    """The row of a flag, with the value in effect and its source if something other than the flag
    has replaced its default."""
    launch, place, job_id = found.launch, found.place, found.identity.job_id
    spec, rank = launch.spec, launch.node_rank
    file = place.kind == "file"
    whose_id = "new, unless the file has one" if file else "new for every run"
    variable = "$NODE_RANK" if environ.get("NODE_RANK", "").strip() else "$WORKER_RANK"
    others = {
        "max-restarts": (
            spec.max_restarts != int(row.value or 0) if row.name == "max-restarts" else False,
            spec.max_restarts,
            "--nnodes=MIN:MAX",
        ),
        "nnodes": (spec.max_nodes != 1, spec.max_nodes, "$NODE_NUM"),
        "nproc-per-node": (launch.nproc_per_node != 1, launch.nproc_per_node, "GPUs seen here"),
        "rdzv-backend": (
            row.value == "static" and place.kind in ("elastic", "file", "open"),
            "c10d",
            "--nnodes=MIN:MAX" + (" with --rdzv-endpoint" if place.host else ""),
        ),
        "rdzv-endpoint": (
            bool(place.found),
            f"file://{place.path}",
            place.found,
        ),
        "grow": (spec.grow != row.value, spec.grow, "no rendezvous is set"),
        "rdzv-id": (job_id != row.value, job_id, whose_id),
        "node-rank": (
            str(rank) != row.value,
            "" if rank < 0 else rank,
            "by order of arrival" if rank < 0 else variable,
        ),
    }
    counts, value, source = others.get(row.name, (False, "", ""))
    return Setting(row.name, str(value), source) if counts and row.source == "default" else row


def _attempt(place: DetectedPlace) -> list[tuple[str, str]]:
    """The row with the number of times that the scheduler has started this job; [] if the scheduler
    does not count that."""
    if place.found is None or not place.found.attempt_source:
        return []
    return [("attempt", f"{place.found.attempt} ({place.found.attempt_source})")]


def _command(launch: Launch) -> str:
    entry = launch.entry
    python = [launch.python_exec or sys.executable, "-u"]
    before = {
        EntryKind.SCRIPT: python,
        EntryKind.MODULE: [*python, "-m"],
        EntryKind.RUN_PATH: ["runpy.run_path"],
    }.get(entry.kind, [])
    return shlex.join([*before, entry.target, *entry.args])


def _master(found: Resolved) -> str:
    place = found.place
    if found.delegate:
        return f"none: torchrun serves the plug-in {found.delegate}"
    where = str(Endpoint(place.host, place.port))
    if place.kind == "file":
        why = place.found or "--rdzv-endpoint"
        return (
            f"where the file {place.path} says ({why}); if it does not exist, started by "
            f"this agent, on the first free port from {place.port} on"
        )
    return {
        "open": f"started by this agent, on the first free port from {place.port} on (no "
        "rendezvous is set, and this folder is local)",
        "standalone": "started by this agent, on a free port of this host",
        "elastic": f"{where}, started by the node that has this address",
        "static": f"{where}, started by node 0; the ranks see this port as MASTER_PORT",
        "external": f"{where}, started by another node",
        "etcd": f"on a node that the nodes elect through {found.launch.master.store}",
    }[place.kind]


def _restarts(launch: Launch) -> str:
    spec = launch.spec
    if spec.max_restarts == 0:
        return "none"
    within = f" within {spec.restart_window:g} s" if spec.restart_window else ""
    return f"up to {spec.max_restarts}{within}, backoff up to {spec.restart_backoff:g} s"


def _saves(launch: Launch) -> str:
    saves = launch.spec.saves
    if saves.restore_step >= 0:
        return f"ranks resume from step {saves.restore_step} exactly, from memory or storage"
    if not saves.at_breakpoint:
        return "ranks resume from the newest snapshot in memory, if there is one"
    return (
        "ranks resume from the newest snapshot in memory, if there is one, and it is written "
        f"out as a checkpoint, in {saves.limit:g} s at most"
    )


def _health(launch: Launch) -> str:
    checks = launch.spec.checks
    probes = f"on {launch.accelerator or 'what is found'}, {checks.probe_limit:g} s at most"
    words = [f"network check ({probes})" if checks.network else "no network check"]
    if checks.perf:
        floor = f" (at least {checks.perf_floor:g} GB/s)" if checks.perf_floor else ""
        words.append(f"performance test{floor}")
    if checks.exclude_stragglers:
        words.append(f"nodes slower than {checks.slow_ratio:g} times the median are excluded")
    if launch.precheck:
        words.append("a failed check of this machine ends the agent")
    return ", ".join(words)
