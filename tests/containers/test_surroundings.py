"""What a container lacks: shared memory, a root that can be written, a user with a name."""

from __future__ import annotations

import os

import pytest

from tests.compat.live import PUPPET, finish, summing
from tests.containers.conftest import Box
from tests.harness import SCRIPTS, World

pytestmark = pytest.mark.slow


def test_a_small_dev_shm(box: Box, world: World) -> None:
    """Snapshots larger than the 64 MB that nobody asked for: one sentence, memory without a name
    is used, and what it holds is what the rank goes on from."""
    holds = (str(SCRIPTS / "holds.py"), str(world.scratch / "ckpt"), "40", "3", "2")
    container = box("--standalone", "--max-restarts=1", *holds)
    assert container.launched.wait() == 0, container.launched.stderr
    lives = world.hub.ranks(2)
    assert [(life.start, life.right) for life in lives] == [(0, True), (2, True)]
    assert lives[1].source == "memory"
    said = container.launched.stderr
    assert said.count("snapshots are kept in memory without a name") == 1
    assert "/dev/shm has room for 64 MiB" in said


def test_nobody_on_a_root_that_cannot_be_written(box: Box, world: World) -> None:
    """A user with a number and no name, no $HOME, and nothing but /tmp to write to: no complaint,
    also when ranks start again."""
    for path in (world.hub.folder, world.hub.path):
        os.chmod(path, 0o777)
    container = box(
        *("--standalone", "--nproc-per-node=2", "--max-restarts=1", PUPPET),
        user=12345,
        home=None,
        read_only=True,
    )
    peers = summing(world, 2)
    peers[1].order("die")
    again = summing(world, 2, restart=1)
    finish(again, container.launched)
    assert "Traceback" not in container.launched.stderr
