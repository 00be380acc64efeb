"""Our table of flags against the parser of the installed torch, action by action.

Fails when torch has a flag that we lack, or when a default, a type, a choice, an abbreviation or
the meaning of a PET_ variable differs. Differences on purpose stand in `DELIBERATE`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from elasticrun.cli import trust
from elasticrun.cli.flags import get_args_parser
from elasticrun.cli.table import FLAGS, NEWER, OURS
from elasticrun.wire import env
from tests.harness import ran

torch_run = pytest.importorskip("torch.distributed.run")

SAMPLES = ["", "0", "1", "3", "7.5", "-1", "abc", "a,b", "a,,b", "2:4", "true", "spawn", "node"]

DELIBERATE = {
    # dest: texts that torch refuses and we take (docs/torchrun.md)
    "shutdown_timeout": {"7.5"},
    "exit_barrier_timeout": {"7.5"},
}

ENV_ONLY_WORDS = {"true", "false"}  # switches in the environment: words beside numbers


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("PET_", "ELASTICRUN_")):
            monkeypatch.delenv(name)


def actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {action.dest: action for action in parser._actions}


def theirs() -> argparse.ArgumentParser:
    return torch_run.get_args_parser()


@functools.cache
def both() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """torch's parser and ours as they are without any variable: to make them takes longest."""
    return theirs(), get_args_parser()


TORCH_DESTS = sorted(actions(torch_run.get_args_parser()))


def outcome(parser: argparse.ArgumentParser, words: list[str]) -> Any:
    """What a command line comes to: its values, or "error"."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return vars(parser.parse_args(words))
        except SystemExit as error:
            return f"exit {error.code}"


def of_torch(values: Any) -> Any:
    """The part of an outcome that torch's parser has too."""
    return (
        {d: v for d, v in values.items() if d in TORCH_DESTS}
        if isinstance(values, dict)
        else values
    )


@pytest.mark.parametrize("dest", TORCH_DESTS)
def test_every_flag_of_torch_is_ours(dest: str) -> None:
    reference = actions(theirs())[dest]
    ours = actions(get_args_parser())
    assert dest in ours, f"torch has {reference.option_strings or dest}, elasticrun has not"
    mine = ours[dest]
    assert set(reference.option_strings) <= set(mine.option_strings)
    assert mine.nargs == reference.nargs
    assert mine.const == reference.const
    assert mine.default == reference.default
    assert type(mine.default) is type(reference.default)
    assert mine.required == reference.required
    assert (mine.choices and list(mine.choices)) == (reference.choices and list(reference.choices))


FLAGS_WITH_VALUES = [
    dest
    for dest, action in actions(torch_run.get_args_parser()).items()
    if action.option_strings and action.nargs != 0
]


@pytest.mark.parametrize("dest", FLAGS_WITH_VALUES)
@pytest.mark.parametrize("text", SAMPLES)
def test_values_on_the_command_line(dest: str, text: str) -> None:
    reference_parser, own_parser = both()
    action = actions(reference_parser)[dest]
    for spelling in action.option_strings:
        for words in ([spelling, text, "s.py"], [f"{spelling}={text}", "s.py"]):
            reference = outcome(reference_parser, words)
            mine = outcome(own_parser, words)
            if reference == "exit 2" and text in DELIBERATE.get(dest, ()):
                assert isinstance(mine, dict)
            else:
                assert of_torch(mine) == reference, words


@pytest.mark.parametrize(
    "words",
    [
        ["s.py"],
        [],
        ["--standalone", "--nnodes", "1", "s.py", "--nnodes", "4", "-r", "x"],
        ["-r3", "-t", "0:1", "s.py"],
        ["-m", "pkg.mod", "--", "x"],
        ["--no_python", "--run_path", "s.sh"],
        ["--", "s.py", "-t"],
        ["s.py", "--", "-t", "--"],
        ["--no-such-flag", "s.py"],
        ["--lo=x", "s.py"],
        ["--nproc-per-node=2", "--nproc_per_node", "4", "s.py"],
        ["--standalone=1", "s.py"],
        ["--max-restarts", "s.py"],
        ["--nproc-per", "1", "--stand", "s.py"],
        ["--redirect=3", "s.py"],
        ["-mstandalone", "s.py"],
        ["-mr3", "s.py", "-t"],
        ["-mt", "3", "s.py"],
        ["-1", "s.py"],
        ["--node-rank", "-1", "s.py", "--"],
        ["a b", "--stand"],
        ["-x y", "--stand"],
        ["--nno=1 2", "s.py"],
        ["-r 3", "s.py"],
        ["-", "--standalone"],
        ["", "--standalone"],
        ["--nnodes", "--", "s.py"],
        ["--tee", "-", "s.py"],
        ["s.py", "--", "--", "x"],
        ["s.py", "a", "--", "x"],
        ["--", "s.py", "--", "x"],
        ["-m", "--", "x", "--", "--tee"],
        ["-rm"],
        ["--local-ranks-filter", "0,1", "-m", "torchtitan.train", "--job.config", "x.toml"],
    ],
    ids=" ".join,
)
def test_whole_command_lines(words: list[str]) -> None:
    assert of_torch(outcome(get_args_parser(), words)) == outcome(theirs(), words)


@pytest.mark.parametrize("dest", TORCH_DESTS)
def test_abbreviations(dest: str) -> None:
    """Every beginning of a flag of torch's means the same to ours, or is refused by both. Where
    torch is newer than the table, it may find two flags where the table has one."""
    action = actions(theirs())[dest]
    value = [] if action.nargs == 0 else [action.choices[0] if action.choices else "1"]
    reference, mine = theirs(), get_args_parser()
    as_old_as_the_table = {flag.dest for flag in FLAGS if flag.origin == NEWER}.isdisjoint(
        TORCH_DESTS
    )
    for spelling in action.option_strings:
        if not spelling.startswith("--"):
            continue
        for length in range(3, len(spelling) + 1):
            for words in ([spelling[:length], *value, "s.py"], [f"{spelling[:length]}=1", "s.py"]):
                expected = outcome(reference, words)
                if isinstance(expected, dict) or as_old_as_the_table:
                    assert of_torch(outcome(mine, words)) == expected, words


@pytest.mark.parametrize("text", [*SAMPLES, "false"])
def test_pet_variables(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each PET_ variable of torch's parser, found by torch's own action, gives the same value."""
    for dest, action in actions(theirs()).items():
        if not action.option_strings or dest == "help":
            continue
        variable = f"PET_{dest.upper()}"
        monkeypatch.setenv(variable, text)
        try:
            reference = outcome(theirs(), ["s.py"])
        except ValueError:  # torch's switches take numbers only
            reference = "ValueError"
        mine = outcome(get_args_parser(), ["s.py"])
        monkeypatch.delenv(variable)
        if isinstance(reference, dict) and not _by_design(action, text):
            assert of_torch(mine) == reference, f"{variable}={text}"
        elif reference == "ValueError" and text in ENV_ONLY_WORDS | {""}:
            assert isinstance(mine, dict)
            assert mine[dest] is (text == "true"), f"{variable}={text}"
        elif reference == "ValueError":
            assert mine == "exit 2", f"{variable}={text}"


def _by_design(action: argparse.Action, text: str) -> bool:
    # argparse does not check the choices of a default, so torch finds out later, in a traceback;
    # an empty list of filters means no filter here, and every line there.
    if action.choices and text not in action.choices:
        return True
    return text == "" and action.default == []


def test_pet_variables_reach_the_command() -> None:
    """The same through the real command, in a process with the variables set."""
    variables = {
        "PET_NNODES": "1:2", "PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "3",
        "PET_STANDALONE": "true", "PET_ROLE": "trainer", "PET_TEE": "3",
        "PET_SHUTDOWN_TIMEOUT": "5",
    }  # fmt: skip
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PET_")} | variables
    done = ran("--dry-run", "s.py", env=environ)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.split()}
    for name, value in variables.items():
        flag = name.removeprefix("PET_").lower().replace("_", "-")
        assert rows[flag] == ["True" if value == "true" else value, f"${name}"]


def test_the_command_line_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setenv("PET_STANDALONE", "0")
    assert get_args_parser().parse_args(["s.py"]).max_restarts == 3
    parsed = get_args_parser().parse_args(["--max-restarts=5", "--standalone", "s.py"])
    assert (parsed.max_restarts, parsed.standalone) == (5, True)


def test_flags_of_newer_torchruns_and_of_dlrover_run() -> None:
    """Both spellings of every further flag, with a default from PET_<DEST> where it has one."""
    expected = {
        "log_line_prefix_template", "exit_barrier_timeout", "print_completion",
        "network_check", "comm_perf_test", "precheck", "node_unit", "auto_config", "auto_tunning",
        "exclude_straggler", "save_at_breakpoint", "accelerator", "training_port",
        "numa_affinity", "membind_policy", "ucp_device_type",
    }  # fmt: skip
    further = {
        flag.dest: flag for flag in FLAGS if flag.origin in ("torchrun 2.14+", "dlrover-run")
    }
    assert set(further) == expected
    for flag in further.values():
        assert flag.name in flag.spellings
        assert "--" + flag.dest in flag.spellings
        assert flag.dest == "print_completion" or flag.variable == f"PET_{flag.dest.upper()}"


def test_no_two_flags_share_a_spelling_or_a_variable() -> None:
    spellings = [spelling for flag in FLAGS for spelling in flag.spellings]
    variables = [flag.variable for flag in FLAGS if flag.variable]
    assert len(set(spellings)) == len(spellings)
    assert len(set(variables)) == len(variables)


def test_elasticruns_form_of_a_variable_beats_torchruns() -> None:
    """ELASTICRUN_NNODES, then PET_NNODES; an empty one counts as none."""
    samples = {str: ("a", "b"), int: ("3", "4"), None: ("1", "0")}
    rows = [flag for flag in FLAGS if flag.env == "*" and flag.origin != OURS]
    assert len(rows) > 30
    for flag in rows:
        first, second = flag.choices[:2] or samples.get(flag.kind, ("3", "4"))
        name = flag.variable.replace("PET_", "ELASTICRUN_")
        told = [
            getattr(get_args_parser(environ).parse_args(["s.py"]), flag.dest)
            for environ in (
                {name: second},
                {name: first},
                {name: first, flag.variable: second},
                {name: "", flag.variable: first},
                {flag.variable: first},
            )
        ]
        assert told[0] != told[1], flag.name
        assert told[2:] == [told[1]] * 3, flag.name


def test_a_bad_value_names_elasticruns_form(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("MAX_RESTARTS", "many"), ("START_METHOD", "slow"), ("STANDALONE", "huh")):
        with pytest.raises(SystemExit):
            get_args_parser({f"ELASTICRUN_{name}": text}).parse_args(["s.py"])
        assert f"ELASTICRUN_{name}" in capsys.readouterr().err


def test_no_flag_reads_a_variable_that_elasticrun_sets_for_itself() -> None:
    flags = {f"ELASTICRUN_{flag.dest.upper()}" for flag in FLAGS if flag.origin != OURS}
    internal = {
        value
        for value in vars(env).values()
        if isinstance(value, str) and value.startswith("ELASTICRUN_")
    }
    assert len(internal) > 5
    assert not flags & (internal | {trust.TOKEN_VARIABLE})


def test_reading_flags_imports_no_heavy_module() -> None:
    """Flags and settings are read without torch, grpc, asyncio and rich, which import slowly."""
    code = (
        "import sys, json, os\n"
        "from elasticrun.cli.flags import get_args_parser\n"
        "from elasticrun.cli.resolve import resolve\n"
        "from elasticrun.cli.devices import this_machine\n"
        "ns = get_args_parser().parse_args(['--nproc-per-node=2', 's.py'])\n"
        "resolve(ns, os.environ, this_machine())\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240
    )
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"torch", "grpc", "google", "asyncio", "rich", "uvicorn", "psutil", "numpy"}
