"""`render slurm`: the settings, validated on construction (`checks.Invalid`), and a script for
sbatch that spells out every option, so that users can read and change it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from elasticrun.cli.detection.found import PORTS
from elasticrun.config import EXIT_OK, EXIT_SAVED
from elasticrun.jobs.render import checks
from elasticrun.jobs.render.checks import Invalid
from elasticrun.jobs.render.pods import FINAL_CODES
from elasticrun.jobs.render.settings import MAX_NODES, NodeCommand

SIGNALS: Final = ("TERM", "HUP", "USR1", "USR2")
"""Signals that ranks, if they get them too, defer until a step is saved."""

MAX_SIGNAL_LEAD: Final = 65535
"""Maximum number of seconds before the time limit at which Slurm can send a signal."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")
_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*(,[A-Za-z0-9][A-Za-z0-9_.+-]*)*")
_ARRAY = re.compile(r"\d+(-\d+(:[1-9]\d*)?)?(,\d+(-\d+(:[1-9]\d*)?)?)*(%[1-9]\d*)?")
_GPUS = re.compile(r"([A-Za-z][A-Za-z0-9_.-]*:)?[1-9]\d*")
_MEMORY = re.compile(r"\d+[KMGT]?")
_PATH = re.compile(r"[\w./%+@=,:-]+")
"""Slurm parses its lines by its own rules, so values that would need quoting are refused."""
_OPTION = re.compile(r"([a-z][a-z0-9-]+)(=[^\s\"'\\#]+)?")

RESOLUTION: Final = 60
"""Slurm may send the signal this many seconds early."""

_OUR_FLAGS: Final = {
    "chdir": "--working-dir", "job-name": "--name", "nodes": "--nnodes and --spares",
    **{name: f"--{name}" for name in (
        "account", "array", "cpus-per-task", "exclusive", "gpus-per-node", "mem", "output",
        "partition", "qos", "requeue", "signal", "time",
    )},
}  # fmt: skip
_FIXED_OPTIONS: Final = (
    "no-kill", "no-requeue", "ntasks", "ntasks-per-node", "open-mode", "tasks-per-node", "wrap",
)  # fmt: skip
"""Options of sbatch that the script already contains or must not contain."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """An elastic job under Slurm: one task per node. "" and 0 mean unset.

    `time` is in Slurm's form, `time_seconds` its value. `signal` is sent to every node `lead`
    seconds before the end. `requeues`: how often the job is requeued when its time is over;
    `retries`: how often after a failure that a retry may fix. `options` are further sbatch options,
    without dashes (`constraint=h100`).
    """

    name: str
    launch: NodeCommand
    spares: int = 0
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    time_seconds: int = 0
    gpus_per_node: str = ""
    cpus_per_task: int = 0
    memory: str = ""
    exclusive: bool = False
    array: str = ""
    output: str = ""
    working_dir: str = ""
    signal: str = ""
    lead: int = 0
    requeues: int = 0
    retries: int = 0
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_names(self)
        _check_numbers(self)

    @property
    def nodes(self) -> str:
        """The value of #SBATCH --nodes: the minimum if it differs, and the maximum plus the
        spares."""
        low, high = self.launch.min_nodes, self.launch.max_nodes
        most = high + self.spares
        return str(most) if low == high else f"{low}-{most}"

    @property
    def uses_first_node_code(self) -> bool:
        """Whether the first node's exit code is the job's, unlike that of srun: its agent stays
        until the end, and other nodes may exit with different codes."""
        stays = not any(word.startswith("--exit-barrier-timeout=") for word in self.launch.flags)
        return stays and self.nodes != "1"


def _check_names(settings: BatchSettings) -> None:
    if not _NAME.fullmatch(settings.name):
        raise Invalid(
            f"--name {settings.name!r}: letters, digits, dashes, underscores and dots, 128 at most"
        )
    for flag, text in (
        ("--partition", settings.partition),
        ("--account", settings.account),
        ("--qos", settings.qos),
    ):
        _match(flag, text, _NAMES, " is not a valid Slurm name")
    no_array = " is not a list of indices: write 0-7, 1,3,5 or 0-99%4"
    _match("--array", settings.array, _ARRAY, no_array)
    ranges = re.findall(r"(\d+)-(\d+)", settings.array)
    if any(int(first) > int(last) for first, last in ranges):
        raise Invalid(f"--array {settings.array!r}{no_array}")
    for option in settings.options:
        _check_option(option)
    _match("--gpus-per-node", settings.gpus_per_node, _GPUS, ": write a number, or TYPE:NUMBER")
    _match("--mem", settings.memory, _MEMORY, ": write a number with K, M, G or T, per node")
    for flag, text in (("--output", settings.output), ("--working-dir", settings.working_dir)):
        _match(flag, text, _PATH, ": use a path without spaces and quotes")
    for key, value in settings.env.items():
        checks.setting(
            key, value, "script", "give --token-file FILE, a file that all nodes can read"
        )


def _match(flag: str, text: str, form: re.Pattern[str], wrong: str) -> None:
    if text and not form.fullmatch(text):
        raise Invalid(f"{flag} {text!r}{wrong}")


def _check_option(option: str) -> None:
    match = _OPTION.fullmatch(option)
    if not match:
        raise Invalid(
            f"--sbatch {option!r}: write an option of sbatch as NAME or NAME=VALUE, like "
            "constraint=h100, without spaces and quotes"
        )
    if match[1] in _OUR_FLAGS:
        raise Invalid(f"--sbatch {option}: use {_OUR_FLAGS[match[1]]}, which is checked")
    if match[1] in _FIXED_OPTIONS:
        raise Invalid(f"--sbatch {option}: the script already sets --{match[1]}")


def _check_numbers(settings: BatchSettings) -> None:
    if not 0 <= settings.spares <= MAX_NODES - settings.launch.max_nodes:
        raise Invalid(
            f"--spares {settings.spares}: a number of nodes, and not more than {MAX_NODES}"
        )
    if min(settings.cpus_per_task, settings.requeues, settings.retries) < 0:
        raise Invalid("--cpus-per-task, --requeue and --retries must not be negative")
    if settings.signal:
        _check_signal(settings)


def _check_signal(settings: BatchSettings) -> None:
    if settings.signal not in SIGNALS:
        raise Invalid(
            f"--signal: {settings.signal!r} is not one of {', '.join(SIGNALS)}, which ranks defer "
            "until a step is saved"
        )
    if not 1 <= settings.lead <= MAX_SIGNAL_LEAD:
        raise Invalid(
            f"--signal: {settings.lead} s before the end; it must be 1 to {MAX_SIGNAL_LEAD}"
        )
    if settings.time_seconds and settings.lead + RESOLUTION >= settings.time_seconds:
        raise Invalid(
            f"--time {settings.time}: the signal may come {settings.lead + RESOLUTION} s before "
            "the end, so nothing is left; ask for more time, or for less by --signal"
        )


SRUN = "srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none"

AGENT = """\
agent='trap : TERM INT HUP QUIT USR1 USR2 # these are for the launcher
"$@"
code=$?
[ "$SLURM_NODEID" != 0 ] || [ ! -f "$0" ] || echo "$code" >"$0"
exit "$code"'"""
"""The task of each node: the launcher; the first node also writes its exit code to a file."""


def script(settings: BatchSettings) -> str:
    """The whole script; it exits with the job's exit code."""
    return "\n".join(
        (*_head(settings), "", *_setting(settings), "", *_step(settings), *_trailer(settings), "")
    )


def _head(settings: BatchSettings) -> Iterator[str]:
    yield "#!/bin/bash"
    directives = {
        "job-name": settings.name,
        "nodes": settings.nodes,
        "ntasks-per-node": "1",
        "cpus-per-task": str(settings.cpus_per_task or ""),
        "gpus-per-node": settings.gpus_per_node,
        "mem": settings.memory,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "time": settings.time,
        "array": settings.array,
        "output": settings.output or ("%x-%A_%a.out" if settings.array else "%x-%j.out"),
        "chdir": settings.working_dir,
    }
    yield from (f"#SBATCH --{key}={value}" for key, value in directives.items() if value)
    if settings.exclusive:
        yield "#SBATCH --exclusive"
    yield from (f"#SBATCH --{option}" for option in settings.options)
    if settings.signal:
        yield "# every node saves a step and leaves before the time limit"
        yield f"#SBATCH --signal={settings.signal}@{settings.lead}"
    if settings.requeues:
        yield "# without --no-kill: when Slurm notices that a node is dead, it puts the whole job"
        yield "# back into the queue; with it, the job would hang if that node runs this script"
        yield "#SBATCH --requeue"
    else:
        yield "# one dead node does not end the job: the others continue, except without the node"
        yield "# that runs this script: then `scontrol requeue` the job, or `scancel` it"
        yield "#SBATCH --no-kill"
        if settings.retries:
            yield "#SBATCH --requeue"
    yield "#SBATCH --open-mode=append"


def _setting(settings: BatchSettings) -> Iterator[str]:
    yield "set -u"
    yield from (f"export {key}={shlex.quote(value)}" for key, value in settings.env.items())
    if not settings.launch.by_etcd:
        yield "# the first node hosts the job's master"
        yield 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        yield f"port=$(({PORTS.start} + SLURM_JOB_ID % {len(PORTS)}))"
    if settings.launch.job_id:
        name = shlex.quote(settings.launch.job_id)
    elif settings.array:
        name = '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"'
    else:
        name = '"$SLURM_JOB_ID"'
    if settings.launch.by_etcd:  # etcd remembers how a run of that name ended
        name += '"-${SLURM_RESTART_COUNT:-0}"'
    yield f"job={name}"


def _step(settings: BatchSettings) -> Iterator[str]:
    launch = settings.launch
    # since Slurm 22.05 a step does not inherit this from its job
    cores = f" --cpus-per-task={settings.cpus_per_task}" if settings.cpus_per_task else ""
    words = [f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.nproc_per_node}"]
    if not launch.by_etcd:
        words += ["--rdzv-backend=c10d", '--rdzv-endpoint="$head:$port"']
    words += ['--rdzv-id="$job"', *map(quoted, launch.flags)]
    words.append(" ".join(map(quoted, launch.program)))
    agent = "elasticrun"
    if settings.uses_first_node_code:
        yield "# srun exits with the highest code of all nodes, even of one that was excluded or"
        yield "# killed; the job's own code is that of the first node"
        yield "own=$(mktemp)"
        yield AGENT
        agent = 'bash -c "$agent" "$own" elasticrun'
    yield " \\\n    ".join((SRUN + cores, agent, *words))
    yield "code=$?"
    if settings.uses_first_node_code:
        sure = " | ".join(map(str, sorted((EXIT_OK, EXIT_SAVED, *FINAL_CODES))))
        yield 'own_code=$(cat "$own")'
        yield 'rm -f "$own"'
        yield f'case "$own_code" in {sure}) code=$own_code ;; esac'


def _trailer(settings: BatchSettings) -> Iterator[str]:
    often = settings.requeues + settings.retries
    if often:
        yield "again=0"
        yield 'case "$code" in'
        yield f"    {EXIT_SAVED}) again=1 ;; # told to leave, and a step of all ranks is saved"
        yield f"    {' | '.join(map(str, (EXIT_OK, *FINAL_CODES)))}) ;; # done, or hopeless"
        if settings.retries:
            yield "    *) again=1 ;; # a retry may help"
        elif settings.time_seconds:
            late = settings.time_seconds - settings.lead - RESOLUTION
            yield f'    *) [ "$SECONDS" -lt {late} ] || again=1 ;; # the time limit was reached'
        yield "esac"
        left = f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {often} ]'
        yield f'if [ "$again" = 1 ] && {left}; then'
        yield '    scontrol requeue "$SLURM_JOB_ID" && exit 0'
        yield "fi"
    yield 'exit "$code"'


def quoted(word: str) -> str:
    """Quote a word for the shell; of `--flag=value` only the value, if necessary."""
    match = re.fullmatch(r"(--[a-z0-9-]+=)(.+)", word, re.DOTALL)
    return match[1] + shlex.quote(match[2]) if match else shlex.quote(word)
