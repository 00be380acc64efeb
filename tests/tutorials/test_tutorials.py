"""Each tutorial is followed as it stands: its files, its commands, the output that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.wire import env
from tests.further import cases
from tests.harness import World
from tests.tutorials.pages import blocks_of
from tests.tutorials.terminals import Terminal, home

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))


JOIN = "elasticrun join "


def joined(words: str, first: Terminal) -> str:
    """With the line that the first terminal has printed, where the page has HOST:PORT CODE."""
    return first.typed_line(JOIN) if words == f"{JOIN}HOST:PORT CODE" else words


def follow(page: Path, world: World, folder: Path) -> None:
    """Write the files of the page, then do what it says, in its order."""
    terminals: dict[str, Terminal] = {}
    codes: dict[str, int] = {}
    folder.mkdir()
    shm = folder.with_name("shm")
    shm.mkdir()
    environ = home(folder, world.environment({env.SHM_DIR: str(shm)}))
    blocks = blocks_of(page)
    for block in blocks:
        if block.path:
            (folder / block.path).write_text(block.text, encoding="utf-8")
    try:
        for block in blocks:
            if block.terminal not in terminals:
                terminals[block.terminal] = Terminal(block.terminal, folder, environ)
            terminal = terminals[block.terminal]
            for typed in block.commands:
                if typed.words:
                    if block.terminal in codes and typed.words != "^C":
                        terminal.finish(codes[block.terminal])
                    terminal.type(joined(typed.words, terminals["1"]))
                codes[block.terminal] = block.code
                terminal.expect(typed.expected)
                if not typed.expected:
                    terminal.finish(block.code)
        for name, terminal in terminals.items():
            terminal.finish(codes[name])
    finally:
        for name, terminal in terminals.items():
            print(f"--- terminal {name}:\n{terminal.shown()[-4000:]}")  # for a failing test
            terminal.close()


README = ROOT / "README.md"
"""Its job is a first job. Crashes, lost and joining nodes, jobs by name and hangs have tests of
their own in snapshots, faults, jobs and sight."""


@pytest.mark.parametrize("page", cases([README, *PAGES], kept=[README]), ids=lambda page: page.stem)
def test_the_page_works_as_it_stands(page: Path, world: World, tmp_path: Path) -> None:
    follow(page, world, tmp_path / "work")
