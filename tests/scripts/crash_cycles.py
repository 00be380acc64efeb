"""init_process_group, all_reduce, barrier; then rank 1 kills itself in each of its first N lives.

N is the first argument. Each life of each rank tells the test the sum it got. In the lives that the
other arguments name, rank 1 waits for a word of the test before it ends."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

from stage import Stage  # isort: skip

life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
stage = Stage()
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
stage.say("sum", value=int(value.item()), life=life)
dist.barrier()  # rank 1 dies when both have said it: a survivor is stopped within milliseconds
if os.environ["RANK"] == "1" and str(life) in sys.argv[2:]:
    next(stage.orders())
if life < int(sys.argv[1]) and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
