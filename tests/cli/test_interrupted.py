"""SIGINT before there is an agent: the command ends by the signal, as torchrun, without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs
from tests.harness import LIMIT, clean_environment

MOMENTS = (
    "elasticrun.cli",
    "elasticrun.cli.main",
    "elasticrun.config",
    "argparse",
    "elasticrun.cli.table",
    "elasticrun.cli.settings",
    "elasticrun.cli.devices",
    "elasticrun.cli.resolve",
    "elasticrun.agent.main",
    "elasticrun.host.log",
    "elasticrun.agent.main",
)
"""What is being imported when the signal comes."""

HOOK = """
import os, signal, sys

def at_import(event, args):
    if event == "import" and args[0] == os.environ["AT"]:
        print("now", flush=True)
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(at_import)
"""


def run(folder: Path, moment: str, *before: str, program: str = "elasticrun") -> tuple[object, ...]:
    """The command, interrupted at this moment: its exit code, output and errors."""
    (folder / "sitecustomize.py").write_text(HOOK)
    (folder / "s.py").touch()
    done = subprocess.run(
        [*before, sys.executable, "-m", program, "--launch=exec", str(folder / "s.py")],
        env={**clean_environment(), "PYTHONPATH": f"{folder}{os.pathsep}.", "AT": moment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("program", ["elasticrun", "elasticrun.run"])
def test_at_any_moment(program: str, tmp_path: Path) -> None:
    moments = MOMENTS if program == "elasticrun" else MOMENTS[1::4]
    ends = {moment: run(tmp_path, moment, program=program) for moment in moments}
    assert ends == dict.fromkeys(ends, (-signal.SIGINT, "now\n", ""))


def test_as_the_first_process_of_a_container(tmp_path: Path) -> None:
    """Which no signal ends that it does not handle."""
    needs.namespaces("--fork", "--pid", "--kill-child")
    unshare = ("unshare", "--fork", "--pid", "--kill-child")
    assert run(tmp_path, "argparse", *unshare) == (128 + signal.SIGINT, "now\n", "")
