"""Measures what `elasticrun.training.progress(step)` costs a rank, as a table.

    python benchmarks/progress_cost.py [--calls N]

Two ranks on gloo, with a listener in place of the agent. Timed: a call without an agent, a call
with one (most calls only count; ten per second send a datagram), and one read of torch's flight
recorder, of which an agent causes one per second, for the buffer size without accelerators and for
torch's default. All figures are CPU time of the rank's thread, which a busy machine changes little.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import threading
import time

from elasticrun.training.recorder import SMALL_RING
from elasticrun.wire.env import FLIGHT_RECORDER_SIZE, PROGRESS
from elasticrun.wire.progress import DATAGRAM_BYTES, address, mint_name, place

SAMPLES = 20
"""Number of reads; the median is reported."""

RANK = """
import os, sys, time
from elasticrun.training import progress, recorder
import torch, torch.distributed as dist

calls = int(sys.argv[1])
dist.init_process_group("gloo")
ones = torch.ones(1)
for number in range(int(os.environ["COLLECTIVES"])):
    dist.all_reduce(ones)
progress(0)
began = time.thread_time()
for number in range(calls):
    progress(number)
each = (time.thread_time() - began) / calls
looks = []
for _ in range(int(sys.argv[2])):
    began = time.thread_time()
    held = len(recorder.read_recorders().collectives)
    looks.append(time.thread_time() - began)
dist.barrier()
if os.environ["RANK"] == "0":
    print(each, sorted(looks)[len(looks) // 2], held)
"""


def without_agent(calls: int) -> float:
    """CPU seconds of a call in a process that no agent started."""
    os.environ.pop(PROGRESS, None)
    from elasticrun.training import progress

    rounds = []
    for _ in range(5):
        began = time.thread_time()
        for number in range(calls):
            progress(number)
        rounds.append((time.thread_time() - began) / calls)
    return statistics.median(rounds)


def _drain(listener: socket.socket) -> None:
    while listener.recv(DATAGRAM_BYTES):
        pass


def with_listener(calls: int, ring: int) -> tuple[float, float, int]:
    """Run two ranks with a listener in place of the agent. Returns the CPU seconds of a call, those
    of a read of a flight recorder with `ring` entries, and the number of entries read."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    name = mint_name()
    listener.bind(address(name))
    drainer = threading.Thread(target=_drain, args=(listener,), daemon=True)
    drainer.start()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(calls), str(SAMPLES)],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "COLLECTIVES": str(ring + 10),
                FLIGHT_RECORDER_SIZE: str(ring),
                PROGRESS: place(name, rank),
            },
        )
        for rank in range(2)
    ]
    words = ranks[0].communicate()[0].split()
    ranks[1].communicate()
    assert [rank.returncode for rank in ranks] == [0, 0]
    listener.shutdown(socket.SHUT_RDWR)
    drainer.join()
    return float(words[0]), float(words[1]), int(words[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=200_000)
    calls = parser.parse_args().calls
    print("| what | cost |\n|---|---|")
    print(f"| a call without an agent | {without_agent(calls) * 1e6:.2f} µs |")
    for ring in (int(SMALL_RING), 2000):
        each, look, held = with_listener(calls, ring)
        print(f"| a call below an agent, ring of {ring} | {each * 1e6:.2f} µs |")
        print(f"| a look at {held} entries | {look * 1e3:.1f} ms |")


if __name__ == "__main__":
    main()
