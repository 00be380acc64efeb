"""Every scenario under scripts/ shows the trace that stands in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulator.script import ScriptError, difference, main, read, run

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 25


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    script = read(path.read_text())
    assert script.why
    assert script.expected, "a script without a trace expects nothing"
    world = run(script)
    diff = difference(script, world.lines)
    again = f"if this is meant: python -m tests.simulator --rewrite {path.relative_to(ROOT)}"
    assert not diff, f"{script.why}\n{diff}\n{again}"
    assert not world.worlds.faults


def test_a_run_is_deterministic() -> None:
    text = next(path for path in SCRIPTS if path.stem == "frozen_agent").read_text()
    assert run(read(text)).lines == run(read(text)).lines


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0 node a\n", "first line"),
        ("# why\n0 dance a\n", "dance"),
        ("# why\nsoon node a\n", "line 2"),
        ("# why\njob 1:2 colour=red\n", "colour"),
        ("# why\ncheck colour=red\n", "colour"),
        ("# why\n0 fault a dance\n", "no fault dance"),
    ],
)
def test_bad_scripts_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ScriptError, match=complaint):
        run(read(text))


def test_command_shows_a_difference_and_rewrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.txt"
    path.write_text("# why\njob 1:1\n0 node a\n3 end\n---\nsomething else\n")
    assert main([str(path)]) == 1
    assert "-something else" in capsys.readouterr().out
    assert main([str(path), "--rewrite"]) == 0
    assert main([str(path)]) == 0
    assert main([str(tmp_path / "missing.txt")]) == 2
