"""What a container lacks: shared memory, a root that can be written, a user with a name, cores and
memory."""

from __future__ import annotations

import os
import signal

import pytest

from tests.compat.live import PUPPET, finish, summing
from tests.containers.conftest import MIB, Box
from tests.further import further
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
    assert said.count("snapshots are kept in anonymous memory") == 1
    assert "/dev/shm has space for 64 MiB" in said


@further(
    "e2e/test_odd_hosts::test_no_home_and_no_entry_in_passwd",
    "e2e/test_run_folder::test_a_home_that_cannot_be_written_to",
)
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


OOM = "the kernel was out of memory and killed it"


@further("testing/test_cgroups::test_a_node_with_little_memory")
def test_an_out_of_memory_kill_is_told_from_a_crash(box: Box) -> None:
    """The cgroup's own count says so; the kernel's log is not to be seen in a container."""
    eats = (str(SCRIPTS / "eats.py"), "1", "itself")
    container = box("--standalone", "--nproc-per-node=2", *eats, memory=700 * MIB)
    assert container.launched.wait() == 1
    said = container.launched.stderr
    assert "rank 1: killed by SIGKILL: the kernel was out of memory" in said
    assert OOM in said


@further(
    "agent/snapshots/test_segments::test_a_cgroup_has_what_its_page_cache_could_give_back",
    "containers/test_surroundings::test_a_small_dev_shm",
)
def test_no_room_for_snapshots_within_the_limit(box: Box, world: World) -> None:
    """/dev/shm would have it, the cgroup has not: nobody is killed for snapshots, and one sentence
    says that they are not taken."""
    holds = (str(SCRIPTS / "holds.py"), str(world.scratch / "ckpt"), "250", "3", "9")
    container = box("--standalone", *holds, memory=900 * MIB, shm=2048 * MIB)
    assert container.launched.wait() == 0, container.launched.stderr
    said = container.launched.stderr
    assert "training continues without snapshots: 500 MiB are needed, but the cgroup" in said
    assert OOM not in said


@further("testing/test_cgroups::test_a_node_that_is_given_less_time_as_it_runs", "cli/test_devices")
def test_a_share_of_the_cores(box: Box, world: World) -> None:
    """One core's worth of time: as many ranks as that where the cores are to be counted, and a word
    about threads that are more."""
    container = box("--standalone", "--nproc-per-node=cpu", "--max-restarts=1", PUPPET, cpus=1.0)
    (peer,) = world.hub.ranks(1)
    assert peer.world_size == 1
    peer.order("die", signum=signal.SIGKILL)
    (again,) = world.hub.ranks(1, restart=1)
    finish([again], container.launched)
    said = container.launched.stderr
    assert "this container has CPU time for 1: counting 1" in said
    assert OOM not in said, "a SIGKILL that the kernel has not sent for want of memory"
    assert "set OMP_NUM_THREADS=1" in said
