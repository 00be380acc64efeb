"""The batch script, run by a real bash with Slurm's commands played by functions."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from elasticrun.cli.flags import get_args_parser
from tests.render.cases import CASES
from tests.render.rendered import render

LEAST = ("slurm", "--name", "tr")
# Each command writes down its words, with a NUL behind each; srun ends with $CODE.
PLAYED = r"""
srun() { printf '%s\0' "$@" >>"$SEEN/srun"; return "$CODE"; }
scontrol() {
    printf '%s\0' "$@" >>"$SEEN/scontrol"
    [ "$1" != show ] || printf 'n1\nn2\n'
}
export -f srun scontrol
"""


class Ran(NamedTuple):
    """What came of a script."""

    code: int
    step: list[str]  # the words of srun
    controls: list[str]  # the words of scontrol, all calls


def run(script: str, folder: Path, *, code: int = 0, **environ: str) -> Ran:
    """Run a script as a batch job with number 70123 on two nodes; its step ends with `code`."""
    file = folder / "job.sh"
    file.write_text(script, encoding="utf-8")
    subprocess.run(["bash", "-n", str(file)], check=True, timeout=60)
    variables = {
        "PATH": "/usr/bin:/bin", "SEEN": str(folder), "CODE": str(code), "SLURM_JOB_ID": "70123",
        "SLURM_JOB_NODELIST": "n[1-2]", **environ,
    }  # fmt: skip
    words = ["bash", "-c", f'{PLAYED}\nexec bash "$0"', str(file)]
    done = subprocess.run(words, env=variables, timeout=60, capture_output=True)
    assert done.stderr == b""
    said = []
    for name in ("srun", "scontrol"):
        seen = folder / name
        said.append(seen.read_text(encoding="utf-8").split("\0")[:-1] if seen.exists() else [])
        seen.unlink(missing_ok=True)
    return Ran(done.returncode, *said)


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(".sh")])
def test_every_golden_is_a_script(name: str, tmp_path: Path) -> None:
    script = render(*CASES[name]).out
    ran = run(script, tmp_path, SLURM_ARRAY_JOB_ID="70100", SLURM_ARRAY_TASK_ID="3", code=7)
    assert ran.code == 7
    assert ran.step.count("elasticrun") == 1


@pytest.mark.parametrize(
    "program",
    [
        ("train.py", "--lr", "3e-4"),
        (
            "train.py",
            "$HOME",
            "`id`",
            "$(id)",
            "it's",
            '"',
            "\\",
            "a b",
            "",
            "*",
            "~",
            "#",
            "é",
            "\n",
        ),
        ("train.py", "${local_rank}", "--", "--", "!x", "&", ";", "a=b", "--name='x'"),
    ],
)
def test_a_node_reads_the_command_that_was_meant(program: tuple[str, ...], tmp_path: Path) -> None:
    template = "[${role_name}'s $x] "
    printed = render(
        *LEAST, "--nnodes=2:4", "--nproc-per-node=8", "--max-restarts=3",
        "--log-line-prefix-template", template, "--token-file", "/home/it's me/t", "--", *program,
    )  # fmt: skip
    ran = run(printed.out, tmp_path)
    ns = get_args_parser({}).parse_args(ran.step[ran.step.index("elasticrun") + 1 :])
    assert (ns.training_script, *ns.training_script_args) == program
    assert (ns.nnodes, ns.nproc_per_node, ns.max_restarts) == ("2:4", "8", 3)
    assert (ns.rdzv_backend, ns.rdzv_endpoint, ns.rdzv_id) == ("c10d", "n1:30123", "70123")
    assert (ns.log_line_prefix_template, ns.token_file) == (template, "/home/it's me/t")


def test_a_step_has_one_agent_a_node_and_outlives_a_node(tmp_path: Path) -> None:
    ran = run(render(*LEAST, "--nnodes=2", "--cpus-per-task=8", "--", "t.py").out, tmp_path)
    assert ran.step[: ran.step.index("elasticrun")] == [
        "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none",
        "--cpus-per-task=8",
    ]  # fmt: skip


def test_values_of_variables_are_handed_on_as_they_are(tmp_path: Path) -> None:
    value = "a'b\"$HOME `id` \\ \n*"
    script = render(*LEAST, "--env", f"NOTE={value}", "--", "t.py").out
    script = script.replace("srun ", 'printf "%s" "$NOTE" >"$SEEN/note"; srun ', 1)
    run(script, tmp_path)
    assert (tmp_path / "note").read_text() == value


@pytest.mark.parametrize(
    ("nodes", "spares", "directive"),
    [("4", 0, "4"), ("4", 2, "6"), ("2:4", 0, "2-4"), ("2:4", 1, "2-5")],
)
def test_spares_come_on_top(nodes: str, spares: int, directive: str) -> None:
    script = render(*LEAST, f"--nnodes={nodes}", f"--spares={spares}", "--", "t.py").out
    assert f"#SBATCH --nodes={directive}\n" in script
    assert f"    --nnodes={nodes} \\\n" in script


def test_each_task_of_an_array_is_a_job_of_its_own(tmp_path: Path) -> None:
    script = render(*LEAST, "--array=0-3", "--", "t.py").out
    one = {"SLURM_JOB_ID": "70124", "SLURM_ARRAY_JOB_ID": "70123", "SLURM_ARRAY_TASK_ID": "1"}
    step = run(script, tmp_path, **one).step
    assert "--rdzv-id=70123_1" in step
    assert "--rdzv-endpoint=n1:30124" in step, "no two of them meet"


def test_with_etcd_each_run_has_a_name_of_its_own(tmp_path: Path) -> None:
    script = render(*LEAST, "--master-store=etcd://e:2379", "--", "t.py").out
    assert "--rdzv-id=70123-0" in run(script, tmp_path).step
    ran = run(script, tmp_path, SLURM_RESTART_COUNT="2")
    assert "--rdzv-id=70123-2" in ran.step
    assert not any(word.startswith("--rdzv-endpoint") for word in ran.step)
    assert ran.controls == []


@pytest.mark.parametrize(
    ("code", "seconds", "restarts", "back"),
    [
        (1, "3430", "", True),  # the signal came, the nodes have left
        (1, "3430", "4", True),
        (1, "3430", "5", False),  # often enough
        (137, "3430", "", True),  # one node was too slow to leave
        (99, "30", "", True),  # all saved, whenever that is
        (99, "30", "5", False),
        (1, "30", "", False),  # a failure is a failure
        (0, "3430", "", False),  # done
        (2, "3430", "", False),  # trying again cannot help
        (93, "3430", "", False),
    ],
)
def test_who_has_saved_or_has_no_time_left_goes_back_into_the_queue(
    code: int, seconds: str, restarts: str, back: bool, tmp_path: Path
) -> None:
    script = render(*LEAST, "--time=1:00:00", "--requeue=5", "--", "t.py").out
    counted = {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    ran = run(script, tmp_path, code=code, SECONDS=seconds, **counted)
    assert (ran.controls[-2:] == ["requeue", "70123"]) is back
    assert ran.code == (0 if back else code)


def test_what_no_kill_costs_a_job_that_is_to_be_requeued_is_told() -> None:
    notes = render(*LEAST, "--time=1:00:00", "--requeue=5", "--", "t.py").notes
    assert any("scontrol requeue JOBID" in note for note in notes)
    assert not any("requeue" in note for note in render(*LEAST, "--", "t.py").notes)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("1-2", 93600), ("1-02:30", 95400),
     ("2-00:00:01", 172801)],
)  # fmt: skip
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    script = render(*LEAST, f"--time={text}", "--requeue=1", "--signal=INT@60", "--", "t.py").out
    assert f"#SBATCH --time={text}\n" in script
    assert "#SBATCH --signal=INT@60\n" in script
    assert f'"$SECONDS" -lt {seconds - 60 - 60} ' in script
