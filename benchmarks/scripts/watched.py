"""Trains for argv[1] seconds. Each rank writes to argv[2]-RANK the durations of its steps, and the
CPU use of the thread that answers the agent and of the launcher's processes. With argv[3], a name,
the script itself starts that thread, which the benchmark queries at `NAME-RANK`.
"""

from __future__ import annotations

import os

BEFORE = set(os.listdir("/proc/self/task")) - {
    str(os.getpid())
}  # threads of the launcher, which run before the script does

import json  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from elasticrun.training.monitor import monitor  # noqa: E402

WARM_UP = 200
"""Warm-up steps, which do not count."""

AGREE_EVERY = 100
"""Steps after which the ranks agree on whether it is over."""


def answering_thread() -> set[str]:
    """The id of the thread that answers queries, which this starts if argv[3] is given; none
    without hang detection."""
    if len(sys.argv) <= 3:
        return BEFORE
    before = set(os.listdir("/proc/self/task"))
    monitor.start(f"{sys.argv[3]}-{os.environ['RANK']}")
    return set(os.listdir("/proc/self/task")) - before


def cpu(threads: set[str]) -> float:
    """CPU seconds that these threads have used."""
    texts = [Path(f"/proc/self/task/{one}/schedstat").read_text() for one in threads]
    return sum(int(text.split()[0]) for text in texts) / 1e9


def launcher_cpu() -> float:
    """CPU seconds of the agent, and of its children, such as the master and the fork server."""
    agent = psutil.Process(psutil.Process(os.getppid()).ppid())
    return sum(sum(one.cpu_times()[:2]) for one in (agent, *agent.children()))


def main() -> None:
    """Train, and write the results."""
    threads = answering_thread()
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
    used, others, began = cpu(threads), launcher_cpu(), time.monotonic()
    over = torch.zeros(1)
    while not over:
        train(AGREE_EVERY)
        over.fill_(time.monotonic() - began > float(sys.argv[1]))
        dist.all_reduce(over)
    wall = time.monotonic() - began
    said = {
        "cpu": cpu(threads) - used,
        "ours": launcher_cpu() - others,
        "wall": wall,
        "steps": steps,
    }
    Path(f"{sys.argv[2]}-{os.environ['RANK']}").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
