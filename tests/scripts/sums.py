"""Steps that cost next to nothing: all-reduces of one number on gloo, each told to the step log.

Arguments: how many steps, seconds between them, and how many numbers are summed, if more than one.
Knows nothing of elasticrun but the step log's
form, as a script must that runs where elasticrun is not installed.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist


def tell(number: int) -> None:
    """What `elasticrun.testing.step` does."""
    env = os.environ
    where = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}/{env['TORCHELASTIC_RESTART_COUNT']}"
    line = {
        "rank": int(env["RANK"]),
        "step": number,
        "world_size": int(env["WORLD_SIZE"]),
        "world": where,
        "pid": os.getpid(),
        "time": time.clock_gettime(time.CLOCK_MONOTONIC),
    }
    with open(env["ELASTICRUN_STEP_LOG"], "a") as log:
        log.write(json.dumps(line) + "\n")


dist.init_process_group("gloo")
numbers = int(sys.argv[3]) if len(sys.argv) > 3 else 1
for step in range(int(sys.argv[1])):
    value = torch.ones(numbers)
    dist.all_reduce(value)
    assert int(value[-1].item()) == dist.get_world_size()
    tell(step)
    time.sleep(float(sys.argv[2]))
