"""Cores, /dev/shm and limits of a machine: for real in a child, or planted below another root."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from elasticrun.host.doctor import resources
from elasticrun.host.doctor.resources import LOCKED, OPEN_FILES
from elasticrun.wire.types import Finding, Level
from tests.host.doctor.child import found, one

LOOK = """
from pathlib import Path
from elasticrun.host.doctor.resources import examine_cores, examine_limits, examine_shm
found = {call}
"""

# ---------------------------------------------------------------- cores

V2 = "0::/job/a\n"
V1 = "4:memory:/job/a\n3:cpu,cpuacct:/job/a\n0::/\n"


def plant(root: Path, cgroup: str, files: Mapping[str, str]) -> Path:
    """A root folder with this /proc/self/cgroup, and files below /sys/fs/cgroup."""
    planted = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (planted | ({"proc/self/cgroup": cgroup} if cgroup else {})).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        (V2, {"job/a/cpu.max": "max 100000\n", "job/cpu.max": "250000 100000\n"}, 2.5),
        (V2, {"job/a/cpu.max": "50000 100000\n", "job/cpu.max": "250000 100000\n"}, 0.5),
        (V2, {"job/a/cpu.max": "max 100000\n"}, None),
        (V2, {"cpu.max": "300000 100000\n"}, 3.0),  # what is mounted is our own
        (V2, {"job/a/cpu.max": "nonsense\n"}, None),
        (
            V1,
            {
                "cpu,cpuacct/job/a/cpu.cfs_quota_us": "150000\n",
                "cpu,cpuacct/job/a/cpu.cfs_period_us": "100000\n",
            },
            1.5,
        ),
        (
            V1,
            {
                "cpu/job/a/cpu.cfs_quota_us": "-1\n",
                "cpu/job/a/cpu.cfs_period_us": "100000\n",
                "cpu/cpu.cfs_quota_us": "400000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            4.0,
        ),
        (V1, {}, None),
        ("9:name=systemd:/\n\nodd\n", {}, None),
        ("", {}, None),  # no cgroup at all
    ],
)
def test_quotas(tmp_path: Path, cgroup: str, files: dict[str, str], quota: float | None) -> None:
    assert resources.cpu_quota(plant(tmp_path, cgroup, files)) == quota


@pytest.mark.parametrize(
    ("cgroup", "files", "used"),
    [
        (V2, {"job/cpu.max": "1 2\n", "job/cpu.stat": "usage_usec 2500000\nuser_usec 1\n"}, 2.5),
        (V2, {"job/cpu.max": "1 2\n"}, None),
        (
            V1,
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "1\n",
                "cpu,cpuacct/cpu.cfs_period_us": "2\n",
                "cpu,cpuacct/cpu.stat": "nr_periods 0\nnr_throttled 0\nthrottled_time 0\n",
                "cpu,cpuacct/cpuacct.usage": "1500000000\n",
            },
            1.5,
        ),
        (
            "4:cpuacct:/job\n3:cpu:/job\n",
            {
                "cpu/job/cpu.cfs_quota_us": "1\n",
                "cpu/job/cpu.cfs_period_us": "2\n",
                "cpu/job/cpu.stat": "nr_periods 0\nnr_throttled 0\nthrottled_time 0\n",
                "cpuacct/job/cpuacct.usage": "2500000000\n",
            },
            2.5,
        ),
    ],
)
def test_what_a_quota_was_used_for(tmp_path: Path, cgroup: str, files, used: float | None) -> None:
    quota = resources.lowest_quota(plant(tmp_path, cgroup, files))
    assert quota is not None
    assert quota.used() == used


def look(root: Path, ranks: int, host: int, **environ: str) -> Finding:
    (only,) = resources.examine_cores(ranks, environ, root, host)
    return only


def test_a_quota_against_the_ranks(tmp_path: Path) -> None:
    own = len(os.sched_getaffinity(0))
    root = plant(tmp_path, V2, {"job/a/cpu.max": "50000 100000\n"})
    many = look(root, 4, own)
    assert many.state is Level.WARNING
    assert f"0.5 of {own} cores can be used (CPU quota: 0.5), for 4 ranks" in many.seen
    alone = look(root, 1, own, OMP_NUM_THREADS="1")
    assert alone.state is Level.WARNING  # one rank on half a core, whatever its threads


def test_a_quota_that_holds_threads_up(tmp_path: Path) -> None:
    """torch counts the cores it may run on, and knows of no quota."""
    own = len(os.sched_getaffinity(0))
    if own < 2:
        pytest.skip("one core: a quota above one holds nothing up")
    root = plant(tmp_path, V2, {"job/a/cpu.max": "150000 100000\n"})
    alone = look(root, 1, own)
    assert alone.state is Level.WARNING
    assert f"torch starts {own} threads" in alone.seen
    assert alone.todo == "set OMP_NUM_THREADS=1"
    assert look(root, 1, own, OMP_NUM_THREADS="1").state is Level.OK


def test_more_ranks_than_a_whole_host_has_is_nobodys_secret(tmp_path: Path) -> None:
    own = len(os.sched_getaffinity(0))
    assert look(tmp_path, 10 * own, own).state is Level.OK


def test_affinity() -> None:
    own = sorted(os.sched_getaffinity(0))
    if len(own) < 2 or len(own) != os.cpu_count():
        pytest.skip("that needs a machine of two cores, all of them ours")
    code = LOOK.format(call="examine_cores(2, {})")
    (only,) = found(code, before=lambda: os.sched_setaffinity(0, own[:1]))
    assert only.state is Level.WARNING
    assert f"1 of {len(own)} cores can be used (affinity: 1), for 2 ranks" in only.seen


# ---------------------------------------------------------------- /dev/shm


@pytest.mark.parametrize(
    ("options", "ranks", "state", "said"),
    [
        ("size=2g", 8, Level.OK, "2 GiB of 2 GiB are free"),
        ("size=64m", 1, Level.WARNING, "Docker's default"),
        ("size=512m", 8, Level.WARNING, "data loaders of 8 ranks may take 1 GiB"),
        ("size=512m", 2, Level.OK, "512 MiB of 512 MiB"),
        ("size=100m", 0, Level.WARNING, "data loaders of a rank may take 128 MiB"),
        ("size=16k", 1, Level.FAILED, "16 KiB of 16 KiB"),
    ],
    ids=["well", "docker", "too-little-for-8", "enough-for-2", "too-little-for-any", "none"],
)
def test_the_size_of_shm(options: str, ranks: int, state: Level, said: str) -> None:
    mount = f"mount -t tmpfs -o {options} tmpfs /dev/shm"
    code = LOOK.format(call=f"examine_shm({ranks})")
    (only,) = found(code, setup=mount, apart=("--mount",))
    assert only.state is state, only
    assert said in only.seen
    assert ("--shm-size" in only.todo) is (state is not Level.OK)


def test_what_dead_processes_have_left() -> None:
    mount = "mount -t tmpfs -o size=300m tmpfs /dev/shm\nfallocate -l 290m /dev/shm/left"
    (only,) = found(LOOK.format(call="examine_shm(1)"), setup=mount, apart=("--mount",))
    assert only.state is Level.WARNING
    assert "10 MiB of 300 MiB are free" in only.seen
    assert "dead processes" in only.todo


def test_there_is_no_shm(tmp_path: Path) -> None:
    (only,) = resources.examine_shm(1, tmp_path)
    assert only.state is Level.WARNING
    assert "there is no /dev/shm" in only.seen


# ---------------------------------------------------------------- ulimit


def limited(what: int, soft: int, hard: int, ranks: int, root: str = "/") -> list[Finding]:
    """The findings of a child with this limit."""
    before: Callable[[], None] = partial(resource.setrlimit, what, (soft, hard))
    return found(LOOK.format(call=f"examine_limits({ranks}, Path({root!r}))"), before=before)


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "state", "said", "todo"),
    [
        (4096, 4096, 8, Level.OK, "ulimit -n is 4096", ""),
        (512, 4096, 8, Level.WARNING, "a rank with data loaders may need 1024", "ulimit -n 1024"),
        (512, 512, 8, Level.WARNING, "may need 1024", "the hard limit is 512"),
        (4096, 4096, 5000, Level.WARNING, "the store of 5000 ranks may need 5512", "hard limit"),
        (100, 4096, 1, Level.FAILED, "which is too few for any rank", "ulimit -n 1024"),
    ],
    ids=["well", "few", "few-and-hard", "large-job", "none"],
)
def test_open_files(soft: int, hard: int, ranks: int, state: Level, said: str, todo: str) -> None:
    only = one(limited(resource.RLIMIT_NOFILE, soft, hard, ranks), OPEN_FILES)
    assert only.state is state, only
    assert said in only.seen
    assert todo in only.todo


@pytest.mark.parametrize("cards", [0, 2])
def test_locked_memory_matters_where_infiniband_is(tmp_path: Path, cards: int) -> None:
    for number in range(cards):
        (tmp_path / f"sys/class/infiniband/mlx5_{number}").mkdir(parents=True)
    only = one(limited(resource.RLIMIT_MEMLOCK, 64 << 10, 64 << 10, 1, str(tmp_path)), LOCKED)
    assert "ulimit -l is 64 KiB" in only.seen
    assert only.state is (Level.WARNING if cards else Level.OK)
    if cards:
        assert "mlx5_0, mlx5_1" in only.seen
        assert "memlock" in only.todo
