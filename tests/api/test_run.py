"""elasticrun.run in the place of torch.distributed.run, as accelerate and Fabric use it."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torch_run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from elasticrun import run
from elasticrun.launcher import LaunchConfig, LaunchError, elastic_launch
from tests.further import cases, further
from tests.harness import program

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, pathlib, sys, time
rank = os.environ["RANK"]
draft, done = (pathlib.Path(sys.argv[1], name + rank) for name in ("draft", "rank"))
draft.write_text(json.dumps(
    [sys.argv[2:], os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RUN_ID"]]))
draft.rename(done)
if "fail" in sys.argv and rank == "1":
    while not done.with_name("rank0").exists():  # who has not written yet would be stopped
        time.sleep(0.01)
    raise RuntimeError("this rank was told to fail")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def written(folder: Path) -> dict[int, Any]:
    return {int(file.name[4:]): json.loads(file.read_text()) for file in folder.glob("rank*")}


@further("test_run_with_a_namespace", "test_a_failing_script_raises_once_and_leaves_an_error_file")
def test_main(script: Path, tmp_path: Path) -> None:
    run.main(["--nproc-per-node=2", "--rdzv-id=mine", str(script), str(tmp_path), "--lr", "1"])
    assert written(tmp_path) == {rank: [["--lr", "1"], "2", "mine"] for rank in (0, 1)}


def of_torchs_parser(script: str, folder: str) -> argparse.Namespace:
    words = ["--standalone", "--nproc_per_node", "2", script, folder]
    return torch_run.get_args_parser().parse_args(words)


def that_lacks_most(script: str, folder: str) -> argparse.Namespace:
    words = {"nproc_per_node": "2", "training_script": script, "training_script_args": [folder]}
    return argparse.Namespace(**words)


def as_accelerate_makes_it(script: str, folder: str) -> argparse.Namespace:
    """Defaults of the parser, overwritten by a namespace of another parser."""
    args, _ = run.get_args_parser().parse_known_args([script])
    words = {"nproc_per_node": "2", "training_script_args": [folder], "nnodes": "1"}
    vars(args).update(words, monitor_interval=0.1)
    return args


@pytest.mark.parametrize(
    "made",
    cases(
        [of_torchs_parser, that_lacks_most, as_accelerate_makes_it], kept=[as_accelerate_makes_it]
    ),
)
def test_run_with_a_namespace(made: Any, script: Path, tmp_path: Path) -> None:
    run.run(made(str(script), str(tmp_path)))
    assert sorted(written(tmp_path)) == [0, 1]


def test_a_failing_script_raises_once_and_leaves_an_error_file(
    script: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    own = tmp_path / "own.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own))
    with pytest.raises(ChildFailedError) as caught:
        run.main(["--nproc-per-node=2", str(script), str(tmp_path), "fail"])
    assert "this rank was told to fail" in str(caught.value)
    assert str(caught.value).splitlines()[2] == f"{script} FAILED"
    assert "Root Cause" not in capfd.readouterr().err, "the exception tells, the agent does not"
    message = json.loads(own.read_text())["message"]
    assert message["message"] == "RuntimeError: this rank was told to fail"
    assert message["errorCode"] == 1


@further("test_elastic_launch_of_a_command")
def test_elastic_launch_of_a_script(script: Path, tmp_path: Path) -> None:
    config = LaunchConfig(1, 1, 2, run_id="me")
    results = elastic_launch(config, sys.executable)("-u", str(script), str(tmp_path), "x")
    assert results == {0: None, 1: None}
    assert written(tmp_path) == {rank: [["x"], "2", "me"] for rank in (0, 1)}


def test_elastic_launch_of_a_command(tmp_path: Path) -> None:
    config = LaunchConfig(1, 1, 2, run_id="me", max_restarts=0)
    elastic_launch(config, "bash")("-c", f"touch {tmp_path}/at-${{local_rank}}-$RANK")
    assert sorted(path.name for path in tmp_path.glob("at-*")) == ["at-0-0", "at-1-1"]


@further(
    "test_elastic_launch_of_a_command", "test_a_failing_script_raises_once_and_leaves_an_error_file"
)
def test_elastic_launch_of_a_command_that_fails() -> None:
    config = LaunchConfig(1, 1, 2, run_id="me", max_restarts=0)
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, "bash")("-c", "exit 5")
    assert caught.value.name == "bash"
    assert {failure.exitcode for failure in caught.value.failures.values()} == {5}


def test_teed_output_is_seen_by_whoever_has_replaced_stdout(monkeypatch) -> None:
    """Notebooks and redirect_stdout: what torch's launcher prints in this process, so does ours."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shown, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(wrong):
        words = ["bash", "-c", "echo shown; echo wrong $RANK >&2"]
        run.main(["--nproc-per-node=2", "--tee=3", "--no-python", *words])
    assert sorted(shown.getvalue().splitlines()) == ["[default0]:shown", "[default1]:shown"]
    assert sorted(wrong.getvalue().splitlines()) == ["[default0]:wrong 0", "[default1]:wrong 1"]


def test_logs_that_cannot_be_written(script: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="is a file"):
        run.main([f"--log-dir={script}", "--redirects=3", str(script), str(tmp_path)])


@pytest.mark.parametrize(
    "wrong",
    [
        ["--nnodes=a", "x.py"],
        ["--nproc-per-node=nine", "x.py"],
        ["--max-restarts=-1", "x.py"],
        ["--redirects=9", "x.py"],
        ["/no/such/script.py"],
        ["--no-python", "--module", "x"],
    ],
)
def test_wishes_that_cannot_be_met(wrong: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        run.main(wrong)
    assert "\n" not in str(caught.value)


def test_config_from_args_is_torchs(script: Path, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torch would set it in this process
    lines = [
        ["--nproc-per-node=2", str(script), "a", "b"],
        ["--nnodes=1:3", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--rdzv-id=i",
         "--max-restarts=4", "--role=r", "--rdzv-conf=last_call_timeout=3", "-m", "mod", "x"],
        ["--nnodes=2", "--node-rank=1", "--master-addr=h", "--master-port=7", str(script)],
        ["--no-python", "bash", "-c", "true"],
        ["--run-path", str(script), "q"],
        ["--local-addr=1.2.3.4", "--shutdown-timeout=9", "--virtual-local-rank", str(script)],
    ]  # fmt: skip
    for line in lines:
        ours, command, words = run.config_from_args(run.parse_args(line))
        args = torch_run.parse_args(line)
        if args.master_port is None:
            args.master_port = 29500
        theirs, their_command, their_words = torch_run.config_from_args(args)
        assert words == their_words
        assert getattr(command, "__name__", command) == getattr(
            their_command, "__name__", their_command
        )
        same = ["min_nodes", "max_nodes", "nproc_per_node", "role", "max_restarts", "start_method",
                "monitor_interval", "local_addr", "event_log_handler", "signals_to_handle",
                "virtual_local_rank", "shutdown_timeout", "log_line_prefix_template"]  # fmt: skip
        if "--nnodes" in line[0]:
            same += ["rdzv_endpoint", "rdzv_backend", "rdzv_configs", "run_id"]
        for name in same:
            assert getattr(ours, name) == getattr(theirs, name), (line, name)


NUMBERS = {
    "parse_min_max_nnodes": ("1", "2:4", "3:1", "1:2:3", "x", "1:", ""),
    "determine_local_world_size": ("1", "7", "cpu", "auto", "gpu", "xpu", "nonsense"),
}


@pytest.mark.parametrize(("name", "text"), [(n, text) for n in NUMBERS for text in NUMBERS[n]])
def test_numbers_are_read_as_torch_reads_them(name: str, text: str) -> None:
    ours = getattr(run, name)
    try:
        expected = getattr(torch_run, name)(text)
    except Exception as error:
        with pytest.raises(type(error)):
            ours(text)
    else:
        assert ours(text) == expected


@further("test_a_failing_script_raises_once_and_leaves_an_error_file")
def test_as_a_command(script: Path, tmp_path: Path) -> None:
    words = ("--nproc-per-node=2", str(script), str(tmp_path), "fail")
    done = program("-m", "elasticrun.run", *words)
    assert done.returncode == 1
    assert "torch.distributed.elastic.multiprocessing.errors.ChildFailedError" in done.stderr
    assert sorted(written(tmp_path)) == [0, 1]
