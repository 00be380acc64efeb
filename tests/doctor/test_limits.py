"""ulimit, lowered for real in a child."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticrun.doctor.resources import LOCKED, OPEN_FILES
from elasticrun.wire.types import Level
from tests.doctor.child import found, one

LOOK = """
from pathlib import Path
from elasticrun.doctor.resources import examine_limits as examine
found = examine({ranks}, Path({root!r}))
"""


def limited(what: int, soft: int, hard: int) -> Callable[[], None]:
    """Sets a limit in the child."""
    return lambda: resource.setrlimit(what, (soft, hard))


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "state", "said", "todo"),
    [
        (4096, 4096, 8, Level.OK, "ulimit -n is 4096", ""),
        (512, 4096, 8, Level.WARNING, "a rank with data loaders may need 1024", "ulimit -n 1024"),
        (512, 512, 8, Level.WARNING, "may need 1024", "the hard limit is 512"),
        (4096, 4096, 5000, Level.WARNING, "the store of 5000 ranks may need 5512", "hard limit"),
        (100, 4096, 1, Level.FAILED, "with which no rank can work", "ulimit -n 1024"),
    ],
    ids=["well", "few", "few-and-hard", "large-job", "none"],
)
def test_open_files(soft: int, hard: int, ranks: int, state: Level, said: str, todo: str) -> None:
    before = limited(resource.RLIMIT_NOFILE, soft, hard)
    only = one(found(LOOK.format(ranks=ranks, root="/"), before=before), OPEN_FILES)
    assert only.state is state, only
    assert said in only.seen
    assert todo in only.todo


@pytest.mark.parametrize("cards", [0, 2])
def test_locked_memory_matters_where_infiniband_is(tmp_path: Path, cards: int) -> None:
    for number in range(cards):
        (tmp_path / f"sys/class/infiniband/mlx5_{number}").mkdir(parents=True)
    before = limited(resource.RLIMIT_MEMLOCK, 64 * 1024, 64 * 1024)
    only = one(found(LOOK.format(ranks=1, root=str(tmp_path)), before=before), LOCKED)
    assert "ulimit -l is 64 KiB" in only.seen
    assert only.state is (Level.WARNING if cards else Level.OK)
    if cards:
        assert "mlx5_0, mlx5_1" in only.seen
        assert "memlock" in only.todo
