"""argv[1] ranks, forked once torch is there, load the checkpoint argv[2] by plain torch and compare
it, bit by bit, with what argv[3] holds. They meet at the file argv[4]."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

world = int(sys.argv[1])
checkpoint, expected, meeting = sys.argv[2:]
torch.set_num_threads(1)


def rank_main(rank: int) -> None:
    wanted = torch.load(expected)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    for name in ("rows", "columns"):
        found[name] = distribute_tensor(found[name], mesh, [Shard(name == "columns")])
    dcp.load(found, checkpoint_id=checkpoint)
    for name, tensor in found.items():
        have = tensor.full_tensor() if name in ("rows", "columns") else tensor
        assert have.dtype == wanted[name].dtype
        assert torch.equal(have, wanted[name]), name
    dist.destroy_process_group()


for rank in range(world):
    if os.fork() == 0:
        code = 1
        try:
            rank_main(rank)
            code = 0
        finally:
            os._exit(code)
codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(world)]
print(codes)
