"""torchdata's StatefulDataLoader as state of each rank: with_torchdata.py OUT CKPT WORKERS."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from elasticrun.training import Checkpointer
from tests.training.data.record import Record


def main() -> None:
    out, ckpt_folder, workers = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo")
    data = TensorDataset(torch.arange(64))
    sampler = DistributedSampler(data, seed=1)
    loader = StatefulDataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)
    ckpt = Checkpointer(ckpt_folder, model=nn.Linear(1, 1), every_steps=1, on_busy="wait")
    ckpt.per_rank("loader", loader)
    step = ckpt.restore()
    record = Record(out)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for (batch,) in loader:
        dist.barrier()
        record.used(step, batch.tolist())
        step += 1
        ckpt.step(step)
        if step == 4 and first and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
