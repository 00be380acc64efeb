"""Settings from a file: what a key means, which file counts, what takes precedence, and how the
settings travel with a command."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.settings import UsageError
from elasticrun.cli.settings_file import find
from elasticrun.cli.settings_file.keys import presets
from elasticrun.cli.table import FLAGS
from elasticrun.config import EXIT_USAGE
from elasticrun.host.runs.layout import CONSOLE, RESULT, RunFolder
from tests.harness import World, await_true, clean_environment, until_file


def words_of(text: str, profile: str = "") -> dict[str, tuple[str, ...]]:
    found = presets(tomllib.loads(text), profile, "f")
    return {dest: preset.words for dest, preset in found.items()}


def launched(
    *words: str, environ: Mapping[str, str] | None = None, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, list[str], list[str]]:
    """The namespace, the words and the printed lines of a command in the working folder."""
    for name, value in (environ or {}).items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    typed = list(words)
    new, ns = find.for_launch(typed, get_args_parser().parse_args(typed), said.append)
    return ns, new, said


# ---------------------------------------------------------------- keys and values


def test_each_kind_of_value() -> None:
    text = """
    nnodes = 4
    nproc_per_node = "gpu"
    restart-backoff = 2.5
    network-check = true
    exclude-straggler = false
    local-ranks-filter = [0, 1]
    duplicate-stdout-filters = ["a,b", "c"]
    rdzv-conf = { join_timeout = 900, is_host = true }
    """
    assert words_of(text) == {
        "nnodes": ("--nnodes=4",),
        "nproc_per_node": ("--nproc-per-node=gpu",),
        "restart_backoff": ("--restart-backoff=2.5",),
        "network_check": ("--network-check",),
        "exclude_straggler": (),
        "local_ranks_filter": ("--local-ranks-filter=0,1",),
        "duplicate_stdout_filters": ("--duplicate-stdout-filters=a,,b,c",),
        "rdzv_conf": ("--rdzv-conf=join_timeout=900,is_host=1",),
    }


def test_a_profile_overrides_the_rest() -> None:
    text = "tee = 3\nmax-restarts = 3\nnetwork-check = true\n[profile.one]\n"
    text += "max-restarts = 0\nnetwork-check = false"
    assert words_of(text)["max_restarts"] == ("--max-restarts=3",)
    one = words_of(text, "one")
    assert one == {"tee": ("--tee=3",), "max_restarts": ("--max-restarts=0",), "network_check": ()}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max-restart = 3", "f: max-restart is not a setting; did you mean max-restarts?"),
        ("num_processes = 3", "f: num_processes is not a setting; did you mean nproc-per-node?"),
        ("colour = 'red'", "f: colour is not a setting (see elasticrun --help-all)"),
        ("[launch]\ntee = 3", "f: launch has a value of the wrong type"),
        ("[profile.a]\nmax-restart = 1", "f: profile.a.max-restart is not a setting; did you"),
        ("[profile.a]\nnnodes = '4:1'", "f: profile.a.nnodes: --nnodes=4:1: the smallest number"),
        ("[profile.a]\ntee = 7", "f: profile.a.tee: --tee=7 is neither 0, 1, 2 or 3 nor a list"),
        ("[profile.a]\nrestart-grace = -1", "f: profile.a.restart-grace: --restart-grace=-1"),
        ("[profile]\na = 1", "f: profile.a is not a table: write [profile.a]"),
        ("profile = 'a'", "f: profile is not a table: write [profile.NAME]"),
        ("max-restarts = 'many'", "f: max-restarts: 'many' is not a whole number"),
        ("max-restarts = 1.5", "f: max-restarts: '1.5' is not a whole number"),
        ("max-restarts = [1]", "f: max-restarts has a value of the wrong type"),
        ("on-hang = 'never'", "f: on-hang: 'never' is not one of auto, tell, restart, off"),
        ("network-check = 1", "f: network-check is a switch: write true or false"),
        ("max-restarts = 1\nmax_restarts = 2", "f: max_restarts is set twice"),
        ("token = 'abc'", "f: token: a secret does not belong in a file"),
        ("git = 'https://me:pw@host/r.git'", "f: git contains a password"),
        ("dry-run = true", "f: dry-run belongs on the command line: --dry-run"),
        ("fresh = true", "f: fresh belongs on the command line: --fresh"),
        ("no-config = true", "f: no-config belongs on the command line: --no-config"),
    ],
)
def test_what_is_wrong_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as wrong:
        words_of(text)
    assert str(wrong.value).startswith(sentence)
    assert "\n" not in str(wrong.value)
    assert wrong.value.exit_code == EXIT_USAGE


def test_an_unknown_profile_names_those_that_exist() -> None:
    text = "[profile.big]\n[profile.small]"
    for name, end in (("bigg", "bigg; did you mean big?"), ("x", "x; it has big, small")):
        with pytest.raises(UsageError, match=r"^f has no profile ") as wrong:
            words_of(text, name)
        assert str(wrong.value).endswith(end)


def test_each_flag_is_a_key_or_is_refused() -> None:
    """Each value becomes words that the command line parses to the same value as the key's."""
    refused = {"config", "profile", "no_config", "dry_run", "verbose", "version", "fresh"}
    refused |= {"print_completion", "restore_step"}
    for flag in FLAGS:
        samples = [flag.choices[0]] if flag.choices else ["1", "1:3", "a"]
        for sample in [True] if flag.kind is None else samples:
            if flag.dest in refused:
                with pytest.raises(UsageError):
                    presets({flag.name[2:]: sample}, "", "f")
                continue
            try:
                found = presets({flag.dest: sample}, "", "f")
            except UsageError:  # not a number
                continue
            ns = get_args_parser({}).parse_args([*found[flag.dest].words, "s.py"])
            word = flag.name if flag.kind is None else f"{flag.name}={sample}"
            typed = get_args_parser({}).parse_args([word, "s.py"])
            assert getattr(ns, flag.dest) == getattr(typed, flag.dest)


# ---------------------------------------------------------------- which file


def test_which_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = tmp_path / "below"
    below.mkdir()
    monkeypatch.chdir(tmp_path)
    assert launched("s.py", monkeypatch=monkeypatch)[1:] == (["s.py"], [])

    Path("pyproject.toml").write_text("[project]\nname = 'elasticrun-user'\n")
    assert launched("s.py", monkeypatch=monkeypatch)[1:] == (["s.py"], [])
    with pytest.raises(UsageError, match=r"^profile big: this folder has neither"):
        launched("--profile=big", "s.py", monkeypatch=monkeypatch)

    Path("pyproject.toml").write_text("[tool.elasticrun]\ntee = 1\n[tool.elasticrun.profile.x]\n")
    ns, words, said = launched("s.py", monkeypatch=monkeypatch)
    assert (ns.tee, words) == ("1", ["--no-config", "--tee=1", "s.py"])
    assert said == ["settings from pyproject.toml: tee"]

    Path("elasticrun.toml").write_text("tee = 2")
    assert launched("s.py", monkeypatch=monkeypatch)[0].tee == "2"
    ns, words, said = launched("--no-config", "s.py", monkeypatch=monkeypatch)
    assert (ns.tee, words, said) == ("0", ["--no-config", "s.py"], [])
    for by in ("--config=pyproject.toml", "--config=other.toml"):
        Path("other.toml").write_text("tee = 1")
        assert launched(by, "s.py", monkeypatch=monkeypatch)[0].tee == "1"

    monkeypatch.chdir(below)  # folders above are not searched
    assert launched("s.py", monkeypatch=monkeypatch)[1:] == (["s.py"], [])
    by_variable = {"ELASTICRUN_CONFIG": str(tmp_path / "elasticrun.toml")}
    ns, _, said = launched("s.py", environ=by_variable, monkeypatch=monkeypatch)
    assert ns.tee == "2"
    assert said == [f"settings from {tmp_path}/elasticrun.toml: tee"]


@pytest.mark.parametrize(
    ("words", "text", "sentence"),
    [
        (["--config=none.toml"], None, "--config=none.toml cannot be read: No such file"),
        (["--config=pyproject.toml"], None, "--config=pyproject.toml has no [tool.elasticrun]"),
        (["--no-config", "--config=a"], None, "--no-config and --config contradict each other"),
        (["--no-config", "--profile=a"], None, "--no-config and --profile contradict each other"),
        ([], b"tee = ", "elasticrun.toml is not valid TOML: "),
        ([], b"\xff\xfe", "elasticrun.toml is not valid TOML: it is not UTF-8"),
        ([], b"#" * (find.MAX_BYTES + 1), "elasticrun.toml has more than 1 MiB"),
        (["--profile=a"], b"tee = 1", "elasticrun.toml has no profile a; it has none"),
    ],
)
def test_a_bad_file_is_one_sentence(
    words: list[str],
    text: bytes | None,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text("[tool.other]\nelasticrun = 1")
    if text is not None:
        Path("elasticrun.toml").write_bytes(text)
    with pytest.raises(UsageError) as wrong:
        launched(*words, "s.py", monkeypatch=monkeypatch)
    assert str(wrong.value).startswith(sentence)
    assert "\n" not in str(wrong.value)
    assert wrong.value.exit_code == EXIT_USAGE


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_strangers_file_in_a_common_folder_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("elasticrun.toml").write_text("on-event = 'evil'")
    os.chown("elasticrun.toml", 12345, 12345)
    assert launched("s.py", monkeypatch=monkeypatch)[0].on_event == "evil"  # a colleague's
    tmp_path.chmod(0o1777)
    ns, words, said = launched("s.py", monkeypatch=monkeypatch)
    assert (ns.on_event, words) == ("", ["s.py"])
    assert said[0].startswith("elasticrun.toml is ignored: it belongs to another user")
    ns = launched("--config=elasticrun.toml", "s.py", monkeypatch=monkeypatch)[0]
    assert ns.on_event == "evil"


# ---------------------------------------------------------------- precedence


def test_command_line_over_variable_over_profile_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("elasticrun.toml").write_text(
        "tee = 1\nmax-restarts = 1\nnnodes = 1\nhang-limit = 1\nnetwork-check = true\n"
        "local-ranks-filter = [0]\nshutdown-timeout = 5\ntoken-file = 'secret'\n"
        "[profile.p]\nnnodes = 2\nhang-limit = 2\n"
    )
    variables = {
        "PET_MAX_RESTARTS": "7",
        "ELASTICRUN_HANG_LIMIT": "7",
        "ELASTICRUN_NETWORK_CHECK": "0",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7",
        "ELASTICRUN_TOKEN": "x" * 32,
    }
    words = ("--profile", "p", "--local-ranks-filter=1", "-t", "3", "s.py", "--tee=9")
    ns, new, said = launched(*words, environ=variables, monkeypatch=monkeypatch)
    assert (ns.tee, ns.max_restarts, ns.nnodes, ns.hang_limit) == ("3", 7, "2", 7)
    assert (ns.local_ranks_filter, ns.network_check) == ("1", False)
    assert (ns.shutdown_timeout, ns.token_file) == (None, "")
    assert new == ["--no-config", "--nnodes=2", "--local-ranks-filter=1", "-t", "3", *words[-2:]]
    assert said == ["settings from elasticrun.toml (profile p): nnodes"]
    assert ns.given["nnodes"] == "elasticrun.toml: profile.p.nnodes"
    assert (ns.config, ns.profile, ns.no_config) == ("elasticrun.toml", "p", False)


# ---------------------------------------------------------------- the commands


def command(
    *words: str, cwd: Path, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "elasticrun", *words], cwd=cwd, capture_output=True, text=True,
        env=clean_environment() | dict(environ or {}), timeout=240, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.slow
def test_dry_run_names_the_source_of_each_value(tmp_path: Path) -> None:
    (tmp_path / "elasticrun.toml").write_text("max-restarts = 2\n[profile.p]\nnnodes = '1:2'")
    done = command("--dry-run", "--profile=p", "s.py", cwd=tmp_path, environ={"PET_TEE": "3"})
    assert done.returncode == 0, done.stderr
    assert "elasticrun: settings from elasticrun.toml (profile p): max-restarts, nnodes" in (
        done.stderr.splitlines()
    )
    table = done.stdout.partition("source\n")[2].splitlines()
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in table if "default" not in line}
    assert rows["nnodes"] == ["1:2", "elasticrun.toml: profile.p.nnodes"]
    assert rows["max-restarts"] == ["2", "elasticrun.toml: max-restarts"]
    assert rows["tee"] == ["3", "$PET_TEE"]
    assert rows["config"][0] == "elasticrun.toml"
    assert "no-config" not in rows


@pytest.mark.slow
def test_a_bad_key_ends_the_command_like_a_bad_flag(tmp_path: Path) -> None:
    (tmp_path / "elasticrun.toml").write_text("max-restart = 2")
    (tmp_path / "s.py").write_text("print('it ran')")
    done = command("s.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    sentence = "elasticrun.toml: max-restart is not a setting; did you mean max-restarts?"
    assert done.stderr == f"elasticrun: error: {sentence}\n"
    assert command("--bad-flag", "s.py", cwd=tmp_path).returncode == EXIT_USAGE


@pytest.mark.slow
def test_the_settings_travel_with_the_command(tmp_path: Path) -> None:
    """To hosts by ssh, and into what is given to a scheduler; no other machine reads the file."""
    (tmp_path / "elasticrun.toml").write_text(
        "max-restarts = 2\nnproc-per-node = 4\nhosts = ['a', 'b']\n[profile.p]\nnnodes = 2"
    )
    hosts = command("--dry-run", "train.py", cwd=tmp_path)
    lines = [line for line in hosts.stdout.splitlines() if ": elasticrun " in line]
    assert [line.partition(":")[0] for line in lines] == ["a", "b"]
    for line in lines:
        there = shlex.split(line.partition(": elasticrun ")[2])
        assert {"--no-config", "--max-restarts=2", "--nproc-per-node=4"} <= set(there)
        assert not [word for word in there if word.startswith("--hosts")]

    batch = command("render", "slurm", "--name=j", "--profile=p", "--", "t.py", cwd=tmp_path)
    assert batch.returncode == 0, batch.stderr
    assert "--max-restarts=2" in batch.stdout
    assert "--no-config" in batch.stdout
    assert "--nodes=2" in batch.stdout
    assert "settings from elasticrun.toml (profile p): max-restarts, nproc-per-node, nnodes; not " \
        "for this command: hosts" in batch.stderr  # fmt: skip
    plain = command("render", "slurm", "--name=j", "--no-config", "--", "t.py", cwd=tmp_path)
    assert "--max-restarts" not in plain.stdout


def test_a_job_is_submitted_with_the_settings(world: World, tmp_path: Path) -> None:
    """The record of a submitted job has the file's settings, so `resume` has them too; the job does
    not read the file again."""
    file = tmp_path / "elasticrun.toml"
    file.write_text("max-restarts = 5\nrdzv-endpoint = 'h:1'\ntee = 3")
    script = tmp_path / "s.py"
    script.write_text("import os; print('restarts', os.environ['TORCHELASTIC_MAX_RESTARTS'])")
    argv = (sys.executable, "-m", "elasticrun", "submit", "--name=t", "--run-dir=run", "--")
    submitted = world.command([*argv, str(script)], cwd=tmp_path)
    assert submitted.wait() == 0, submitted.stderr
    sentence = "settings from elasticrun.toml: max-restarts, tee; not for this command: rdzv-endp"
    assert sentence in submitted.stderr
    run = tmp_path / "run"
    record = RunFolder(run).job()
    assert record is not None
    assert {"--no-config", "--max-restarts=5", "--tee=3"} <= set(record.command)
    console = until_file(run / CONSOLE, lambda text: "restarts 5" in text)
    assert "settings from" not in console
    await_true((run / RESULT).exists, "result")
