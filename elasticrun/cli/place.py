"""Applies a scheduler's values for this node where flags were not given.

A flag, or its variable, always takes precedence. The filled-in values are ones that the user could
have typed, so later code (`cli.rendezvous`) sees only flags.

With `--srun`, in a Slurm batch script or under salloc, this process becomes srun, which starts the
same command once on each node of the job. It does so only on request: torchrun runs on one host,
and scripts that start it on each node over ssh rely on that.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from elasticrun.cli import settings
from elasticrun.cli.detection.detect import detect
from elasticrun.cli.detection.found import Found, Given, HostFacts, as_int, number, port_of_name
from elasticrun.cli.detection.slurm import PTY, step_of
from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.rendezvous import ELASTIC_WORDS, RENDEZVOUS_FLAGS
from elasticrun.cli.settings import NOT_DETECTED, DetectedPlace, UsageError
from elasticrun.config import EXIT_OK, EXIT_USAGE
from elasticrun.core.words import plural
from elasticrun.wire.messages import MAX_NODES
from elasticrun.wire.types import Endpoint

if TYPE_CHECKING:
    from elasticrun.cli.detection.found import Machine
    from elasticrun.cli.settings import FlagValues


OPTIONS: Final = ("--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0")
"""srun's options: one agent per node, and the job does not end when one agent exits."""

NOT_PASSED_ON: Final = ("--srun", "--dry-run", "--dry_run")
"""Flags that are removed from the command of srun's tasks."""

_SHELL_VARIABLES: Final = (PTY, "SLURM_PTY_WIN_COL", "SLURM_PTY_WIN_ROW")
"""Variables that `srun --pty` leaves in a shell; they do not describe a step started from it."""


def become_srun(
    words: Sequence[str], dry: bool, environ: Mapping[str, str], notify: Callable[[str], None]
) -> int:
    """Announce the srun command and exec it; with `dry`, print it. Returns the exit code. Raises
    UsageError."""
    interactive = sys.stdin is not None and sys.stdin.isatty()
    command = srun_command(words, environ, interactive=interactive)
    if dry:
        print(shlex.join(command))
        return EXIT_OK
    notify(f"--srun: {shlex.join(command)}")
    variables = {name: value for name, value in environ.items() if name not in _SHELL_VARIABLES}
    try:
        os.execvpe(command[0], command, variables)
    except OSError as error:
        raise UsageError(f"--srun: srun cannot be started: {error.strerror}", EXIT_USAGE) from None


def srun_command(
    words: Sequence[str], environ: Mapping[str, str], *, interactive: bool
) -> list[str]:
    """srun's command line for our words, which contain --srun. Raises UsageError."""
    nodes = number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    if number(environ, "SLURM_JOB_ID", "SLURM_JOBID") is None or nodes is None:
        raise UsageError(
            "--srun: this is not a Slurm job (SLURM_JOB_ID is not set): use --srun only in a batch "
            "script or under salloc",
            EXIT_USAGE,
        )
    step = step_of(environ)
    if step is not None and not interactive and not environ.get(PTY):
        raise UsageError(
            f"--srun: srun has already started this command (step {step} of the job): leave "
            "--srun out",
            EXIT_USAGE,
        )
    count = as_int(nodes)
    # A batch script's own number of tasks would override one task per node.
    options = [f"--nodes={count}", f"--ntasks={count}", *OPTIONS]
    if environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID"):
        options.append("--overlap")  # the surrounding shell occupies the job's resources
    script = get_args_parser().script_at(words)
    passed_on = [word for word in words[:script] if word not in NOT_PASSED_ON]
    program = [sys.executable, "-P", "-m", "elasticrun"]
    return ["srun", *options, *program, *passed_on, *words[script:]]


PLACE_FLAGS: Final = (*RENDEZVOUS_FLAGS, "node_rank", "auto_config")
"""Flags that name the rendezvous or the node rank. No scheduler overrides them: with any of them
only torchrun's rules apply."""


def apply_scheduler(flags: FlagValues, machine: Machine, facts: HostFacts) -> DetectedPlace:
    """Detect the scheduler, and choose the values that it gives to flags. Raises UsageError for an
    invalid --nnodes."""
    found = detect(flags.environ, facts)
    if found is None:
        return NOT_DETECTED
    if found.external:
        return _dlrover(flags, found)
    if by := _rendezvous_flag(flags):
        return _with_rendezvous_flags(flags, found, by)
    if flags.is_given("nnodes"):
        return _with_nnodes(flags, found)
    return _without_place_flags(flags, found, machine)


def _rendezvous_flag(flags: FlagValues) -> str:
    """The first flag or variable that names the rendezvous, "" for none."""
    return next((flags.source(dest) for dest in PLACE_FLAGS if flags.is_given(dest)), "")


def _without_place_flags(flags: FlagValues, found: Found, machine: Machine) -> DetectedPlace:
    """The place if neither the number of nodes nor the rendezvous is given: the scheduler gives
    both, unless the command is for this node alone."""
    if found.why_alone or as_int(found.nodes) <= 1 or found.nodes is None or found.host is None:
        return DetectedPlace(found, note=_unused_sentence(found))
    filled = {"nnodes": found.nodes, **_place(flags, found)}
    if not flags.is_given("nproc_per_node"):
        devices = found.nproc or _gpu_count(machine)
        if devices is not None:
            filled["nproc_per_node"] = devices
    return DetectedPlace(found, filled, note=_filled_sentence(found, filled))


def _with_nnodes(flags: FlagValues, found: Found) -> DetectedPlace:
    """The place if only --nnodes is given: the scheduler gives the node rank and the rendezvous.
    Extra nodes are spares."""
    low, high = settings.nodes(flags.text("nnodes"))
    if high == 1:
        return DetectedPlace(found, note=_attempt_sentence(found))
    there = as_int(found.nodes)
    why = found.why_alone
    if found.host is not None:
        why = ""
        if found.nodes is not None and there < low:
            has = f"there {'is' if there == 1 else 'are'} {plural(there, 'node')}"
            why = f"{has} and --nnodes={flags.text('nnodes')} asks for more"
        elif found.crowd and high > there:
            why = f"--nnodes={flags.text('nnodes')} asks for more nodes than the {there} there are"
    if why or found.host is None:
        srun = "--srun starts this command on all nodes"
        use = srun if found.use == "--srun" else "give the rendezvous by --rdzv-endpoint"
        why = why or "no address of the other nodes is known"
        return DetectedPlace(found, note=f"{found.seen}: {why}, so it is ignored; {use}")
    if found.second:
        idle = "another task on this node is the agent, so this one exits"
        idle = f"{found.seen}: {idle}; use srun --ntasks-per-node=1"
        return DetectedPlace(found, idle=idle)
    filled = _place(flags, found)
    return DetectedPlace(found, filled, note=_filled_sentence(found, filled))


def _with_rendezvous_flags(flags: FlagValues, found: Found, by: str) -> DetectedPlace:
    """The place if flags (the first is `by`) name the rendezvous. The scheduler's node rank is used
    only where a rank is a mere preference."""
    elastic = flags.is_given("rdzv_backend") and flags.text("rdzv_backend") in ELASTIC_WORDS
    wish = elastic and flags.text("rdzv_endpoint") and not flags.is_given("node_rank")
    known = found.host is not None and found.node_rank is not None and not found.crowd
    several = found.nodes is None or as_int(found.nodes) > 1
    filled = _rank(found) if wish and known and several else {}
    return DetectedPlace(found, filled, note=_attempt_sentence(found), by=by)


def _dlrover(flags: FlagValues, found: Found) -> DetectedPlace:
    """The place in a pod of DLRover, unless flags take precedence: the number of nodes and the node
    rank. `cli.rendezvous` applies the endpoint and the job id; they are only shown here."""
    filled: dict[str, Given] = {}
    shown: dict[str, Given] = {}
    if found.host is not None and not any(map(flags.is_given, RENDEZVOUS_FLAGS)):
        shown["rdzv_endpoint"] = found.host
        if found.job_id is not None and not flags.is_given("rdzv_id"):
            shown["rdzv_id"] = found.job_id
    if not _rendezvous_flag(flags):
        if as_int(found.nodes) > 0 and not flags.is_given("nnodes"):
            assert found.nodes is not None
            filled["nnodes"] = found.nodes
        filled |= _rank(found)
    note = _filled_sentence(found, filled) if "nnodes" in filled else ""
    return DetectedPlace(found, filled, note=note, shown=shown)


def _place(flags: FlagValues, found: Found) -> dict[str, Given]:
    """The scheduler's values for the rendezvous endpoint, the job id, and the node rank."""
    assert found.host is not None
    assert found.port is not None
    filled: dict[str, Given] = {"rdzv_backend": Given("c10d", found.family)}
    port = found.port
    if flags.is_given("rdzv_id"):
        # Two jobs of the user in one step have different names, and so different ports.
        port = Given(str(port_of_name(flags.text("rdzv_id"))), flags.source("rdzv_id"))
    elif found.job_id is not None:
        filled["rdzv_id"] = found.job_id
    where = str(Endpoint(found.host.value, int(port.value)))
    filled["rdzv_endpoint"] = Given(where, f"{found.host.source}; port: {port.source}")
    return filled | _rank(found)


def _rank(found: Found) -> dict[str, Given]:
    if found.node_rank is None or as_int(found.node_rank) >= MAX_NODES:
        return {}
    return {"node_rank": found.node_rank}


def _gpu_count(machine: Machine) -> Given | None:
    """The number of GPUs here, if the scheduler does not count them; None without any."""
    count = machine.accelerators("gpu") or 0
    return Given(str(count), "GPUs seen here") if count else None


# ---------------------------------------------------------------- sentences


def _filled_sentence(found: Found, filled: Mapping[str, Given]) -> str:
    flags = " ".join(f"--{dest.replace('_', '-')}={one.value}" for dest, one in filled.items())
    return f"{_place_sentence(found)}, so this equals {flags}"


def _unused_sentence(found: Found) -> str:
    """The sentence for a detected place that is not used: why, and which flag would use it."""
    if not found.why_alone:
        return _attempt_sentence(found)
    use = "use --nnodes and --rdzv-endpoint for one job on several nodes"
    if found.use:
        use = f"use {found.use} for one job on all nodes"
        if found.crowd:
            use += ", with one agent on each"
    return f"{_place_sentence(found)}: {found.why_alone}, so this is a job of one node; {use}"


def _attempt_sentence(found: Found) -> str:
    return _place_sentence(found) if found.attempt > 1 else ""


def _place_sentence(found: Found) -> str:
    """This process's place, and from the second attempt on the scheduler's attempt number."""
    again = f", attempt {found.attempt} ({found.attempt_source})" if found.attempt > 1 else ""
    return f"{found.seen}{again}"


def explain(place: DetectedPlace) -> str:
    """For `elasticrun doctor`: what was detected, and what a bare command means here."""
    if place.found is None:
        return "no scheduler is detected; a command without flags is a job of one node"
    if place.note:
        return place.note
    if place.by:
        return f"{place.found.seen}; {place.by} names the rendezvous and takes precedence"
    return f"{place.found.seen}; a command without flags is a job of one node"


def detect_place(flags: FlagValues, machine: Machine) -> DetectedPlace:
    """As `apply_scheduler`; NOT_DETECTED at once if there are no facts or no scheduler's variables.
    Raises UsageError for an invalid --nnodes."""
    if machine.facts is None or not any(
        name.startswith(settings.SCHEDULER_PREFIXES) for name in flags.environ
    ):
        return NOT_DETECTED
    return apply_scheduler(flags, machine, machine.facts())
