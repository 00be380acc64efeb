"""The agent as process 1 of a container: it reaps, forwards signals and leaves when told."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from elasticrun.config import EXIT_SAVED
from elasticrun.testing import processes
from tests.compat.live import PUPPET, allreduce, finish
from tests.containers.conftest import Box
from tests.harness import LIMIT, World
from tests.snapshots.conftest import TRAIN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_it_reaps_orphans_and_forwards_signals(box: Box, world: World) -> None:
    """What `kubectl exec` leaves behind is process 1's to reap. SIGUSR1 goes to the ranks, and the
    exit code of the container is the launcher's."""
    container = box("--standalone", "--nproc-per-node=2", PUPPET)
    peers = world.hub.ranks(2)
    assert allreduce(world, peers) == [2, 2]
    assert container.run("sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo left") == "left"
    (orphan,) = orphans(container.pid)
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


def test_sigterm_saves_and_leaves(box: Box, world: World) -> None:
    """What a kubelet sends before it kills: a step that all ranks have is in storage when process 1
    ends, well within the 30 s that a pod is given."""
    out, ckpt = world.scratch / "out", world.scratch / "ckpt"
    out.mkdir()
    train = (str(TRAIN), "--steps", str(10**9), "--every", "5")
    container = box(
        *("--standalone", "--nproc-per-node=2", *train, "--out", str(out), "--ckpt", str(ckpt)),
        env={"OMP_NUM_THREADS": "1"},
    )
    container.launched.until_text("snapshots take")
    container.signal(signal.SIGTERM)
    assert container.launched.wait() == EXIT_SAVED
    (step,) = re.findall(r"every rank is asked to save step (\d+)", container.launched.stderr)
    assert [marker.parent.name for marker in ckpt.glob("step-*/.metadata")] == [
        f"step-{int(step):09d}"
    ]


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
    named = {int(pid): (processes.state(int(pid)), processes.command(int(pid))) for pid in children}
    return [pid for pid, (how, what) in named.items() if how == "Z" or what.startswith("sleep")]
