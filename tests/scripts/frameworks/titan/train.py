"""Entry point with @record, gloo, and a --job.config_file of its own."""

from __future__ import annotations

import argparse
import os
import tomllib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from told import tell
from torch.distributed.elastic.multiprocessing.errors import record

from . import model


@record
def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job.config_file", dest="config")
    config = tomllib.loads(Path(parser.parse_args().config).read_text())
    dist.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(model.build(config["model"]["width"]))
    optimizer = torch.optim.SGD(net.parameters(), lr=config["training"]["lr"])
    losses = []
    for _ in range(config["training"]["steps"]):
        optimizer.zero_grad()
        loss = net(torch.ones(4, config["model"]["width"])).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weight = sum(p.sum().item() for p in net.parameters())
    dist.barrier()
    return {
        "rank": dist.get_rank(), "world": dist.get_world_size(), "role": os.environ["ROLE_NAME"],
        "first": losses[0], "last": losses[-1], "weight": round(weight, 6),
    }  # fmt: skip


if __name__ == "__main__":
    tell(main)
