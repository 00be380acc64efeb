"""The agent as process 1 of a container: it reaps, forwards signals and leaves when told."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from elasticrun.config import EXIT_SAVED
from elasticrun.host.system.processes import state
from elasticrun.snapshots.shm.segment import SegmentError
from elasticrun.testing import processes
from tests.compat.live import PUPPET, finish, summing
from tests.containers.conftest import Box
from tests.further import further
from tests.harness import LIMIT, World
from tests.snapshots.conftest import STEPS, TRAIN, starts, until_printed, watermark

GRACE = 120.0
"""Seconds that a kubelet gives to a pod (terminationGracePeriodSeconds; 30 where nobody sets it, of
which this machine may stand still for most)."""

SLEEPS = ("sleep", "sh -c sleep")
"""Command lines of a child that sleeps, or is about to."""

pytestmark = pytest.mark.slow


def test_it_reaps_orphans_and_forwards_signals(box: Box, world: World) -> None:
    """What `kubectl exec` leaves behind is process 1's to reap. SIGUSR1 goes to the ranks, and the
    exit code of the container is the launcher's."""
    container = box("--standalone", "--nproc-per-node=2", PUPPET)
    peers = summing(world, 2)
    assert container.run("sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo left") == "left"
    (orphan,) = (pid for pid in orphans(container.pid) if state(pid) != "Z")
    os.kill(orphan, signal.SIGKILL)
    for peer in peers:
        peer.order("trap", signums=[signal.SIGUSR1], how="note")
        world.hub.word(peer, "done", what="trap")
    container.signal(signal.SIGUSR1)
    for peer in peers:
        world.hub.word(peer, "signal", signum=signal.SIGUSR1)
    deadline = time.monotonic() + LIMIT
    while left := orphans(container.pid):
        assert time.monotonic() < deadline, f"not reaped: {left}"
        threading.Event().wait(0.05)  # the kernel tells nobody but the parent
    finish(peers, code=3)
    assert container.launched.wait() == 1


@further("snapshots/test_departure::test_one_node_leaves_and_the_other_goes_on")
def test_sigterm_saves_and_leaves(box: Box, world: World) -> None:
    """What a kubelet sends before it kills: a step that all ranks have is in storage when process 1
    ends, and that is before the kubelet's SIGKILL."""
    out, ckpt = world.scratch / "out", world.scratch / "ckpt"
    out.mkdir()
    train = (str(TRAIN), "--steps", str(10**9), "--every", "5", "--print-at", "5")
    container = box(
        *("--standalone", "--nproc-per-node=2", f"--departure-grace={GRACE - 5}"),
        *(*train, "--out", str(out), "--ckpt", str(ckpt)),
        env={"OMP_NUM_THREADS": "1"},
    )
    for rank in (0, 1):
        until_printed(out, rank)
    assert container.stop(GRACE) == EXIT_SAVED, container.launched.stderr
    # more than one, where a rank was past the first one already
    step = re.findall(r"all ranks must save step (\d+)", container.launched.stderr)[-1]
    assert [marker.parent.name for marker in ckpt.glob("step-*/.metadata")] == [
        f"step-{int(step):09d}"
    ]


@further(
    "agent/snapshots/test_taken_over",
    "snapshots/test_random_kills::test_killed_at_random_moments",
    "test_it_reaps_orphans_and_forwards_signals",
)
def test_it_is_killed_and_started_again(box: Box, world: World) -> None:
    """As a kubelet restarts a container that has died: with the pod's volumes, /dev/shm among them.
    The new agent takes the memory over, and the ranks go on from it."""
    with tempfile.TemporaryDirectory(prefix="elasticrun-test-", dir="/dev/shm") as volume:
        shm, out, gate = Path(volume), world.scratch / "out", world.scratch / "gate"
        out.mkdir()
        gate.write_text("7")
        words = (
            *("--nnodes=1", "--nproc-per-node=2", "--rdzv-id=pod", "--rdzv-backend=c10d"),
            *("--rdzv-endpoint=127.0.0.1:29577", str(TRAIN), "--mode", "fsdp2"),
            *("--steps", str(STEPS), "--out", str(out), "--ckpt", str(world.scratch / "ckpt")),
            *("--gate", str(gate)),
        )
        container = box(*words, env={"OMP_NUM_THREADS": "1"}, shm_volume=shm)
        deadline = time.monotonic() + LIMIT
        while [whole(path) for path in segments(shm)] != [7, 7]:
            assert time.monotonic() < deadline, container.launched.stderr
            threading.Event().wait(0.05)
        os.kill(container.pid, signal.SIGKILL)
        assert container.launched.wait() == 128 + signal.SIGKILL
        gate.write_text(str(10**9))
        container = box(*words, env={"OMP_NUM_THREADS": "1"}, shm_volume=shm)
        assert container.launched.wait() == 0, container.launched.stderr
        assert "from step 7 in memory, left by earlier agents" in container.launched.stderr
        assert [starts(out, rank) for rank in (0, 1)] == [[0, 7], [0, 7]]
        assert not [path for path in shm.rglob("*") if path.is_file()]


def whole(path: Path) -> int | None:
    """The watermark of a segment; None while it is being made."""
    try:
        return watermark(path)
    except (SegmentError, OSError, ValueError, BufferError):
        return None


def segments(shm: Path) -> list[Path]:
    return [path for path in shm.rglob("*") if path.is_file() and "-" in path.name]


@further("test_it_reaps_orphans_and_forwards_signals")
def test_who_takes_longer_is_killed(box: Box) -> None:
    """So that the test above could fail."""
    container = box(program=(sys.executable, "-c", DEAF))
    container.launched.until_text("deaf", stream="stdout")
    assert container.stop(0.1) == 128 + signal.SIGKILL


DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
while True:
    signal.pause()
"""

LOADS = """
import signal, sys
from elasticrun.cli import main

def launch(words):
    print("loading", flush=True)
    signal.pause()

main._launch = launch
sys.exit(main.main(["train.py"]))
"""


def test_sigterm_before_there_is_an_agent(box: Box) -> None:
    """Process 1 is deaf to what it has no handler for: a pod that is deleted while Python loads
    would be waited for until it is killed."""
    container = box(program=(sys.executable, "-c", LOADS))
    container.launched.until_text("loading", stream="stdout")
    container.signal(signal.SIGTERM)
    assert container.launched.wait() == 128 + signal.SIGTERM


def orphans(parent: int) -> list[int]:
    """The children of process 1 that it has not started, those that were not reaped among them."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    named = {int(pid): (state(int(pid)), processes.command(int(pid))) for pid in children}
    return [pid for pid, (how, what) in named.items() if how == "Z" or what.startswith(SLEEPS)]
