"""--exit-codes=scheduler: what the launcher ends with where another try cannot help. Which end has
which code is a table in tests/core/rounds/test_failures.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_main import command

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("words", "plainly", "for_a_scheduler"),
    [
        (("gone.py",), 1, 93),
        (("--no-python", "gone-for-good"), 1, 93),
        (("--max-restarts=-1", "train.py"), 1, 2),
        (("--nnodes=two", "train.py"), 1, 2),
        (("--max-restarts=many", "train.py"), 2, 2),
        (("--token-file=/nowhere/token", "train.py"), 1, 1),  # a mount may come
    ],
)
def test_before_anything_is_started(
    words: tuple[str, ...], plainly: int, for_a_scheduler: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    plain = command(*words, cwd=tmp_path)
    told = command("--exit-codes=scheduler", *words, cwd=tmp_path)
    assert (plain.returncode, told.returncode) == (plainly, for_a_scheduler)
    assert plain.stderr == told.stderr


def test_a_script_that_cannot_be_imported(tmp_path: Path) -> None:
    """Also where a restart was tried before: the scheduler must not start it for ever."""
    (tmp_path / "train.py").write_text("import no_such_module_anywhere\n")
    words = ("--max-restarts=1", "train.py")
    done = command("--exit-codes=scheduler", *words, cwd=tmp_path)
    assert done.returncode == 93, done.stderr
    assert command("--max-restarts=0", "train.py", cwd=tmp_path).returncode == 1
