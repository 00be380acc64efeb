"""A training whose replicas are equal until the test has one of them flip a bit.

    flips.py --out FOLDER --ckpt FOLDER [--mode plain|adapter|hsdp]

The ranks apply the same gradient to the same parameters, so they stay equal, and each copy that has
a flipped bit stays different. When OUT/flip-R exists, local rank R of the group of nodes flips one
bit of `second.weight`, and writes OUT/flipped-R. With OUT/nan-R it reports a loss that is NaN. All
end when OUT/stop exists. A start appends to OUT/rank-R.jsonl from which step, and whether the
parameters of all ranks are equal then.

Mode `adapter`: a parameter of each rank is its own, and a BatchNorm sees other data on each. Mode
`hsdp`: two copies of two shards, by FSDP2.
"""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from elasticrun.testing import step as tell_step
from elasticrun.training import Checkpointer, progress

PAUSE = 0.1
"""Seconds of a step."""


class Net(nn.Module):
    def __init__(self, mode: str, rank: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        if mode == "adapter":
            self.norm = nn.BatchNorm1d(16)
            self.adapter = nn.Parameter(torch.full((4,), float(rank)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        if hasattr(self, "norm"):
            return self.second(self.norm(hidden)) + self.adapter
        return self.second(hidden)


def local(tensor: torch.Tensor) -> torch.Tensor:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def train(net: nn.Module, step: int, rank: int, *, sharded: bool) -> None:
    """The same gradient on every rank, though each has other data."""
    data = torch.Generator().manual_seed(1000 * step + rank)
    net(torch.randn(12, 8, generator=data)).square().mean().backward()
    for name, parameter in net.named_parameters():
        gradient = local(parameter.grad)
        if not sharded and "adapter" not in name:
            dist.all_reduce(gradient)
        local(parameter).sub_(gradient, alpha=0.001)
        parameter.grad = None


def are_equal(net: nn.Module) -> bool:
    """Whether the second layer is the same on all ranks."""
    mine = local(net.second.weight).flatten().contiguous()
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    return all(torch.equal(mine, other) for other in others)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--mode", default="plain")
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--ckpt", required=True)
    args = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = Net(args.mode, rank)
    if args.mode == "hsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")))
    checkpointer = Checkpointer(args.ckpt, model=net, every_steps=1, on_busy="skip")
    step = checkpointer.restore()
    equal = args.mode == "hsdp" or are_equal(net)
    with open(args.out / f"rank-{rank}.jsonl", "a") as file:
        file.write(
            json.dumps({"start": step, "world": dist.get_world_size(), "equal": equal}) + "\n"
        )
    stop = torch.zeros(1)
    while not stop.item():
        train(net, step, rank, sharded=args.mode == "hsdp")
        step += 1
        if (args.out / f"flip-{rank}").exists():
            (args.out / f"flip-{rank}").unlink()
            local(net.second.weight).view(torch.int32).flatten()[:1].bitwise_xor_(1)
            (args.out / f"flipped-{rank}").touch()
        checkpointer.step(step)
        tell_step(step)
        progress(step, loss=float("nan") if (args.out / f"nan-{rank}").exists() else 0.5)
        threading.Event().wait(PAUSE)
        stop.fill_(float((args.out / "stop").exists()))
        dist.all_reduce(stop)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
