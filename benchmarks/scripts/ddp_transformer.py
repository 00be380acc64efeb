"""DDP around nn.Transformer, as users write it; the last rank dies once, after argv[1] seconds of
training. With any second argument no rank dies, and the steps per second are written to
$BENCH_STEPS/count."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from report import report
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train until it is time to die, or to end."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source, target = torch.randn(8, 16, 64), torch.randn(8, 16, 64)
    seconds, count = float(sys.argv[1]), len(sys.argv) > 2
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    began, steps, stop = 0.0, 0, torch.zeros(1)
    while not stop.item():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(source, target), target).backward()
        optimizer.step()
        steps += 1
        if not began:
            began = time.monotonic()
            report("allreduce")
        over = time.monotonic() - began > seconds
        if over and first_life and not count and dist.get_rank() == dist.get_world_size() - 1:
            report("dies")
            os.kill(os.getpid(), signal.SIGKILL)
        stop.fill_(float(over))
        dist.all_reduce(stop)
    if count and dist.get_rank() == 0:
        with open(os.environ["BENCH_STEPS"] + "/count", "w") as file:
            print(steps / (time.monotonic() - began), file=file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
