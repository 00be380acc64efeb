"""`render slurm`: a script for sbatch, with every option where it can be read and changed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from elasticrun.config import EXIT_OK, EXIT_SAVED
from elasticrun.detection.ports import PORTS
from elasticrun.render.batch import RESOLUTION, Batch
from elasticrun.render.policy import HOPELESS

SRUN = "srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none"

AGENT = """\
agent='trap : TERM INT HUP QUIT USR1 USR2 # these are for the launcher
"$@"
code=$?
[ "$SLURM_NODEID" != 0 ] || [ ! -f "$0" ] || echo "$code" >"$0"
exit "$code"'"""
"""The task of each node: the launcher, and on the first node a file with its exit code."""


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
    yield from (f"#SBATCH --{option}" for option in wanted.options)
    if wanted.signal:
        yield "# every node saves a step and leaves before the time is over"
        yield f"#SBATCH --signal={wanted.signal}@{wanted.lead}"
    if wanted.requeues:
        yield "# without --no-kill: when Slurm has noticed that a node is dead, the whole job goes"
        yield "# back into the queue; with it, it would hang if that is the node of this script"
        yield "#SBATCH --requeue"
    else:
        yield "# one node that dies does not end the job: the others go on; but not without the one"
        yield "# where this script runs: then `scontrol requeue` the job, or `scancel` it"
        yield "#SBATCH --no-kill"
        if wanted.retries:
            yield "#SBATCH --requeue"
    yield "#SBATCH --open-mode=append"


def _setting(wanted: Batch) -> Iterator[str]:
    yield "set -u"
    yield from (f"export {key}={shlex.quote(value)}" for key, value in wanted.env.items())
    if not wanted.launch.by_etcd:
        yield "# the first node hosts the job's master"
        yield 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        yield f"port=$(({PORTS.start} + SLURM_JOB_ID % {len(PORTS)}))"
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
    agent = "elasticrun"
    if wanted.knows_code:
        yield "# srun ends with the highest code of all nodes, also of one that was excluded or"
        yield "# killed; the job's own is the one with which the first node ends"
        yield "own=$(mktemp)"
        yield AGENT
        agent = 'bash -c "$agent" "$own" elasticrun'
    yield " \\\n    ".join((SRUN + cores, agent, *words))
    yield "code=$?"
    if wanted.knows_code:
        sure = " | ".join(map(str, sorted((EXIT_OK, EXIT_SAVED, *HOPELESS))))
        yield 'own_code=$(cat "$own")'
        yield 'rm -f "$own"'
        yield f'case "$own_code" in {sure}) code=$own_code ;; esac'


def _end(wanted: Batch) -> Iterator[str]:
    often = wanted.requeues + wanted.retries
    if often:
        yield "again=0"
        yield 'case "$code" in'
        yield f"    {EXIT_SAVED}) again=1 ;; # told to leave, and a step of all ranks is saved"
        yield f"    {' | '.join(map(str, (EXIT_OK, *HOPELESS)))}) ;; # done, or hopeless"
        if wanted.retries:
            yield "    *) again=1 ;; # another try may help"
        elif wanted.time_seconds:
            late = wanted.time_seconds - wanted.lead - RESOLUTION
            yield f'    *) [ "$SECONDS" -lt {late} ] || again=1 ;; # the time was over'
        yield "esac"
        left = f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {often} ]'
        yield f'if [ "$again" = 1 ] && {left}; then'
        yield '    scontrol requeue "$SLURM_JOB_ID" && exit 0'
        yield "fi"
    yield 'exit "$code"'


def quoted(word: str) -> str:
    """A word of the shell; of `--flag=value` only the value is quoted, where it has to be."""
    match = re.fullmatch(r"(--[a-z0-9-]+=)(.+)", word, re.DOTALL)
    return match[1] + shlex.quote(match[2]) if match else shlex.quote(word)
