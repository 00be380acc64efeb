"""`elasticrun --srun ...` in a Slurm batch script or under salloc: this process becomes srun, which
starts the same command once on each node of the job. Only ever on request: under torchrun the bare
command runs on this host alone, and a script that starts it on each node by ssh counts on that.
With `--dry-run` it starts nothing, and the command is printed."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.values import UsageError
from elasticrun.config import EXIT_OK, EXIT_USAGE
from elasticrun.detection.found import amount, number
from elasticrun.detection.slurm import PTY, step_of

OPTIONS: Final = ("--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0")
"""One agent a node; and whether a job goes on without one is not for srun to say."""

NOT_HANDED_ON: Final = ("--srun", "--dry-run", "--dry_run")
"""Flags that srun's tasks are not given."""

_OF_A_SHELL: Final = (PTY, "SLURM_PTY_WIN_COL", "SLURM_PTY_WIN_ROW")
"""What `srun --pty` has left in a shell and says nothing about a step that is started from it."""


def become_srun(
    words: Sequence[str],
    ns: argparse.Namespace,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> int:
    """Say the command and become it, or print it for a dry run: only then it returns, with the exit
    code. UsageError where it cannot be."""
    interactive = sys.stdin is not None and sys.stdin.isatty()
    command = srun_command(words, environ, interactive=interactive)
    if ns.dry_run:
        print(shlex.join(command))
        return EXIT_OK
    say(f"--srun: {shlex.join(command)}")
    for name in _OF_A_SHELL:
        os.environ.pop(name, None)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise UsageError(f"--srun: srun cannot be started: {error.strerror}", EXIT_USAGE) from None


def srun_command(
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    interactive: bool,
) -> list[str]:
    """srun's command line for these words of ours, which hold --srun. UsageError."""
    nodes = number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    if number(environ, "SLURM_JOB_ID", "SLURM_JOBID") is None or nodes is None:
        raise UsageError(
            "--srun: this is no Slurm job (SLURM_JOB_ID is not set): use it in a batch script or "
            "under salloc, and leave it out elsewhere",
            EXIT_USAGE,
        )
    step = step_of(environ)
    if step is not None and not interactive and not environ.get(PTY):
        raise UsageError(
            f"--srun: srun has started this already (step {step} of the job): leave --srun out",
            EXIT_USAGE,
        )
    count = amount(nodes)
    # A batch script's own number of tasks would win over one task a node.
    options = [f"--nodes={count}", f"--ntasks={count}", *OPTIONS]
    if environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID"):
        options.append("--overlap")  # the shell we are in holds the job's resources
    return ["srun", *options, sys.executable, "-P", "-m", "elasticrun", *_without(words)]


def _without(words: Sequence[str]) -> list[str]:
    """The words without --srun and --dry-run; the script's words stay."""
    script = get_args_parser().script_at(words)
    return [*(word for word in words[:script] if word not in NOT_HANDED_ON), *words[script:]]
