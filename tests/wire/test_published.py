"""What a master that was killed leaves in the run folder, and one that ended does not."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.system.processes import start_time
from elasticrun.wire.run_folder import (
    DEAD_KEPT,
    Published,
    began_before,
    publish,
    published,
    was_killed,
)


@pytest.fixture
def dead() -> Published:
    """The listing of a process that is gone."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = start_time(process.pid)
        assert started is not None
        made = Published("job", "127.0.0.1", 29400, "", process.pid, started)
        process.kill()
    return made


def test_one_that_lives_or_ended_well_was_not_killed(tmp_path: Path) -> None:
    assert not was_killed(tmp_path, "job", 29400)
    me = Published("job", "127.0.0.1", 29400, "", os.getpid(), start_time(os.getpid()) or 0)
    path = publish(tmp_path, me)
    assert not was_killed(tmp_path, "job", 29400)
    path.unlink()
    assert not was_killed(tmp_path, "job", 29400)


def test_one_that_left_its_file_was_killed(tmp_path: Path, dead: Published) -> None:
    publish(tmp_path, dead)
    assert was_killed(tmp_path, "job", 29400)
    assert was_killed(tmp_path, "job", 29400)  # to look removes nothing
    assert not was_killed(tmp_path, "another", 29400)
    assert not was_killed(tmp_path, "job", 29401)
    (tmp_path / "master-1-2.json").write_text("half a fi")
    assert was_killed(tmp_path, "job", 29400)


def test_who_lists_the_masters_hides_no_kill_from_a_slow_agent(
    tmp_path: Path, dead: Published
) -> None:
    """`elasticrun status` in the second after the kill would keep every agent from following."""
    publish(tmp_path, dataclasses.replace(dead, began=5.0))
    (tmp_path / "master-1-2.json").write_text("half a fi")
    assert published(tmp_path) == []
    assert published(tmp_path) == []
    assert was_killed(tmp_path, "job", 29400)
    assert began_before(tmp_path, "job", 29400) == 5.0
    for path in tmp_path.iterdir():
        long_ago = path.stat().st_mtime - 2 * DEAD_KEPT
        os.utime(path, (long_ago, long_ago))
    assert published(tmp_path) == []
    assert not was_killed(tmp_path, "job", 29400)
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_followed_is_forgotten(tmp_path: Path, dead: Published) -> None:
    for pid in (2**22 - 1, 2**22 - 2, dead.pid):  # two of them were listed as dead
        publish(tmp_path, dataclasses.replace(dead, pid=pid, port=29400))
        published(tmp_path)
    publish(tmp_path, dataclasses.replace(dead, job_id="another", pid=2**22 - 3))
    me = dataclasses.replace(dead, pid=os.getpid(), started=start_time(os.getpid()) or 0)
    publish(tmp_path, me)
    assert published(tmp_path) == [me]
    assert not was_killed(tmp_path, "job", 29400)
    assert was_killed(tmp_path, "another", 29400)
    assert len(list(tmp_path.iterdir())) == 2
