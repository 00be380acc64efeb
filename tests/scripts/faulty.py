"""A training that stops at a planted fault: `faulty.py FAULT [SECONDS]`.

All ranks reduce for ten steps, then rank 1 does what the fault says, at a line that ends in
`# here`, while the others go on into the next collective. What only looks like a hang ends after
SECONDS, and the training with it. BACKEND, in the environment, is `gloo`, or `stored` (stored.py).
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import pdb
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

ODD = 1
STEPS = 10
FAULT = sys.argv[1]
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 600.0
BACKEND = os.environ.get("BACKEND", "gloo")
GROUPS: list[dist.ProcessGroup] = []


def step() -> None:
    dist.all_reduce(torch.ones(1000))


def sleep() -> None:
    time.sleep(SECONDS)  # here


def spin() -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:  # here
        pass


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # here


def other() -> None:
    dist.broadcast(torch.ones(1000), src=ODD)  # here


def skipped() -> None:
    dist.barrier()  # here


def size() -> None:
    dist.all_reduce(torch.ones(10))  # here


def order() -> None:
    """Every other rank waits in one group, this one in the other."""
    dist.all_reduce(torch.ones(10), group=GROUPS[1])  # here


class Stuck(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        time.sleep(SECONDS)
        return index


def loader() -> None:
    for _ in torch.utils.data.DataLoader(Stuck(), num_workers=1):  # here
        return


def held() -> None:
    ctypes.PyDLL(None).usleep(int(SECONDS * 1e6))  # here


def held_busy() -> None:
    sum(itertools.repeat(1, int(SECONDS * 1e8)))  # here


def lock() -> None:
    mine = threading.Lock()
    mine.acquire()
    mine.acquire(timeout=SECONDS)  # here


def waits() -> None:
    work: queue.Queue[int] = queue.Queue()
    thread = threading.Thread(target=work.get, daemon=True)
    thread.start()
    thread.join(SECONDS)  # here


def ended() -> None:
    os._exit(0)


def save() -> None:
    """A checkpoint that one rank writes, to a disk."""
    end = time.monotonic() + SECONDS
    weights = torch.zeros(4_000_000)
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            torch.save(weights, f"{folder}/weights.pt")  # here


def evaluate() -> None:
    end = time.monotonic() + SECONDS
    x = torch.randn(64, 64)
    while time.monotonic() < end:
        x = torch.tanh(x @ x)  # here


def traced() -> None:
    """A debugger that has stopped this process: its child, by ptrace."""
    code = (
        "import ctypes,os,time\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "seize, interrupt, rank = 0x4206, 0x4207, os.getppid()\n"
        "assert libc.ptrace(seize, rank, 0, 0) == 0, ctypes.get_errno()\n"
        "assert libc.ptrace(interrupt, rank, 0, 0) == 0, ctypes.get_errno()\n"
        f"time.sleep({SECONDS})\n"
    )
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)
    debugger = subprocess.Popen([sys.executable, "-c", code])
    debugger.wait()  # here


def debugged() -> None:
    """A person at pdb's prompt, who does not type."""
    reads, _ = os.pipe()
    pdb.Pdb(stdin=os.fdopen(reads), stdout=sys.stderr).set_trace()
    step()  # here


def crowded() -> None:
    """So many seconds of one core: longer where others want it too."""
    end = time.thread_time() + SECONDS
    while time.thread_time() < end:  # here
        pass


FAULTS: dict[str, Callable[[], None]] = {
    "sleep": sleep,
    "spin": spin,
    "stop": stop,
    "other": other,
    "skipped": skipped,
    "size": size,
    "order": order,
    "loader": loader,
    "held": held,
    "held_busy": held_busy,
    "lock": lock,
    "waits": waits,
    "ended": ended,
    "save": save,
    "evaluate": evaluate,
    "traced": traced,
    "debugged": debugged,
    "crowded": crowded,
}


def main() -> None:
    if FAULT == "alone":  # a training without a collective
        time.sleep(SECONDS)
        return
    if BACKEND == "stored":
        sys.path.append(os.path.join(os.path.dirname(__file__), "site-packages"))
        importlib.import_module("stored")  # which registers it
    dist.init_process_group(BACKEND)
    rank, size = dist.get_rank(), dist.get_world_size()
    GROUPS.extend(dist.new_group(list(range(size))) for _ in range(2))
    for _ in range(STEPS):
        step()
    if rank == ODD:
        print("at the fault", flush=True)
    if FAULT == "slow":
        for _ in range(int(SECONDS / 6)):
            time.sleep(6)
            step()
    elif FAULT == "compile":  # all compute, and nobody waits
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            sum(range(10_000))
    elif rank == ODD:
        FAULTS[FAULT]()
    elif FAULT == "order":
        dist.all_reduce(torch.ones(10), group=GROUPS[0])
    step()
    if rank == 0:
        print("trained to the end", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
