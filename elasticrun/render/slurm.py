"""`render slurm`: a script for sbatch, with every option where it can be read and changed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from elasticrun.config import EXIT_OK, EXIT_SAVED
from elasticrun.render.batch import Batch
from elasticrun.render.policy import HOPELESS

FIRST_PORT = 20000
PORTS = 12000
"""The master's port follows from the job's number, below the ports that kernels hand out."""

SRUN = "srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none"


def script(wanted: Batch) -> str:
    """The whole script; it ends with the exit code of the job."""
    return "\n".join((*_head(wanted), "", *_setting(wanted), "", *_step(wanted), *_end(wanted), ""))


def _head(wanted: Batch) -> Iterator[str]:
    yield "#!/bin/bash"
    directives = {
        "job-name": wanted.name,
        "nodes": wanted.nodes,
        "ntasks-per-node": "1",
        "cpus-per-task": str(wanted.cpus_per_task or ""),
        "gpus-per-node": wanted.gpus_per_node,
        "mem": wanted.memory,
        "partition": wanted.partition,
        "account": wanted.account,
        "qos": wanted.qos,
        "time": wanted.time,
        "array": wanted.array,
        "output": wanted.output or ("%x-%A_%a.out" if wanted.array else "%x-%j.out"),
        "chdir": wanted.working_dir,
    }
    yield from (f"#SBATCH --{key}={value}" for key, value in directives.items() if value)
    if wanted.exclusive:
        yield "#SBATCH --exclusive"
    yield "# one node that dies does not end the job: the others go on"
    yield "#SBATCH --no-kill"
    if wanted.time:
        yield "# every node saves a step and leaves before the time is over"
        yield f"#SBATCH --signal={wanted.signal}@{wanted.lead}"
    if wanted.requeues:
        yield "#SBATCH --requeue"
    yield "#SBATCH --open-mode=append"


def _setting(wanted: Batch) -> Iterator[str]:
    yield "set -u"
    yield from (f"export {key}={shlex.quote(value)}" for key, value in wanted.env.items())
    if not wanted.launch.by_etcd:
        yield "# the first node hosts the job's master"
        yield 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        yield f"port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))"
    if wanted.launch.job_id:
        name = shlex.quote(wanted.launch.job_id)
    elif wanted.array:
        name = '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"'
    else:
        name = '"$SLURM_JOB_ID"'
    if wanted.launch.by_etcd:  # which remembers how a run of that name ended
        name += '"-${SLURM_RESTART_COUNT:-0}"'
    yield f"job={name}"


def _step(wanted: Batch) -> Iterator[str]:
    launch = wanted.launch
    # since Slurm 22.05 a step does not take this from its job
    cores = f" --cpus-per-task={wanted.cpus_per_task}" if wanted.cpus_per_task else ""
    words = [f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.nproc_per_node}"]
    if not launch.by_etcd:
        words += ["--rdzv-backend=c10d", '--rdzv-endpoint="$head:$port"']
    words += ['--rdzv-id="$job"', *map(quoted, launch.flags)]
    words.append(" ".join(map(quoted, launch.program)))
    yield " \\\n    ".join((SRUN + cores, "elasticrun", *words))
    yield "code=$?"


def _end(wanted: Batch) -> Iterator[str]:
    if wanted.requeues:
        late = wanted.time_seconds - wanted.lead - 60  # Slurm may send the signal a minute early
        yield "again=0"
        yield 'case "$code" in'
        yield f"    {EXIT_SAVED}) again=1 ;; # told to leave, and a step of all ranks is saved"
        yield f"    {' | '.join(map(str, (EXIT_OK, *HOPELESS)))}) ;; # done, or hopeless"
        yield f'    *) [ "$SECONDS" -lt {late} ] || again=1 ;; # the time was over'
        yield "esac"
        often = f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {wanted.requeues} ]'
        yield f'if [ "$again" = 1 ] && {often}; then'
        yield '    scontrol requeue "$SLURM_JOB_ID" && exit 0'
        yield "fi"
    yield 'exit "$code"'


def quoted(word: str) -> str:
    """A word of the shell; of `--flag=value` only the value is quoted, where it has to be."""
    match = re.fullmatch(r"(--[a-z0-9-]+=)(.+)", word, re.DOTALL)
    return match[1] + shlex.quote(match[2]) if match else shlex.quote(word)
