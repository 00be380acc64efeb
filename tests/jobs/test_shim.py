"""`elasticrun shim`: whatever calls torchrun gets elasticrun, and ranks do not notice the shim."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from elasticrun.cli.main import main
from elasticrun.config import EXIT_USAGE
from elasticrun.jobs.verbs import shim
from elasticrun.wire import env
from tests import needs
from tests.further import cases, further
from tests.harness import Launched, World, await_true

SHIM = [sys.executable, "-m", "elasticrun", "shim", "--"]

RANK = """
import json, os, sys
import torch
with open(f"/proc/{os.getppid()}/cmdline") as file:
    parent = file.read()
path = [each for each in sys.path if "shim" in each]
finders = [str(each).partition(" at 0x")[0] for each in sys.meta_path]
seen = {"env": dict(os.environ), "argv": sys.argv[1:], "parent": parent, "path": path,
        "torch": torch.__file__, "finders": finders}
print("rank " + json.dumps(seen), flush=True)
"""

OF_ONE_JOB = re.compile(
    r"(MASTER_PORT|TORCHELASTIC_RUN_ID|TORCHELASTIC_ERROR_FILE|_)\Z|ELASTICRUN_"
)
"""Variables whose values differ from job to job; a shell sets `_`."""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return path


def ranks(done: Launched) -> list[dict[str, Any]]:
    """What the ranks have printed."""
    assert done.wait() == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "rank {" in line]
    return [json.loads(line.partition("rank ")[2]) for line in lines]


def environments(seen: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Each rank's variables; without the values that differ from job to job."""
    return {
        (each["env"]["RANK"], name, "" if OF_ONE_JOB.match(name) else value)
        for each in seen
        for name, value in each["env"].items()
    }


CALLS = {
    "torchrun": "torchrun --nproc-per-node=2 {script} a 'b c'",
    "with its path": "{bin}/torchrun --nproc-per-node=2 {script} a 'b c'",
    "module": "python -u -m torch.distributed.run --nproc_per_node 2 {script} a 'b c'",
    "launch": "python -mtorch.distributed.launch --use-env --nproc-per-node=2 {script} a 'b c'",
    "subprocess": (
        """python -c 'import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))' """
        "torchrun --nproc-per-node=2 {script} a 'b c'"
    ),
    "another runner": (
        "python -m cProfile -o /dev/null "
        "-m torch.distributed.run --nproc-per-node=2 {script} a 'b c'"
    ),
    "in a child": """sh -c 'python -c "import torch" && exec "$@"' sh """
    "{bin}/python -m torch.distributed.run --nproc-per-node=2 {script} a 'b c'",
}


@pytest.mark.parametrize("name", cases(CALLS, kept=["subprocess"]))
def test_each_call_is_elasticrun_and_ranks_are_as_without_the_shim(
    world: World, script: Path, name: str
) -> None:
    folder = Path(sys.executable).parent
    path = f"{folder}:/usr/bin:/bin"
    batch = script.with_name("run.sh")
    batch.write_text(CALLS[name].format(script=script, bin=folder))
    shimmed = ranks(world.command([*SHIM, "sh", str(batch)], env={"PATH": path}))
    batch.write_text(f"python -m elasticrun --nproc-per-node=2 {script} a 'b c'")
    plain = ranks(world.command(["sh", str(batch)], env={"PATH": path}))
    assert environments(shimmed) ^ environments(plain) == set()
    for each in shimmed:
        assert each["argv"] == ["a", "b c"]
        assert "elasticrun" in each["parent"]
        assert each["path"] == []
        assert (each["torch"], each["finders"]) == (plain[0]["torch"], plain[0]["finders"])
    assert not list(world.tmp.glob("elasticrun-shim-*"))


@further("test_launchers")
def test_launch_without_use_env_passes_the_local_rank(world: World, script: Path) -> None:
    words = ["-m", "torch.distributed.launch", "--nproc-per-node=2", str(script), "--use-env"]
    seen = ranks(world.command([*SHIM, sys.executable, *words]))
    assert sorted(each["argv"] for each in seen) == [
        ["--local-rank=0", "--use-env"],
        ["--local-rank=1", "--use-env"],
    ]


@further(
    "test_each_call_is_elasticrun_and_ranks_are_as_without_the_shim",
    "api/test_run::test_run_with_a_namespace",
)
def test_accelerate_launch_gets_elasticrun_in_its_process(world: World, script: Path) -> None:
    needs.packages("accelerate")
    words = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no",
             "--dynamo_backend=no", "--main_process_port=0", str(script)]  # fmt: skip
    command = [*SHIM, sys.executable, "-m", "accelerate.commands.launch", *words]
    (world.scratch / "elasticrun.toml").write_text("max-restarts = 5\nrole = 'trainer'\ntee = 3")
    launched = world.command(command, env={"ELASTICRUN_MAX_RESTARTS": "2"})
    seen = ranks(launched)
    assert "elasticrun: settings from elasticrun.toml: role, tee\n" in launched.stderr
    assert len(seen) == 2
    for each in seen:
        assert each["env"]["TORCHELASTIC_MAX_RESTARTS"] == "2"
        assert each["env"]["ROLE_NAME"] == "trainer"
        assert "elasticrun" in each["parent"]
        assert each["path"] == []
        assert not [v for v in each["env"].values() if "elasticrun-shim" in v]
        assert "ELASTICRUN_SHIM" not in each["env"]


def test_a_program_that_only_imports_torch_gets_the_real_one(world: World, tmp_path: Path) -> None:
    code = (
        "import sys; before = list(sys.modules); import torch, torch.distributed; "
        "print(torch.__file__, torch.__spec__.origin, torch.ones(2).sum().item(), "
        "[p for p in sys.path if 'shim' in p])"
    )
    shimmed = world.command([*SHIM, sys.executable, "-c", code])
    plain = world.command([sys.executable, "-c", code])
    assert (shimmed.wait(), plain.wait()) == (0, 0), shimmed.stderr
    assert shimmed.stdout == plain.stdout
    words = "sys; before = list(sys.modules); import torch"
    assert words in shimmed.stderr  # the command is named
    assert shimmed.stderr.endswith("started no torchrun that the shim could see\n")


def test_a_python_without_elasticrun_says_so(world: World, tmp_path: Path) -> None:
    """Torch of a Python that cannot import elasticrun: here a package of that name."""
    real = tmp_path / "site/torch"
    (real / "distributed").mkdir(parents=True)
    for each in (real, real / "distributed"):
        (each / "__init__.py").touch()
    (real / "distributed/run.py").write_text("print('the real torchrun')")
    isolated = "import sys; sys.path[:0] = sys.argv[1:3]; import runpy; sys.argv[1:] = []; "
    isolated += "runpy.run_module('torch.distributed.run', run_name='__main__')"
    code = f'exec {sys.executable} -S -c "$0" "${{PYTHONPATH%%:*}}" "$1"'
    done = world.command([*SHIM, "sh", "-c", code, isolated, str(real.parent)])
    assert done.wait() == 0, done.stderr
    assert done.stdout == "the real torchrun\n"
    assert "has no elasticrun, so its torchrun is unchanged" in done.stderr


def test_exit_codes_and_signals_are_those_of_the_command(world: World) -> None:
    assert world.command([*SHIM, "sh", "-c", "exit 7"]).wait() == 7
    assert world.command([*SHIM, "sh", "-c", "kill -TERM $$"]).wait() == 128 + signal.SIGTERM
    waiting = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    running = world.command([*SHIM, "sh", "-c", waiting])
    running.until_text("ready", stream="stdout")
    running.signal(signal.SIGTERM)
    assert running.wait() == 9
    assert not list(world.tmp.glob("elasticrun-shim-*"))


CALLER = """
import subprocess, sys
subprocess.run(["torchrun", "--nproc-per-node=2", *sys.argv[1:]], check=True)
"""
STUBBORN = """
import os, signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print(f"rank at {os.getpid()} ready", flush=True)
while True:
    time.sleep(60)
"""


def test_ctrl_c_at_a_caller_that_then_kills_torchrun(world: World, tmp_path: Path) -> None:
    """llamafactory-cli calls subprocess.run, which kills torchrun 0.25 s after Ctrl-C."""
    for name, text in (("call.py", CALLER), ("rank.py", STUBBORN)):
        (tmp_path / name).write_text(text)
    words = [sys.executable, str(tmp_path / "call.py"), str(tmp_path / "rank.py")]
    shm = tmp_path / "shm"  # a killed launcher leaves files there
    shm.mkdir()
    running = world.command([*SHIM, *words], cwd=tmp_path, env={env.SHM_DIR: str(shm)})
    await_true(lambda: running.stdout.count(" ready\n") == 2, "both ranks")
    found = [psutil.Process(int(pid)) for pid in re.findall(r"rank at (\d+)", running.stdout)]
    running.signal_group(signal.SIGINT)
    assert running.wait() == 128 + signal.SIGINT
    assert psutil.wait_procs(found, timeout=60)[1] == []
    assert not list(world.tmp.glob("elasticrun-shim-*"))


@pytest.mark.parametrize(
    ("words", "sentence", "code"),
    [
        ([], "nothing to run: write `elasticrun shim -- CMD [ARGS ...]`", EXIT_USAGE),
        (["--"], "nothing to run: write `elasticrun shim -- CMD [ARGS ...]`", EXIT_USAGE),
        (["--", "no-such-program"], "shim: no-such-program cannot be started: No such file", 127),
        (["--", "/dev/null"], "shim: /dev/null cannot be started: Permission denied", 126),
    ],
)
def test_bad_commands_are_one_sentence(
    words: list[str], sentence: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["shim", *words]) == code
    said = capsys.readouterr().err
    assert said.startswith(f"elasticrun: error: {sentence}")
    assert said.count("\n") == 1


def test_accelerate_launch_of_one_process_gets_a_hint(world: World, tmp_path: Path) -> None:
    accelerate = tmp_path / "accelerate"
    accelerate.write_text("#!/bin/sh\n")
    accelerate.chmod(0o700)
    for flags, hint in (
        ([], "could see: accelerate launch calls torchrun only with --multi_gpu, or if"),
        (["--multi_gpu"], "started no torchrun that the shim could see\n"),
    ):
        launched = world.command([*SHIM, str(accelerate), "launch", *flags, "train.py"])
        assert launched.wait() == 0
        assert hint in launched.stderr


# ---------------------------------------------------------------- which processes are launchers


@pytest.fixture
def torch_package() -> ModuleType:
    path = Path(shim.__file__).with_name("shim_torch.py")
    spec = importlib.util.spec_from_file_location("shim_torch", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("original", "arguments", "runs"),
    [
        ("python -m torch.distributed.run a b", "-m a b", "-m elasticrun a b"),
        ("python -u -O -mtorch.distributed.run", "-m", "-u -O -m elasticrun"),
        ("python -m torch.distributed.launch s.py x", "-m s.py x",
         "-m elasticrun s.py --local-rank=${local_rank} x"),
        ("python -m torch.distributed.launch --use_env s.py", "-m --use_env s.py",
         "-m elasticrun s.py"),
        ("python /v/bin/torchrun s.py", "/v/bin/torchrun s.py", "-P -m elasticrun s.py"),
        ("python -m pkg torch.distributed.run", "-m torch.distributed.run", ""),
        ("python -m torch.distributed.run.x a", "-m a", ""),
        ("python train.py -m torch.distributed.run", "train.py -m torch.distributed.run", ""),
        ("python -c pass torchrun", "-c torchrun", ""),
    ],
)  # fmt: skip
def test_launchers(
    torch_package: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    original: str,
    arguments: str,
    runs: str,
) -> None:
    monkeypatch.setattr(sys, "orig_argv", original.split())
    monkeypatch.setattr(sys, "argv", arguments.split())
    assert torch_package.launcher_words() == runs.split()
