"""Cores: affinity for real, quotas from planted cgroup files of both versions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from elasticrun.doctor import resources
from elasticrun.wire.types import Finding, State
from tests.doctor.child import found

V2 = "0::/job/a\n"
V1 = "4:memory:/job/a\n3:cpu,cpuacct:/job/a\n0::/\n"


def plant(root: Path, cgroup: str, files: Mapping[str, str]) -> Path:
    """A root folder with this /proc/self/cgroup, and files below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
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
    ],
)
def test_quotas(tmp_path: Path, cgroup: str, files: dict[str, str], quota: float | None) -> None:
    assert resources.cpu_quota(plant(tmp_path, cgroup, files)) == quota


def test_no_cgroup_at_all(tmp_path: Path) -> None:
    assert resources.cpu_quota(tmp_path) is None


def look(root: Path, ranks: int, host: int, **environ: str) -> Finding:
    (only,) = resources.examine_cores(ranks, environ, root, host)
    return only


def test_a_quota_against_the_ranks(tmp_path: Path) -> None:
    own = len(os.sched_getaffinity(0))
    root = plant(tmp_path, V2, {"job/a/cpu.max": "50000 100000\n"})
    many = look(root, 4, own)
    assert many.state is State.WARNING
    assert f"0.5 of {own} cores can be used (CPU quota: 0.5), for 4 ranks" in many.seen
    alone = look(root, 1, own, OMP_NUM_THREADS="1")
    assert alone.state is State.WARNING  # one rank on half a core, whatever its threads


def test_a_quota_that_holds_threads_up(tmp_path: Path) -> None:
    """torch counts the cores it may run on, and knows of no quota."""
    own = len(os.sched_getaffinity(0))
    if own < 2:
        pytest.skip("one core: a quota above one holds nothing up")
    root = plant(tmp_path, V2, {"job/a/cpu.max": "150000 100000\n"})
    alone = look(root, 1, own)
    assert alone.state is State.WARNING
    assert f"torch starts {own} threads" in alone.seen
    assert alone.todo == "set OMP_NUM_THREADS=1"
    assert look(root, 1, own, OMP_NUM_THREADS="1").state is State.OK


def test_more_ranks_than_a_whole_host_has_is_nobodys_secret(tmp_path: Path) -> None:
    own = len(os.sched_getaffinity(0))
    assert look(tmp_path, 10 * own, own).state is State.OK


def test_affinity() -> None:
    own = sorted(os.sched_getaffinity(0))
    if len(own) < 2 or len(own) != os.cpu_count():
        pytest.skip("that needs a machine of two cores, all of them ours")
    code = "from elasticrun.doctor.resources import examine_cores\nfound = examine_cores(2, {})"
    (only,) = found(code, before=lambda: os.sched_setaffinity(0, own[:1]))
    assert only.state is State.WARNING
    assert f"1 of {len(own)} cores can be used (affinity: 1), for 2 ranks" in only.seen
