"""Slurm: a task of a step, or a batch script or salloc around it.

Node lists such as `n[1-3,7],gpu[01-04]-ib` are parsed here, without `scontrol`.

A step is used if srun has started exactly one task on each of several nodes. A batch script has
SLURM_PROCID=0 and SLURM_NODEID=0 too, so SLURM_STEP_ID decides; Slurm's own steps (batch,
interactive, extern) have numbers at the end of the 32-bit range.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Final

from elasticrun.cli.detection.found import (
    TERMINAL,
    Found,
    Given,
    HostFacts,
    as_int,
    not_a_number,
    number,
    port_of_number,
    text,
)

MAX_NAMES: Final = 100_000
"""Maximum number of names in a list; more indicate an error."""

MAX_LENGTH: Final = 1_000_000
"""Maximum characters of a list."""

MAX_DIGITS: Final = 18

_NAME = re.compile(r"[A-Za-z0-9_.:-]*\Z")
_BRACKETS = re.compile(r"\[[^][]*\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?\Z")


class BadHostlist(Exception):
    """The text is not a list of nodes; the message says why."""


def expand(text: str) -> list[str]:
    """The names in a node list, in order. Raises BadHostlist."""
    if len(text) > MAX_LENGTH:
        raise BadHostlist(f"a list of nodes has {MAX_LENGTH} characters at most")
    names: list[str] = []
    for item in _items(text.strip()):
        names += _expanded(item, MAX_NAMES - len(names))
    return names


def _items(text: str) -> list[str]:
    """The parts between commas outside brackets."""
    if re.search(r"[][]", _BRACKETS.sub("", text)):
        raise BadHostlist(f"the brackets in {_short(text)} do not match")
    marked = _BRACKETS.sub(lambda found: found[0].replace(",", "\0"), text)
    items = [item.replace("\0", ",") for item in marked.split(",")]
    if not all(items):
        raise BadHostlist(f"{_short(text)} has an empty item")
    return items


def _expanded(item: str, room: int) -> list[str]:
    """Expand one item of alternating text and brackets; the last bracket varies fastest."""
    pieces = re.split(r"[\[\]]", item)  # text, ranges, text, ranges, ... text
    choices: list[list[str]] = []
    total = 1
    for place, piece in enumerate(pieces):
        if place % 2:
            choices.append(_numbers(piece, item, room // total))
        elif _NAME.match(piece):
            choices.append([piece])
        else:
            raise BadHostlist(f"{_short(item)} is not the name of a node")
        total *= len(choices[-1])
    if total > room:
        raise BadHostlist(f"more than {MAX_NAMES} nodes are not supported")
    return ["".join(parts) for parts in product(*choices)]


def _numbers(text: str, item: str, room: int) -> list[str]:
    """`1-3,07-12` as texts with the width of the first number."""
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.match(part)
        if match is None or max(map(len, part.split("-"))) > MAX_DIGITS:
            raise BadHostlist(f"[{_short(text)}] in {_short(item)} is not a range of numbers")
        first, last = match[1], match[2] or match[1]
        low, high = int(first), int(last)
        if high < low:
            raise BadHostlist(f"[{_short(text)}] in {_short(item)} counts backwards")
        if len(found) + high - low + 1 > room:
            raise BadHostlist(f"more than {MAX_NAMES} nodes are not supported")
        found += [str(one).zfill(len(first)) for one in range(low, high + 1)]
    return found


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


FAMILY: Final = "Slurm"

OWN_STEPS: Final = 0xFFFFFFF0
"""Step numbers from here on are Slurm's own."""

PTY: Final = "SLURM_PTY_PORT"
"""A variable that is set in processes that `srun --pty` starts, and in their children."""


def detect(environ: Mapping[str, str], facts: HostFacts) -> Found | None:
    """Slurm's values; None outside Slurm."""
    job = number(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if job is None:
        return None
    step = step_of(environ)
    return _outside(environ, job) if step is None else _task(environ, facts, job, step)


def step_of(environ: Mapping[str, str]) -> int | None:
    """The number of the srun step that this process is a task of; None in a batch script and in
    salloc."""
    step = number(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    if step is None or as_int(step) >= OWN_STEPS:
        return None
    return as_int(step) if number(environ, "SLURM_PROCID") is not None else None


def _outside(environ: Mapping[str, str], job: Given) -> Found:
    nodes = number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    inside = environ.get("SLURM_STEP_ID")
    where = "an interactive step" if inside else "the batch script or salloc"
    found = _with_first_host(environ, job, f"{where} of Slurm job {job.value}")
    if as_int(nodes) > 1:
        rest = "node" if as_int(nodes) == 2 else f"{as_int(nodes) - 1} nodes"
        why = f"nothing has been started on the other {rest}"
        return replace(found, nodes=nodes, why_alone=why, use="--srun")
    count = "SLURM_JOB_NUM_NODES"
    if nodes is None and count in environ:
        found = replace(found, why_alone=not_a_number(environ, count))
    return replace(found, nodes=nodes)


def _task(environ: Mapping[str, str], facts: HostFacts, job: Given, step: int) -> Found:
    name = f"{job.value}.{step}"
    nodes = number(environ, "SLURM_STEP_NUM_NODES")
    tasks = as_int(number(environ, "SLURM_STEP_NUM_TASKS"))
    rank = number(environ, "SLURM_NODEID")
    place = as_int(number(environ, "SLURM_PROCID"))
    found = replace(
        _with_first_host(environ, job, f"task {place} of {tasks} in Slurm step {name}"),
        nodes=nodes,
        node_rank=rank,
        job_id=_job_id(environ, job, step),
        port=Given(str(port_of_number(int(job.value), step)), job.source),
        nproc=_devices(environ),
    )
    count = as_int(nodes)
    if nodes is None:
        return replace(found, why_alone=not_a_number(environ, "SLURM_STEP_NUM_NODES"))
    if count <= 1:
        return found
    if as_int(number(environ, "SLURM_HET_SIZE")) > 1:
        return replace(found, why_alone="heterogeneous jobs are not supported")
    host, wrong = _first_host(environ, count)
    if host is None or rank is None:
        return replace(found, why_alone=wrong or not_a_number(environ, "SLURM_NODEID"))
    found = replace(found, host=host, use=f"--nnodes={count}")
    if tasks > count:
        second = as_int(number(environ, "SLURM_LOCALID")) > 0
        why = f"it has {tasks} tasks on {count} nodes"
        return replace(found, crowd=True, second=second, why_alone=why)
    if tasks < count:
        return replace(found, why_alone=f"it has {tasks} task(s) on {count} nodes", use="")
    if facts.terminal or environ.get(PTY):
        return replace(found, why_alone=TERMINAL if facts.terminal else "srun --pty started it")
    return found


def _with_first_host(environ: Mapping[str, str], job: Given, seen: str) -> Found:
    """The values that are the same inside and outside a step. SLURM_RESTART_COUNT is not set before
    the first requeue."""
    again = number(environ, "SLURM_RESTART_COUNT")
    return Found(
        FAMILY,
        seen,
        job_id=job,
        attempt=as_int(again) + 1,
        attempt_source=again.source if again is not None else "",
    )


def _job_id(environ: Mapping[str, str], job: Given, step: int) -> Given:
    """The job id: each task of an array is a separate job, and so is each later step of a job."""
    name, source = job
    array = number(environ, "SLURM_ARRAY_JOB_ID")
    task = number(environ, "SLURM_ARRAY_TASK_ID")
    if array is not None and task is not None:
        name, source = f"{array.value}_{task.value}", f"{array.source}, {task.source}"
    if step:
        name, source = f"{name}.{step}", f"{source}, $SLURM_STEP_ID"
    return Given(name, source)


def _first_host(environ: Mapping[str, str], count: int) -> tuple[Given | None, str]:
    """The address of the step's first node, or why it is unknown."""
    listed = text(environ, "SLURM_STEP_NODELIST")
    if listed is None:
        return None, "SLURM_STEP_NODELIST is not set"
    try:
        names = expand(listed.value)
    except BadHostlist as wrong:
        return None, f"SLURM_STEP_NODELIST cannot be read: {wrong}"
    if len(names) != count:
        return None, f"SLURM_STEP_NODELIST has {len(names)} name(s) for {count} nodes"
    for alias in environ.get("SLURM_NODE_ALIASES", "").split(","):
        # Cloud nodes have addresses that DNS does not know.
        match = re.fullmatch(r"([^:]+):([^:\s()]+):[^:]*", alias)
        if match is not None and match[1] == names[0]:
            return Given(match[2], "$SLURM_NODE_ALIASES"), ""
    return Given(names[0], listed.source), ""


def _devices(environ: Mapping[str, str]) -> Given | None:
    """The number of GPUs of this node, or of those that this task sees, if fewer; None if Slurm
    counts none."""
    devices = number(environ, "SLURM_GPUS_ON_NODE")
    if devices is None or not as_int(devices):
        return None
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        listed = [one for one in environ.get(name, "").split(",") if one.strip()]
        if listed and len(listed) < as_int(devices):
            return Given(str(len(listed)), f"${name}")
    return devices
