"""Each tutorial is followed as it stands: its files, its commands, the output that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.wire import env
from tests.further import cases
from tests.harness import World
from tests.tutorials.terminals import follow, home

ROOT = Path(__file__).parents[2]
ELSEWHERE = ("slurm", "kubernetes", "gpu-image")
"""Followed on other machines: tests/slurm/test_tutorial.py, test_cluster.py, test_image.py."""

PAGES = [
    page for page in sorted((ROOT / "docs/tutorials").glob("*.md")) if page.stem not in ELSEWHERE
]


def follow_here(page: Path, world: World, folder: Path) -> None:
    """Follow the page in terminals of this machine, with a shared memory of their own."""
    shm = folder.with_name("shm")
    for each in (folder, shm):
        each.mkdir()
    follow(page, folder, home(folder, world.environment({env.SHM_DIR: str(shm)})))


README = ROOT / "README.md"
"""Its job is a first job. Crashes, lost and joining nodes, jobs by name and hangs have tests of
their own in snapshots, faults, jobs and sight."""


@pytest.mark.parametrize("page", cases([README, *PAGES], kept=[README]), ids=lambda page: page.stem)
def test_the_page_works_as_it_stands(page: Path, world: World, tmp_path: Path) -> None:
    follow_here(page, world, tmp_path / "work")
