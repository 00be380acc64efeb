"""The batch script, run by a real bash with Slurm's commands played by functions."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from elasticrun.cli.detection.found import PORTS, port_of_number
from elasticrun.cli.flags import get_args_parser
from tests.jobs.render.cases import CASES
from tests.jobs.render.rendered import render

LEAST = ("slurm", "--name", "tr")
# Each command writes down its words, with a NUL behind each. srun runs the task of two nodes and
# ends with $CODE; the first node's agent ends with $OWN, and may be sent a signal meanwhile.
PLAYED = r"""
srun() {
    printf '%s\0' "$@" >>"$SEEN/srun"
    while [ $# -gt 0 ] && [ "$1" != bash ] && [ "$1" != elasticrun ]; do shift; done
    for node in 1 0; do SLURM_NODEID=$node "$@"; done
    return "$CODE"
}
elasticrun() {
    [ "$SLURM_NODEID" = 0 ] || return 75
    sh -c '[ -z "$1" ] || kill -s "$1" "$PPID"; exit "$2"' sh "$SIGNAL" "$OWN"
}
scontrol() {
    printf '%s\0' "$@" >>"$SEEN/scontrol"
    [ "$1" != show ] || printf 'n1\nn2\n'
}
export -f srun scontrol elasticrun
"""


class Ran(NamedTuple):
    """What came of a script."""

    code: int
    step: list[str]  # the words of srun
    controls: list[str]  # the words of scontrol, all calls


def run(script: str, folder: Path, *, code: int = 0, own: int | None = None, **environ: str) -> Ran:
    """Run a script as a batch job with number 70123 on two nodes; its step ends with `code`, and
    the first node's agent with `own` (else `code`)."""
    file = folder / "job.sh"
    file.write_text(script, encoding="utf-8")
    subprocess.run(["bash", "-n", str(file)], check=True, timeout=240)
    variables = {
        "PATH": "/usr/bin:/bin", "SEEN": str(folder), "CODE": str(code), "SLURM_JOB_ID": "70123",
        "SLURM_JOB_NODELIST": "n[1-2]", "OWN": str(code if own is None else own), "SIGNAL": "",
        "TMPDIR": str(folder), **environ,
    }  # fmt: skip
    words = ["bash", "-c", f'{PLAYED}\nexec bash "$0"', str(file)]
    done = subprocess.run(words, env=variables, timeout=240, capture_output=True)
    assert done.stderr == b""
    said = []
    for name in ("srun", "scontrol"):
        seen = folder / name
        said.append(seen.read_text(encoding="utf-8").split("\0")[:-1] if seen.exists() else [])
        seen.unlink(missing_ok=True)
    assert not list(folder.glob("tmp.*"))
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
    assert (ns.rdzv_backend, ns.rdzv_endpoint, ns.rdzv_id) == ("c10d", "n1:27123", "70123")
    assert (ns.log_line_prefix_template, ns.token_file) == (template, "/home/it's me/t")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "own", "ends"),
    [
        (75, 0, 0),  # done with a spare; a bad node was excluded
        (137, 0, 0),  # done; another node's agent was killed
        (137, 99, 99),
        (137, 93, 93),
        (75, 2, 2),
        (75, 1, 75),  # it says nothing that srun does not
        (137, 75, 137),  # the first node's own end
        (1, 137, 1),
    ],
)
def test_the_script_ends_with_the_code_of_the_job(
    code: int, own: int, ends: int, tmp_path: Path
) -> None:
    script = render(*LEAST, "--nnodes=2", "--spares=1", "--", "t.py").out
    assert run(script, tmp_path, code=code, own=own).code == ends


@pytest.mark.parametrize("signal", ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"])
def test_a_signal_to_all_of_a_task_leaves_the_launcher_its_time(
    signal: str, tmp_path: Path
) -> None:
    script = render(*LEAST, "--nnodes=2", "--", "t.py").out
    assert run(script, tmp_path, code=137, own=99, SIGNAL=signal).code == 99


def test_a_node_that_may_end_before_the_job_does_not_speak_for_it(tmp_path: Path) -> None:
    script = render(*LEAST, "--nnodes=2", "--exit-barrier-timeout=9", "--", "t.py").out
    assert run(script, tmp_path, code=75, own=0).code == 75


def test_the_port_is_the_one_that_detection_takes(tmp_path: Path) -> None:
    """So two jobs of one machine have two ports, however they were started, and none torchrun's."""
    script = render(*LEAST, "--", "t.py").out
    (line,) = (line for line in script.splitlines() if line.startswith("port="))
    jobs = (1, 8999, 9000, 9400, 9500, 18400, 2**26)
    words = "".join(f"SLURM_JOB_ID={job}; {line}; echo $port; " for job in jobs)
    done = subprocess.run(["bash", "-c", words], capture_output=True, timeout=240, check=True)
    assert list(map(int, done.stdout.split())) == [port_of_number(job) for job in jobs]
    assert not {29400, 29500} & set(PORTS)


@pytest.mark.parametrize("signal", ["TERM", "HUP", "USR1", "USR2"])
def test_agents_leave_by_the_signal_that_is_sent(signal: str, tmp_path: Path) -> None:
    script = render(*LEAST, "--signal", f"SIG{signal}@90", "--", "t.py").out
    assert f"#SBATCH --signal={signal}@90\n" in script
    step = run(script, tmp_path).step
    ns = get_args_parser({}).parse_args(step[step.index("elasticrun") + 1 :])
    usual = get_args_parser({}).get_default("signals_to_handle").split(",")
    handled = ns.signals_to_handle.split(",")
    assert handled == list(dict.fromkeys((*usual, f"SIG{signal}")))
    told = render(*LEAST, "--signal", f"{signal}@90", f"--signals-to-handle=SIG{signal}", "--", "t")
    assert told.out.count("signals-to-handle") == 1


def test_a_signal_that_comes_too_late_is_told() -> None:
    words = ("--exclusive", "--token-file=/t", "--time=60", "--", "t.py")
    assert not render(*LEAST, *words).notes
    (note,) = render(*LEAST, "--departure-grace=300", *words).notes
    assert "--signal TERM@120: a node may need 335 s" in note


def test_ranks_are_as_many_as_gpus_where_nobody_says() -> None:
    for asked in ("8", "h100:8"):
        printed = render(*LEAST, "--gpus-per-node", asked, "--", "t.py")
        assert "--nproc-per-node=8" in printed.out
        assert any("8 ranks on each node" in note for note in printed.notes)
    printed = render(*LEAST, "--gpus-per-node=8", "--nproc-per-node=1", "--", "t.py")
    assert "--nproc-per-node=1" in printed.out


def test_further_options_of_sbatch() -> None:
    words = ("--sbatch", "constraint=[a|b]&c", "--sbatch=--exclude=n[1-4,7]", "--sbatch", "hold")
    script = render(*LEAST, *words, "--", "t.py").out
    for line in ("--constraint=[a|b]&c", "--exclude=n[1-4,7]", "--hold"):
        assert f"#SBATCH {line}\n" in script


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
    assert "--rdzv-endpoint=n1:27124" in step, "no two of them meet"


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


@pytest.mark.parametrize(
    ("code", "restarts", "back"),
    [(1, "", True), (137, "1", True), (1, "2", False), (99, "", True), (93, "", False), (0, "", 0)],
)
def test_what_may_be_tried_again_is_tried_as_often_as_was_said(
    code: int, restarts: str, back: bool, tmp_path: Path
) -> None:
    script = render(*LEAST, "--retries=2", "--", "t.py").out
    assert "#SBATCH --requeue\n" in script
    assert "#SBATCH --no-kill\n" in script
    counted = {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    ran = run(script, tmp_path, code=code, **counted)
    assert (ran.controls[-2:] == ["requeue", "70123"]) == back
    assert ran.code == (0 if back else code)


@pytest.mark.parametrize(("code", "back"), [(99, True), (1, False), (0, False)])
def test_without_a_time_limit_who_has_saved_goes_back(
    code: int, back: bool, tmp_path: Path
) -> None:
    script = render(*LEAST, "--requeue=5", "--", "t.py").out
    ran = run(script, tmp_path, code=code, SECONDS="999999")
    assert (ran.controls[-2:] == ["requeue", "70123"]) is back
    assert "#SBATCH --signal=TERM@120\n" in script


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("1-2", 93600), ("1-02:30", 95400),
     ("2-00:00:01", 172801)],
)  # fmt: skip
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    script = render(*LEAST, f"--time={text}", "--requeue=1", "--signal=HUP@60", "--", "t.py").out
    assert f"#SBATCH --time={text}\n" in script
    assert "#SBATCH --signal=HUP@60\n" in script
    assert f'"$SECONDS" -lt {seconds - 60 - 60} ' in script
