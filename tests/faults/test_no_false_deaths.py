"""The opposite bars: what only looks like a death costs no round and no node.

Every test runs one job of three nodes, does the thing, and asserts that one and the same world went
on to the end. A bar on speed alone would buy false deaths, and each of those restarts everybody.
The durations are shorter in `make test` than in `make soak`, but always longer than the silence
after which a node that really is silent is dead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from elasticrun.system.processes import state
from tests.counting import let_pass, times
from tests.faults.relay import Relay, relay_to
from tests.faults.team import Node, Team, descriptors
from tests.further import further
from tests.harness import Launched, World, await_true

pytestmark = pytest.mark.slow

SILENCE = times(heartbeat_timeout=10)
"""A node that says nothing at all is dead after so long: not after the default of 5 s, for which
any other process of the job may stand still on a busy machine."""

OUTSIDE = times(heartbeat_timeout=10, is_host=0)
"""The same, and the master is started by hand."""

SHORT = 12.0
"""Seconds of a stall in `make test`, longer than such a silence."""


def durations(short: float, full: float) -> pytest.MarkDecorator:
    """The test twice: scaled down, and in full length in `make soak`."""
    both = [pytest.param(short, id="short"), pytest.param(full, id="full", marks=pytest.mark.soak)]
    return pytest.mark.parametrize("seconds", both)


def unharmed(team: Team, harm: Callable[[], object], master: Launched | None = None) -> None:
    """Start three nodes (unless there are some), do the harm: the same world goes on, nobody was
    given up, and no node left its place."""
    for _ in range(3 - len(team.nodes)):
        team.add()
    first = team.all_there(3)
    harm()
    team.goes_on(first, 20)
    assert [world.round for world in team.finish()] == [first.round], team.words()
    said = team.words()
    if master is not None:
        assert master.wait() == 0
        said += master.stderr
    assert " is dead" not in said, said


def test_one_job_bears_one_stall_after_another(world: World) -> None:
    """An agent's loop, then the master's, then resets of a link in a row: the tests below, shorter,
    befall one and the same world."""
    team = Team(world, "1:3", OUTSIDE)
    master = team.master(SILENCE, stalling=True)
    with relay_to(team.port) as relay:
        linked = team.add(port=relay.port)
        team.add(stalling=True)
        names = [node.name for node in team.nodes]

        def harm() -> None:
            for node in ("master", names[1]):
                team.stall(node, "loop", SHORT)
                team.goes_on(team.worlds()[-1], 20)
            again_and_again(relay, linked, 10.0)

        unharmed(team, harm, master)


@further("test_one_job_bears_one_stall_after_another")
@durations(SHORT, 30.0)
@pytest.mark.parametrize("how", ["loop", "gil"])
@pytest.mark.parametrize("who", ["n1", "master"])
def test_a_process_that_is_blocked(world: World, who: str, how: str, seconds: float) -> None:
    """An agent's loop: gRPC's own threads answer the master's pings, and the beats alone are
    missing. Its interpreter: no Python thread of it runs at all; the transport's threads are not
    Python's. The master hears nobody for longer than anybody may be silent, and holds that against
    none of them: silence counts only while the listener listened."""
    team = Team(world, "1:3", OUTSIDE)
    master = team.master(SILENCE, stalling=True)
    team.add()
    team.add(stalling=True)
    unharmed(team, lambda: team.stall(who, how, seconds), master)


@further("test_one_job_bears_one_stall_after_another")
def test_a_link_that_is_out_for_three_seconds(world: World) -> None:
    """Nothing passes between one agent and the master; then everything does."""
    team = Team(world, "1:3", OUTSIDE)
    master = team.master(SILENCE)
    with relay_to(team.port) as relay:
        team.add(port=relay.port)
        unharmed(team, lambda: relay.pause(3.0), master)


@further("test_one_job_bears_one_stall_after_another")
@durations(10.0, 300.0)
def test_a_stream_that_is_reset_again_and_again(world: World, seconds: float) -> None:
    """A NAT or a mesh that forgets connections: every 10 s for 5 minutes, or each second for 10."""
    team = Team(world, "1:3", OUTSIDE)
    master = team.master(SILENCE)
    with relay_to(team.port) as relay:
        node = team.add(port=relay.port)
        unharmed(team, lambda: again_and_again(relay, node, seconds), master)


def again_and_again(relay: Relay, node: Node, seconds: float) -> None:
    """Resets, ten or thirty of them in so many seconds; nothing piles up in the agent."""
    before = descriptors(node.agent.pid)
    pause = 10.0 if seconds > 60 else 1.0
    for _ in range(int(seconds / pause)):
        relay.reset()
        let_pass(pause)
    assert descriptors(node.agent.pid) <= before + 8


@further("e2e/test_surroundings::test_a_frozen_terminal")
@durations(SHORT, 30.0)
def test_a_terminal_that_is_frozen(world: World, seconds: float) -> None:
    """Nobody reads the terminal of a node whose rank prints all the time; the agent's own lines go
    there as well. Ranks and beats go on."""
    team = Team(world, "1:3", "--tee=3", SILENCE)
    team.add().agent.until_text("the job's page")
    leader, follower = os.openpty()
    try:
        team.add(console=follower)

        def harm() -> None:
            team.rank_on(1).order("chat")
            let_pass(seconds)
            threading.Thread(target=drain, args=(leader,), daemon=True).start()

        unharmed(team, harm)
    finally:
        os.close(follower)
        with suppress(OSError):
            os.close(leader)


def drain(leader: int) -> None:
    """Somebody reads the terminal again."""
    with suppress(OSError):
        while os.read(leader, 1 << 16):
            pass


@further("agent/logs/test_logs")
@durations(SHORT, 30.0)
def test_a_log_folder_that_is_frozen(world: World, tmp_path: Path, seconds: float) -> None:
    """The file system under `--log-dir` takes no write for a while, as NFS without its server: who
    writes there sleeps in the kernel and cannot even be killed. Those are the ranks that print,
    and nobody else."""
    with volume(tmp_path) as folder:
        team = Team(world, "1:3", SILENCE)
        team.add().agent.until_text("the job's page")
        team.add(f"--log-dir={folder / 'logs'}", "--tee=3")

        def harm() -> None:
            peer = team.rank_on(1)

            def last() -> int:
                return max(step.step for step in team.steps() if step.pid == peer.pid)

            peer.order("chat")
            world.hub.word(peer, "done", what="chat")
            with frozen_volume(folder):
                await_true(lambda: state(peer.pid) == "D", "rank asleep in the kernel")
                held = last()
                let_pass(seconds)
                assert last() == held  # the disk holds the rank that prints

        unharmed(team, harm)


@contextmanager
def volume(scratch: Path) -> Iterator[Path]:
    """A small file system that can be frozen; skips the test where none is."""
    image, folder = scratch / "volume.img", scratch / "volume"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    for command in (
        ["mkfs.ext4", "-q", "-F", str(image)],
        ["mount", "-o", "loop", str(image), str(folder)],
    ):
        if shutil.which(command[0]) is None:
            pytest.skip(f"no {command[0]} here")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this host does not let us mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def frozen_volume(folder: Path) -> Iterator[None]:
    """No write to the file system passes within the block. It is thawed by a process of its own,
    so that no end of this test leaves somebody asleep in the kernel for ever."""
    code = (
        "import fcntl, os, select, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "fcntl.ioctl(fd, 0xC0045877, 0)\n"  # FIFREEZE
        "print('frozen', flush=True)\n"
        "select.select([0], [], [], 240)\n"
        "fcntl.ioctl(fd, 0xC0045878, 0)\n"  # FITHAW
    )
    freezer = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert freezer.stdin is not None
    assert freezer.stdout is not None
    if freezer.stdout.readline() != b"frozen\n":
        freezer.wait()
        pytest.skip("this file system cannot be frozen")
    try:
        yield
    finally:
        freezer.stdin.close()
        freezer.wait()
        freezer.stdout.close()
