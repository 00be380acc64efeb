"""The command itself: verbs, sentences for bad input, --dry-run, completion, hand-over."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elasticrun import __version__
from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.main import SIGPIPE_EXIT, VERBS, check_program, main, notify, verb_of
from elasticrun.cli.rendezvous import RendezvousPlan
from elasticrun.cli.resolve import job_spec
from elasticrun.cli.settings import FlagValues, UsageError
from elasticrun.cli.table import FLAGS
from elasticrun.cli.verbs.master import JOB_FLAGS, configure
from elasticrun.config import EXIT_USAGE, Place
from elasticrun.host import user_folder
from elasticrun.wire.messages import CheckSpec, SaveSpec
from elasticrun.wire.types import EntryKind, Entrypoint
from tests.harness import clean_environment, ran_here, warm_server


def command(
    *words: str, cwd: Path, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "elasticrun", *words], cwd=cwd, capture_output=True, text=True,
        env=clean_environment() | warm_server() | dict(environ or {}), timeout=240,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


# ---------------------------------------------------------------- verbs


def test_a_verb_is_the_first_word_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert verb_of(["status"]) == "status"
    assert verb_of(["master", "--port", "7"]) == "master"
    assert verb_of(["./status"]) == ""
    assert verb_of(["--standalone", "status"]) == ""
    assert verb_of(["-m", "status"]) == ""
    assert verb_of(["train.py", "status"]) == ""
    assert verb_of([]) == ""
    (tmp_path / "status").write_text("print('a script')")
    assert verb_of(["status"]) == ""
    (tmp_path / "master").symlink_to("nowhere")
    assert verb_of(["master"]) == ""
    (tmp_path / "logs").mkdir()
    assert verb_of(["logs"]) == "logs"
    (tmp_path / "logs/__main__.py").touch()
    assert verb_of(["logs"]) == ""


@pytest.mark.slow
def test_help_is_one_screen_that_points_to_all_of_it(tmp_path: Path) -> None:
    for word in ("--help", "-h", "--hel"):
        short = command(word, cwd=tmp_path)
        lines = short.stdout.splitlines()
        assert (short.returncode, short.stderr) == (0, "")
        assert 24 <= len(lines) <= 40
        assert max(map(len, lines)) <= 80
        assert "--help-all" in short.stdout
        told = set(
            re.findall(
                r"[a-z]+", " ".join(re.findall(r"^  elasticrun (.{1,32})", short.stdout, re.M))
            )
        )
        assert told >= set(VERBS)
    named = set(re.findall(r"--[a-z][a-z-]+", short.stdout)) - {"--help", "--help-all"}
    assert named <= {flag.name for flag in FLAGS}
    whole = command("--help-all", cwd=tmp_path)
    assert whole.returncode == 0
    assert all(flag.name in whole.stdout for flag in FLAGS)
    assert all(f"elasticrun {verb}" in whole.stdout for verb in VERBS)


def test_version(tmp_path: Path) -> None:
    done = command("--version", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith(f"elasticrun {__version__} (torch ")


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh", "fish"])
def test_completion(shell: str, tmp_path: Path) -> None:
    if shell not in pytest.importorskip("shtab").SUPPORTED_SHELLS:
        pytest.skip(f"this shtab does not complete for {shell}")
    done = command("--print-completion", shell, cwd=tmp_path)
    assert done.returncode == 0
    for flag in ("rdzv-endpoint", "rdzv_endpoint", "restart-backoff"):
        assert flag in done.stdout
    if shell == "bash":
        checked = subprocess.run(["bash", "-n"], input=done.stdout, text=True, timeout=240)
        assert checked.returncode == 0


def test_completion_without_shtab(tmp_path: Path) -> None:
    (tmp_path / "shtab.py").write_text("raise ImportError('not here')")
    done = command("--print_completion=bash", cwd=tmp_path, environ={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert "pip install shtab" in done.stderr


# ---------------------------------------------------------------- bad input: one sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (
            [],
            2,
            "there is no script to run: write it after the flags, as in `elasticrun train.py` (see",
        ),
        (["--nproc-per-node"], 2, "--nproc-per-node needs a value, as in --nproc-per-node="),
        (["--nproc-per-node", "train.py"], 2, "; train.py is the value of --nproc-per-node here"),
        (["--on-corruption=halt", "train.py"], 2, "=halt: use one of tell, restart, exclude, off"),
        (["--on-hang=auot", "train.py"], 2, "off; did you mean auto?"),
        (["--max-restarts=x", "train.py"], 2, "--max-restarts: 'x' is not a whole number"),
        (
            ["--standalone=1", "train.py"],
            2,
            "--standalone takes no value: write --standalone without",
        ),
        (["--stand=1", "train.py"], 2, "--stand takes no value"),
        (["delete"], 2, "JOB is missing: its full name, or its run folder"),
        (["list", "mine"], 2, "'mine' is one argument too many"),
        (["list", "-o", "yaml"], 2, "--output=yaml: use one of text, json"),
        (["ckpt"], 2, "name one of ls, verify, prune"),
        (["stacks", "--rank=z"], 2, "--rank: 'z' is not the number of a rank"),
        (["completion"], 2, "name one of bash, zsh"),
        (["--hostfile=/no/such", "train.py"], 2, "--hostfile=/no/such cannot be read"),
        (["ckpt", "sl", "x"], 2, "'sl': use one of ls, verify, prune; did you mean ls?"),
        (["ckpt", "prune", "x"], 2, "--keep is missing: how many of the newest to keep"),
        (["logs", "x", "--tail=few"], 2, "--tail: 'few' is not a whole number"),
        (["submit"], 2, "nothing to run: put the script after --"),
        (["--wrong", "train.py"], 2, "there is no flag --wrong"),
        (["staus"], 2, "did you mean status?"),
        (["--warm", "nosuch.py"], 2, ")\n"),
        (["--num_processes=2", "t.py"], 2, "did you mean --nproc-per-node?"),
        (["-np", "2", "t.py"], 2, "did you mean --nproc-per-node?"),
        (["--nprocs=2", "t.py"], 2, "did you mean --nproc-per-node?"),
        (["--nproc", "2", "t.py"], 2, "--nproc is ambiguous; did you mean --nproc-per-node?"),
        (["--nproc=2", "t.py"], 2, "--nproc is ambiguous; did you mean --nproc-per-node?"),
        (["--rdzv", "2", "t.py"], 2, "--rdzv may mean --rdzv-backend, --rdzv-endpoint, "),
        (["--main-process-ip", "h", "t.py"], 2, "did you mean --master-addr?"),
        (["docter", "--json"], 2, "did you mean doctor?"),
        (["tpo"], 2, "did you mean top?"),
        (["missing.py"], 2, "there is no script missing.py"),
        (["package.module"], 2, "for a module use -m"),
        (["empty"], 2, "without __main__.py"),
        (["--run-path", "missing.py"], 2, "there is no script missing.py"),
        (["--no-python", "missing.sh"], 2, "there is no program missing.sh"),
        (["--no-python", "./train.py"], 2, "is not executable"),
        (["--nnodes=0", "train.py"], 2, "--nnodes=0"),
        (["--rdzv-backend=etcd", "train.py"], 2, "use --rdzv-backend=c10d"),
        (["--data=x", "train.py"], 2, "write NAME:/PATH"),
        (["--data=a:/tmp:ro", "train.py"], 2, "no colon in the path"),
        (["--data=x:/y,x:/z", "train.py"], 2, "--data=x:/z is given twice"),
        (["--data=x:/tmp,y:/no/such", "--data=z:/dev", "train.py"], 1, "/no/such does not exist"),
        (["--data=x:/dev/null", "train.py"], 1, "/dev/null is not a folder on this host"),
        (["--tensorboard", "train.py"], 2, "--tensorboard and --logdir DIR belong together"),
        (["master", "--port", "x"], 2, "--port: 'x' is not a whole number"),
        (["master", "--nnodes", "x"], 2, "--nnodes=x"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_one_sentence_and_no_traceback(
    words: list[str], code: int, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('never')")
    (tmp_path / "empty").mkdir()
    done = ran_here(*words, env=clean_environment())
    assert done.returncode == code
    assert part in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("elasticrun")
    assert done.stdout == ""


def test_a_full_disk_under_stderr_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(full, write_through=True))
        notify("a note")
        sys.stderr.detach()


@pytest.mark.slow
def test_a_full_disk_under_the_list_is_one_sentence(tmp_path: Path) -> None:
    shell = f"{sys.executable} -m elasticrun warm --list >/dev/full"
    env = clean_environment() | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(["sh", "-c", shell], env=env, capture_output=True, timeout=240)
    sentence = b"elasticrun: error: cannot write to standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, sentence)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["--help", "--version", "warm --list", "render --help", "doctor --help"]
)
def test_a_reader_that_has_gone_is_no_error(words: str, tmp_path: Path) -> None:
    """`elasticrun doctor | head -1`: without a word, and with the code of SIGPIPE in a shell."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "elasticrun", *words.split()], stdout=writer,
            stderr=subprocess.PIPE, text=True, timeout=240,
            env=clean_environment() | {"XDG_RUNTIME_DIR": str(tmp_path)},
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (SIGPIPE_EXIT, "")


def test_a_binary_is_no_script(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="add --no-python"):
        check_program(Entrypoint(EntryKind.SCRIPT, sys.executable))
    assert check_program(Entrypoint(EntryKind.COMMAND, sys.executable)) == ""
    shell = tmp_path / "run.sh"
    shell.write_text("#!/bin/bash\necho hello\n")
    assert "meant for /bin/bash" in check_program(Entrypoint(EntryKind.SCRIPT, str(shell)))
    shell.write_text("#!/usr/bin/env python3\n")
    assert check_program(Entrypoint(EntryKind.SCRIPT, str(shell))) == ""
    assert check_program(Entrypoint(EntryKind.MODULE, "no.such.module")) == ""
    assert check_program(Entrypoint(EntryKind.SCRIPT, "-")) == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_script_that_may_not_be_read(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("")
    script.chmod(0)
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        check_program(Entrypoint(EntryKind.SCRIPT, str(script)))


# ---------------------------------------------------------------- --dry-run


def test_dry_run_shows_values_and_sources(tmp_path: Path) -> None:
    environ = {
        "PET_MAX_RESTARTS": "4", "ELASTICRUN_RESTART_BACKOFF": "2", "PET_NNODES": "2",
        "PET_MASTER_PORT": "7007", "PET_MASTER_ADDR": "head", "PET_NODE_RANK": "1",
    }  # fmt: skip
    done = command(
        "--dry-run", "-v", "--nproc_per_node=2", "-m", "pkg.train", "--lr", "a b",
        cwd=tmp_path, environ=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = done.stdout
    sources = [line.split()[-1] for line in text.partition("\nsetting ")[2].splitlines()[1:]]
    assert sources == sorted(sources, key="default".__eq__), "defaults come last"
    assert f"{sys.executable} -u -m pkg.train --lr 'a b'" in text
    assert "head:7007, started by node 0" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["nproc-per-node"] == ["2", "--nproc_per_node"]
    assert rows["max-restarts"] == ["4", "$PET_MAX_RESTARTS"]
    assert rows["restart-backoff"] == ["2", "$ELASTICRUN_RESTART_BACKOFF"]
    assert rows["role"] == ["default", "default"]
    assert rows["module"] == ["True", "-m"]
    assert "note: OMP_NUM_THREADS is 1" in text


def test_dry_run_shows_node_health(tmp_path: Path) -> None:
    environ = {"PET_PRECHECK": "2", "ELASTICRUN_EXCLUDE_FOR": "90"}
    words = ("--dry-run", "--exclude_straggler", "--accelerator", "cpu", "s.py")
    short = command(*words, cwd=tmp_path, environ=environ).stdout
    assert "straggler-ratio" not in short
    assert " other settings at the default; -v shows them\n" in short
    words = ("-v", *words)
    done = command(*words, cwd=tmp_path, environ=environ)
    assert done.returncode == 0, done.stderr
    (summary,) = [line for line in done.stdout.splitlines() if line.startswith("node health")]
    assert summary.split(maxsplit=2)[2] == (
        "network check (on cpu, 60 s at most), performance test, nodes slower than 1.5 times the "
        "median are excluded, a failed check of this machine ends the agent"
    )
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert rows["precheck"] == ["2", "$PET_PRECHECK"]
    assert rows["exclude-for"] == ["90", "$ELASTICRUN_EXCLUDE_FOR"]
    assert rows["exclude-straggler"] == ["True", "--exclude_straggler"]
    assert rows["straggler-ratio"] == ["1.5", "default"]
    assert rows["accelerator"] == ["cpu", "--accelerator"]


FROM_MEMORY = "after a failure ranks resume from the newest snapshot in memory, if there is one"


@pytest.mark.parametrize(
    ("words", "row"),
    [
        ((), FROM_MEMORY),
        (("--save-at-breakpoint", "--save-limit=30"),
         f"{FROM_MEMORY}, and it is written out as a checkpoint, in 30 s at most"),
        (("--nnodes=2:4", "--rdzv-endpoint=h:29400"),
         "rdzv-backend c10d --nnodes=MIN:MAX with --rdzv-endpoint"),
    ],
)  # fmt: skip
def test_dry_run_shows_what_counts_starts_nothing_and_needs_no_script(
    words: tuple[str, ...], row: str, tmp_path: Path
) -> None:
    done = command("--dry-run", *words, "missing.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert row in [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- elasticrun master


def test_master_without_flags_takes_the_first_agents_word() -> None:
    config = configure([], {})
    assert (config.host, config.port, config.spec) == ("0.0.0.0", 29400, None)
    assert (config.identity.job_id, config.record_dir) == ("none", "")


def test_master_with_flags_of_the_job() -> None:
    words = "--host ::1 --port 0 --nnodes 2:4 --rdzv-id j --max_restarts=3 --status_port 8080"
    config = configure(words.split(), {"PET_NODE_UNIT": "2"})
    assert (config.host, config.port, config.launch.status_port) == ("::1", 0, 8080)
    assert config.identity.job_id == "j"
    assert (config.spec.min_nodes, config.spec.max_nodes, config.spec.node_unit) == (2, 4, 2)
    assert (config.spec.max_restarts, config.spec.job_id) == (3, "j")


def test_the_master_takes_every_flag_of_the_jobs_spec() -> None:
    read: set[str] = set()

    class Asked(FlagValues):
        def value(self, dest: str) -> Any:
            read.add(dest)
            return super().value(dest)

    asked = Asked(get_args_parser({}).parse_args(["s.py"]), {})
    job_spec(asked, {}, RendezvousPlan(Place("elastic"), "j", 1, 4, -1))
    of_agents = {"shutdown_timeout", "auto_config"}  # defaults of flags that the master has
    assert read - of_agents <= set(JOB_FLAGS)


BOTH, NETWORK = CheckSpec(network=True, perf=True), CheckSpec(network=True)


@pytest.mark.parametrize(
    ("words", "environ", "part"),
    [
        ("--network_check --exclude-straggler --straggler-ratio 3 --rdzv-conf probe_timeout=4", {},
         CheckSpec(network=True, exclude_stragglers=True, slow_ratio=3.0, probe_limit=4.0)),
        ("--precheck=0", {}, CheckSpec()),
        ("--precheck=1", {}, NETWORK),
        ("--precheck 2", {}, BOTH),
        ("", {"PET_PRECHECK": "2"}, BOTH),
        ("--precheck=1 --comm-perf-test", {}, BOTH),
        ("--save-at-breakpoint --save-limit=9", {}, SaveSpec(at_breakpoint=True, limit=9.0)),
        ("--save-limit=9", {"PET_SAVE_AT_BREAKPOINT": "1"},
         SaveSpec(at_breakpoint=True, limit=9.0)),
    ],
)  # fmt: skip
def test_master_with_flags_of_node_health_and_snapshots(
    words: str, environ: dict[str, str], part: CheckSpec | SaveSpec
) -> None:
    spec = configure(words.split(), environ).spec
    assert (spec.saves if isinstance(part, SaveSpec) else spec.checks) == part


def test_master_with_a_level_of_precheck_that_is_none() -> None:
    with pytest.raises(UsageError, match="--precheck=3: use 0, 1 or 2"):
        configure(["--precheck=3"], {})


def test_master_keeps_its_record_where_the_flag_or_the_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"ELASTICRUN_STATE_DIR": str(tmp_path / "variable")}
    flag = tmp_path / "a" / "flag"
    for words, environ, folder in (
        ([], named, tmp_path / "variable"),
        ([f"--state-dir={flag}"], named, flag),
        (["--state_dir", str(flag)], {}, flag),
        (["--state-dir=here"], {}, tmp_path / "here"),
    ):
        assert configure(words, environ).record_dir == str(folder)
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_network_file_system_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(user_folder, "_file_system_type", lambda path: 0x0BD00BD0)
    assert main(["master", f"--state-dir={tmp_path}"]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"--state-dir: {tmp_path} is on a network file system (Lustre)" in said


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used") as refused:
        configure([f"--state-dir={tmp_path / 'file'}"], {})
    assert refused.value.exit_code == EXIT_USAGE


# ---------------------------------------------------------------- --exit-codes=scheduler


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "plainly", "for_a_scheduler"),
    [
        (("gone.py",), 2, 93),
        (("--no-python", "gone-for-good"), 2, 93),
        (("--max-restarts=-1", "train.py"), 2, 2),
        (("--nnodes=two", "train.py"), 2, 2),
        (("--max-restarts=many", "train.py"), 2, 2),
        (("--token-file=/nowhere/token", "train.py"), 1, 1),  # a mount may come
    ],
)
def test_what_the_launcher_ends_with_where_another_try_cannot_help(
    words: tuple[str, ...], plainly: int, for_a_scheduler: int, tmp_path: Path
) -> None:
    """Before anything is started. Which end has which code: tests/core/rounds/test_failures.py."""
    (tmp_path / "train.py").write_text("")
    plain = command(*words, cwd=tmp_path)
    told = command("--exit-codes=scheduler", *words, cwd=tmp_path)
    assert (plain.returncode, told.returncode) == (plainly, for_a_scheduler)
    assert plain.stderr == told.stderr


@pytest.mark.slow
def test_a_script_that_cannot_be_imported(tmp_path: Path) -> None:
    """Also where a restart was tried before: the scheduler must not start it for ever."""
    (tmp_path / "train.py").write_text("import no_such_module_anywhere\n")
    words = ("--max-restarts=1", "train.py")
    done = command("--exit-codes=scheduler", *words, cwd=tmp_path)
    assert done.returncode == 93, done.stderr
    assert command("--max-restarts=0", "train.py", cwd=tmp_path).returncode == 1


# ---------------------------------------------------------------- plug-ins of torchrun's

PLUGIN = """
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

def create(params):
    print("the plug-in was asked", flush=True)
    params.endpoint = "localhost:0"
    backend, store = create_backend(params)
    type(backend).name = property(lambda self: "homemade")
    return create_handler(store, backend, params)

def get():
    return create
"""


@pytest.mark.slow
def test_a_rendezvous_plugin_is_left_to_torchrun(tmp_path: Path) -> None:
    """A real entry point of torchrun.handlers, found in metadata, served by the real torchrun."""
    site = tmp_path / "site"
    info = site / "homemade-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "homemade.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: homemade\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.handlers]\nhomemade = homemade:get\n")
    (tmp_path / "train.py").write_text(
        "import os; os.write(1, b'rank %s\\n' % os.environ['RANK'].encode())"
    )
    done = command(
        "--rdzv-backend=homemade", "train.py",
        cwd=tmp_path,
        environ={
            "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1",
            # torchrun is told what our own words for its flags mean
            "ELASTICRUN_NPROC_PER_NODE": "2", "PET_NPROC_PER_NODE": "1", "ELASTICRUN_TEE": "0",
            "ELASTICRUN_MODULE": "no",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "handing over to torchrun" in done.stderr
    assert "the plug-in was asked" in done.stdout
    assert {"rank 0", "rank 1"} <= set(done.stdout.splitlines())
