"""Trains for argv[1] seconds; each rank writes to argv[2]-RANK what its steps took and what the
thread that answers the agent used, and all processes of ours. With argv[3], a name, that thread is
one that others ask.
"""

from __future__ import annotations

import os

BEFORE = set(os.listdir("/proc/self/task")) - {str(os.getpid())}  # of the agent's making

import json  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from elasticrun.training.monitor import monitor  # noqa: E402

WARM_UP = 200
"""Steps that do not count."""

TOGETHER = 100
"""Steps after which the ranks agree on whether it is over."""


def answering() -> set[str]:
    """The thread that answers the agent, by its number; none where nobody is watched."""
    if len(sys.argv) <= 3:
        return BEFORE
    before = set(os.listdir("/proc/self/task"))
    monitor.start(f"{sys.argv[3]}-{os.environ['RANK']}")
    return set(os.listdir("/proc/self/task")) - before


def cpu(threads: set[str]) -> float:
    """Seconds of CPU that these have used."""
    texts = [Path(f"/proc/self/task/{one}/schedstat").read_text() for one in threads]
    return sum(int(text.split()[0]) for text in texts) / 1e9


def ours() -> float:
    """Seconds of CPU of the agent and what it has started itself: master and fork server."""
    agent = psutil.Process(psutil.Process(os.getppid()).ppid())
    return sum(sum(one.cpu_times()[:2]) for one in (agent, *agent.children()))


def main() -> None:
    """Train, and write."""
    threads = answering()
    dist.init_process_group("gloo")
    x, gradients = torch.randn(128, 128), torch.ones(100_000)
    steps: list[tuple[float, float]] = []

    def train(count: int) -> None:
        nonlocal x
        for _ in range(count):
            at = time.monotonic()
            for _ in range(20):
                x = torch.tanh(x @ x)
            dist.all_reduce(gradients)
            steps.append((at, time.monotonic() - at))

    train(WARM_UP)
    steps.clear()
    used, others, began = cpu(threads), ours(), time.monotonic()
    over = torch.zeros(1)
    while not over:
        train(TOGETHER)
        over.fill_(time.monotonic() - began > float(sys.argv[1]))
        dist.all_reduce(over)
    wall = time.monotonic() - began
    said = {"cpu": cpu(threads) - used, "ours": ours() - others, "wall": wall, "steps": steps}
    Path(f"{sys.argv[2]}-{os.environ['RANK']}").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
