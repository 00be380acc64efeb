"""The script of the launcher table, which depends on no launcher: init_process_group, then one
all_reduce after another.

argv: the number of lives that the last rank ends with SIGKILL, and the seconds of steps before
each. The life after these runs forever if there is a third argument; else it succeeds.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from report import report

report("begins")
import torch  # noqa: E402  # its duration is a part of what is measured
import torch.distributed as dist  # noqa: E402


def main() -> None:
    """Train until it is time to die or to end."""
    deaths, seconds, for_ever = int(sys.argv[1]), float(sys.argv[2]), len(sys.argv) > 3
    is_last_life = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) >= deaths
    report("imported")
    dist.init_process_group("gloo")
    report("grouped")
    is_last_rank = dist.get_rank() == dist.get_world_size() - 1
    value = torch.ones(1000)
    dist.all_reduce(value)
    report("allreduce")
    began = time.monotonic()
    while not is_last_life or for_ever:
        if is_last_rank and not is_last_life and time.monotonic() - began > seconds:
            report("dies")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(value)
        time.sleep(0.01)
    dist.barrier()
    report("ends")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
