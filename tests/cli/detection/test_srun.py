"""--srun: only on request, only where a Slurm job is, and never twice."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.place import srun_command
from elasticrun.cli.settings import UsageError
from tests.cli.detection.environments import BATCH, INTERACTIVE, PTY, SALLOC, SRUN
from tests.harness import clean_environment, ran

OURS = [sys.executable, "-P", "-m", "elasticrun"]
ALWAYS = ["--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"]


def command(words: str, environ: dict[str, str], *, interactive: bool = False) -> list[str]:
    split = shlex.split(words)
    get_args_parser(environ).parse_args(split)  # what cannot be read gets no further
    return srun_command(split, environ, interactive=interactive)


@pytest.mark.parametrize(
    ("environ", "more"),
    [(BATCH, []), (SALLOC, []), (INTERACTIVE, ["--overlap"]), (PTY, ["--overlap"])],
    ids=["batch", "salloc", "interactive step", "srun --pty"],
)
def test_one_agent_on_each_node_of_the_job(environ: dict[str, str], more: list[str]) -> None:
    made = command("--srun --nproc-per-node=2 train.py", environ)
    # The batch script has four tasks, which srun would start without being told otherwise.
    assert made == [
        "srun", "--nodes=2", "--ntasks=2", *ALWAYS, *more, *OURS, "--nproc-per-node=2", "train.py",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("--srun train.py", "train.py"),
        ("--srun -t 3 train.py", "-t 3 train.py"),
        (
            "--nproc-per-node 2 --srun train.py --srun --lr 3",
            "--nproc-per-node 2 train.py --srun --lr 3",
        ),
        ("--srun -- train.py 'a b'", "-- train.py 'a b'"),
        ("--srun -m pkg.train --srun", "-m pkg.train --srun"),
        ("--srun --rdzv-id=--srun --srun train.py", "--rdzv-id=--srun train.py"),
        ("--srun --dry-run train.py --dry-run", "train.py --dry-run"),
        ("--dry_run --srun train.py", "train.py"),
    ],
)
def test_the_flag_goes_and_the_script_keeps_its_words(words: str, left: str) -> None:
    made = command(words, BATCH)
    assert made[made.index("elasticrun") + 1 :] == shlex.split(left)


def test_where_it_cannot_be() -> None:
    with pytest.raises(UsageError, match="this is not a Slurm job") as outside:
        command("--srun train.py", {})
    assert outside.value.exit_code == 2
    with pytest.raises(UsageError, match="leave --srun out") as twice:
        command("--srun train.py", SRUN)
    assert twice.value.exit_code == 2


def run(*words: str, cwd: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The real command."""
    return subprocess.run(
        [sys.executable, "-m", "elasticrun", *words], cwd=cwd, capture_output=True, text=True,
        env=clean_environment() | environ, timeout=240, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_the_command_becomes_srun_and_says_so(tmp_path: Path) -> None:
    """A stand-in for srun shows what it was started with; variables of a shell's step are gone."""
    stand_in = tmp_path / "srun"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"; env | grep PTY; exit 7\n')
    stand_in.chmod(0o755)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = run("--srun", "train.py", "a b", cwd=tmp_path, environ=PTY | path)
    assert done.returncode == 7
    assert done.stdout.splitlines() == [
        "--nodes=2", "--ntasks=2", *ALWAYS, "--overlap", *OURS, "train.py", "a b",
    ]  # fmt: skip
    assert done.stderr.startswith("elasticrun: --srun: srun --nodes=2 --ntasks=2")
    assert "'a b'" in done.stderr


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    """It prints the command, without a word on standard error; there need be no srun here."""
    words = ("--srun", "--dry-run", "train.py", "a b")
    done = run(*words, cwd=tmp_path, environ=BATCH | {"PATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    assert shlex.split(done.stdout) == [
        "srun", "--nodes=2", "--ntasks=2", *ALWAYS, *OURS, "train.py", "a b",
    ]  # fmt: skip


def test_sentences_of_the_real_command(tmp_path: Path) -> None:
    outside = run("--srun", "train.py", cwd=tmp_path, environ={})
    assert (outside.returncode, outside.stdout) == (2, "")
    assert outside.stderr.count("\n") == 1
    assert "this is not a Slurm job" in outside.stderr
    missing = run("--srun", "train.py", cwd=tmp_path, environ=BATCH | {"PATH": str(tmp_path)})
    assert missing.returncode == 2
    assert "srun cannot be started: No such file" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_srun_gets_the_token(tmp_path: Path) -> None:
    """It is taken out of our own environment before anything is started."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$ELASTICRUN_TOKEN"\n')
    srun.chmod(0o755)
    environ = {**clean_environment(), **BATCH, "ELASTICRUN_TOKEN": "secret-of-sixteen"}
    environ["PATH"] = f"{tmp_path}:{environ['PATH']}"
    assert ran("--srun", "train.py", env=environ).stdout == "secret-of-sixteen\n"
