"""`elasticrun master --state-dir`: a folder that can hold a record, or a sentence and 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.cli.main import main
from elasticrun.cli.settings import UsageError
from elasticrun.cli.verbs.master import configure
from elasticrun.config import EXIT_USAGE
from elasticrun.wire import run_folder


def test_none_by_default() -> None:
    assert configure([], {}).record_dir == ""


def test_the_flag_beats_the_variable_and_the_folder_is_made(tmp_path: Path) -> None:
    named = {"ELASTICRUN_STATE_DIR": str(tmp_path / "variable")}
    assert configure([], named).record_dir == str(tmp_path / "variable")
    flag = tmp_path / "a" / "flag"
    assert configure([f"--state-dir={flag}"], named).record_dir == str(flag)
    assert configure(["--state_dir", str(flag)], {}).record_dir == str(flag)
    assert flag.stat().st_mode & 0o777 == 0o700


def test_a_relative_folder_is_this_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert configure(["--state-dir=here"], {}).record_dir == str(tmp_path / "here")


def test_a_network_file_system_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_folder, "_file_system_type", lambda path: 0x0BD00BD0)
    assert main(["master", f"--state-dir={tmp_path}"]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"--state-dir: {tmp_path} is on a network file system (Lustre)" in said


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used") as refused:
        configure([f"--state-dir={tmp_path / 'file'}"], {})
    assert refused.value.exit_code == EXIT_USAGE
