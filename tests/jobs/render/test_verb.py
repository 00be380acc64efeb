"""The verb as a process: what goes where, and the exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.further import further
from tests.jobs.render.cases import CASES

COMMAND = (sys.executable, "-m", "elasticrun", "render")
# Nothing of the machine that renders may get into what another machine runs.
ELSEWHERE = {"PET_NNODES": "7", "PET_MAX_RESTARTS": "9", "ELASTICRUN_TOKEN": "s3cret",
             "ELASTICRUN_SAVE_LIMIT": "1", "JOB_COMPLETION_INDEX": "3"}  # fmt: skip


def test_the_manifest_goes_to_stdout_and_remarks_to_stderr() -> None:
    name = "k8s_elastic.yaml"
    done = subprocess.run(
        [*COMMAND, *CASES[name]], capture_output=True, timeout=240, env=os.environ | ELSEWHERE
    )
    assert done.returncode == 0
    assert done.stdout == (Path(__file__).parent / "goldens" / name).read_bytes()
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("elasticrun: ")


def test_bad_input_is_one_line_and_code_2() -> None:
    words = [*COMMAND, "k8s", "--name", "Tr", "--image", "a:1", "--", "train.py"]
    done = subprocess.run(words, capture_output=True, timeout=240)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"elasticrun: error: --name 'Tr': ")
    assert done.stderr.count(b"\n") == 1


@further("cli/test_main::test_a_verb_is_the_first_word_and_no_file")
@pytest.mark.slow
def test_a_script_named_render_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "render").write_text("print('a script of that name')\n")
    done = subprocess.run(
        [sys.executable, "-m", "elasticrun", "render"],
        cwd=tmp_path,
        capture_output=True,
        timeout=240,
    )
    assert b"a script of that name" in done.stdout


def test_neither_torch_nor_grpc_is_needed() -> None:
    code = (
        "import sys; from elasticrun.cli.main import main\n"
        "main(['render', 'slurm', '--name', 'a', '--', 't.py'])\n"
        "bad = {'torch', 'grpc', 'yaml'} & set(sys.modules); assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr.decode()
