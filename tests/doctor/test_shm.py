"""/dev/shm of every size."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.doctor import resources
from elasticrun.wire.types import Level
from tests.doctor.child import found

LOOK = "from elasticrun.doctor.resources import examine_shm\nfound = examine_shm({ranks})"


@pytest.mark.parametrize(
    ("options", "ranks", "state", "said"),
    [
        ("size=2g", 8, Level.OK, "2 GiB of 2 GiB are free"),
        ("size=64m", 1, Level.WARNING, "docker's default"),
        ("size=512m", 8, Level.WARNING, "data loaders of 8 ranks may take 1 GiB"),
        ("size=512m", 2, Level.OK, "512 MiB of 512 MiB"),
        ("size=100m", 0, Level.WARNING, "data loaders of a rank may take 128 MiB"),
        ("size=16k", 1, Level.FAILED, "16 KiB of 16 KiB"),
    ],
    ids=["well", "docker", "too-little-for-8", "enough-for-2", "too-little-for-any", "none"],
)
def test_its_size(options: str, ranks: int, state: Level, said: str) -> None:
    mount = f"mount -t tmpfs -o {options} tmpfs /dev/shm"
    (only,) = found(LOOK.format(ranks=ranks), setup=mount, apart=("--mount",))
    assert only.state is state, only
    assert said in only.seen
    assert ("--shm-size" in only.todo) is (state is not Level.OK)


def test_what_dead_processes_have_left() -> None:
    mount = "mount -t tmpfs -o size=300m tmpfs /dev/shm\nfallocate -l 290m /dev/shm/left"
    (only,) = found(LOOK.format(ranks=1), setup=mount, apart=("--mount",))
    assert only.state is Level.WARNING
    assert "10 MiB of 300 MiB are free" in only.seen
    assert "dead processes" in only.todo


def test_there_is_none(tmp_path: Path) -> None:
    (only,) = resources.examine_shm(1, tmp_path)
    assert only.state is Level.WARNING
    assert "there is no /dev/shm" in only.seen
