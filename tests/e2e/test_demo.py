"""`elasticrun demo` as a user runs it: its exit code, what it prints, and what it leaves behind."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from elasticrun.testing.demo.show import TORCHRUN
from tests.harness import LIMIT, Launched, World, await_exit, await_true

ROOT = Path(__file__).parents[2]


def demo(world: World) -> Launched:
    return world.command([sys.executable, "-m", "elasticrun", "demo"])


def left(world: World) -> list[Path]:
    return [*world.tmp.iterdir(), *world.memory.iterdir()]


def test_each_fault_is_shown_and_nothing_is_left(world: World) -> None:
    shown = demo(world)
    assert shown.wait() == 0, shown.stdout + shown.stderr
    parts = re.split(r"kill -9 of rank|kill -9 of all|a new node|a mistake", shown.stdout)
    assert len(parts) == 5
    for part, fault in zip(parts[1:], TORCHRUN, strict=True):
        assert "training continues" in part
        assert re.search(r"^ {11}elasticrun", part, re.M), f"{fault}: no line of elasticrun"
        assert TORCHRUN[fault] in part
    stamps = [float(each) for each in re.findall(r"^ *([\d.]+) s  ", shown.stdout, re.M)]
    assert stamps == sorted(stamps)
    assert "hang (certain)" in parts[4]
    assert "What to type next" in parts[4]
    assert not left(world)


def test_the_figures_of_torchrun_are_those_of_the_pages() -> None:
    read = {name: (ROOT / name).read_text() for name in ("README.md", "docs/figures.md")}
    pages = {"rank": "README.md", "node": "README.md", "join": "docs/figures.md"}
    for fault, page in pages.items():
        (figure,) = re.findall(r"[\d.]+ s\b", TORCHRUN[fault])
        assert f"| {figure} |" in read[page], (fault, figure)
        assert f"{figure} " in (ROOT / "docs/demo.md").read_text()


def test_ctrl_c_leaves_nothing(world: World) -> None:
    shown = demo(world)
    shown.until_text("2 ranks train", stream="stdout")
    below = shown.below()
    assert len(below) > 4
    shown.signal_group(signal.SIGINT)
    assert shown.wait() == 130
    assert "Traceback" not in shown.stderr
    assert not await_exit([process.pid for process in below], 1.0)
    assert not left(world)


def test_a_killed_demo_leaves_no_process_and_the_next_one_removes_its_files(world: World) -> None:
    shown = demo(world)
    shown.until_text("run this command", stream="stdout")
    await_true(lambda: len(shown.below()) > 1, "agent")
    below = shown.below()
    shown.signal(signal.SIGKILL)
    shown.wait()
    assert not await_exit([process.pid for process in below], LIMIT)
    folders = left(world)
    assert len(folders) == 2
    following = demo(world)
    await_true(following.below, "agent")  # its job removes what the last one has left, too
    following.signal(signal.SIGTERM)
    assert following.wait() == 128 + signal.SIGTERM
    assert not left(world)


def test_bad_surroundings_are_one_sentence(world: World, tmp_path: Path) -> None:
    """No temporary folder, and a job that cannot start."""
    command = [sys.executable, "-m", "elasticrun", "demo"]
    readable = tmp_path / "not-a-folder"
    readable.touch()
    broken = {"PYTHONPATH": str(tmp_path)}
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')")
    shown = world.command(command, env=broken)
    assert shown.wait() != 0
    assert len(shown.stderr.splitlines()) == 1, shown.stderr
    kept = re.search(r"its files are in (\S+)", shown.stderr)
    assert kept, shown.stderr
    assert "this torch is broken" in (Path(kept[1]) / "failure.txt").read_text()


def test_what_torchrun_does_is_on_a_page() -> None:
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/figures.md")]
    for sentence in TORCHRUN.values():
        (figure,) = re.findall(r"[\d.]+ (?:s|min)\b", sentence)
        number = figure.split()[0]
        assert any(re.search(rf"\b{re.escape(number)}\b", page) for page in pages), sentence


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_says_what_it_does(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    from elasticrun.cli.main import main

    with pytest.raises(SystemExit) as end:
        main(["demo", word])
    assert not end.value.code
    assert "leaves no file and no process" in " ".join(capsys.readouterr().out.split())
