"""Measures what comparing replicas costs a step, as a table.

    python benchmarks/corruption_cost.py [--hashing N] [--pairs N] [--seconds S] [--mib N]

First, N times for each size, alternating, the CPU time of one comparison (the thread's own clock):
hashing the snapshot as the saver does, and encoding and decoding the reports. Per rank it is

    share = comparison / (interval * cores),  interval = max(10 s, 100 * hashing on the node)

of the CPU time of the steps between two comparisons, if each of the rank's cores computes all the
time. Shown are the shares for one core per rank and 1 and 8 ranks per node: the worst case.

Then two ranks with equal state take a snapshot every ten steps. Two such jobs run side by side, one
with --on-corruption=tell and one with off, so that both have the same machine. Shown are the
medians and means of all steps of rank 0, their ratios, and the CPU seconds of the saver.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from elasticrun.core.snapshots.agreement import APART, SHARE
from elasticrun.snapshots.dcp.image import arrange
from elasticrun.snapshots.saver.hashing import OpenSegment, TensorDigests
from elasticrun.snapshots.shm.layout import PAGE
from elasticrun.snapshots.shm.segment import Segment, initialize, segment_bytes
from elasticrun.training.checkpointing.state import TrainingState
from elasticrun.wire import messages as m
from elasticrun.wire.rpc import protobuf
from elasticrun.wire.types import RoundName

SIZES = (64, 256, 1024)
"""MiB of a rank's state, in 64 tensors."""

RANK = """
import json, os, sys, time
import psutil
import torch, torch.distributed as dist
from elasticrun.training import Checkpointer

seconds, mib, out = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(7)
state = {f"layer{n}": torch.randn(1 << 20) for n in range(mib // 4)}
work = torch.randn(768, 768)
ckpt = Checkpointer(os.path.join(out, "ckpt"), state=state, every_steps=10, on_busy="skip")
step = ckpt.restore()
times, share = [], torch.zeros(2)
began = time.perf_counter()
while not share[1]:
    begin = time.perf_counter()
    for _ in range(3):
        work @ work
    share[0], share[1] = 1.0, float(begin - began > seconds)
    dist.all_reduce(share)
    for tensor in state.values():
        tensor.add_(0.001)
    step += 1
    ckpt.step(step)
    times.append(time.perf_counter() - begin)
if dist.get_rank() == 0:
    savers = [p for p in psutil.process_iter() if p.name() == "elasticrun-save"]
    mine = [p for p in savers if p.ppid() == os.getppid()]
    spent = sum(sum(p.cpu_times()[:2]) for p in mine)
    with open(os.path.join(out, "times.json"), "w") as file:
        json.dump({"steps": times, "saver": spent}, file)
dist.barrier()
"""


def begin(mode: str, seconds: float, mib: int, folder: str) -> subprocess.Popen[str]:
    """Start one job."""
    script = Path(folder, "train.py")
    script.write_text(RANK)
    command = [
        *(sys.executable, "-m", "elasticrun", "--standalone", "--nproc-per-node=2"),
        *(f"--on-corruption={mode}", str(script), str(seconds), str(mib), folder),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "LOGLEVEL": "INFO"}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def pair(seconds: float, mib: int, first: str) -> dict[str, dict[str, Any]]:
    """Two jobs side by side, so that both have the same machine: for each, the times of its steps
    and the saver's CPU seconds. `first`: the one that starts first."""
    found = {}
    with contextlib.ExitStack() as stack:
        made = tempfile.TemporaryDirectory
        folders = {
            mode: stack.enter_context(made(prefix="corruption-cost-"))
            for mode in sorted(("off", "tell"), key=lambda mode: mode != first)
        }
        jobs = {mode: begin(mode, seconds, mib, folder) for mode, folder in folders.items()}
        for mode, job in jobs.items():
            said = job.communicate()[1]
            if job.returncode or ("are equal at step" in said) != (mode == "tell"):
                sys.exit(said)
            found[mode] = json.loads(Path(folders[mode], "times.json").read_text())
    return found


def segment_of(mib: int) -> OpenSegment:
    """A snapshot of so many MiB in shared memory, opened as the saver does."""
    tensors = {f"layer{n}": torch.zeros(mib << 12) for n in range(64)}
    layout = arrange(TrainingState({"state": tensors}, 0).take().pieces, PAGE)
    encoded = layout.encode()
    nbytes = segment_bytes(len(encoded), layout.slot_bytes, 2)
    fd = os.memfd_create("corruption-cost")
    os.ftruncate(fd, nbytes)
    memory = memoryview(mmap.mmap(fd, nbytes))
    initialize(memory, layout_length=len(encoded), slot_bytes=layout.slot_bytes, slots=2)
    memory[PAGE : PAGE + len(encoded)] = encoded
    segment = Segment(memory)
    segment.payload(0)[:] = os.urandom(1 << 16) * (layout.slot_bytes >> 16) + bytes(
        layout.slot_bytes % (1 << 16)
    )
    name = RoundName(1, 1, "n")
    segment.commit(0, round=name, sequence=1, step=10, layout=layout.key, values=0)
    return OpenSegment(fd, 0)


def comparison(opened: OpenSegment) -> tuple[float, float]:
    """CPU seconds of hashing one snapshot, and of the messages of one comparison."""
    began = time.thread_time()
    digests = TensorDigests(opened, 0, 1).of_parts([(0, 64)], frozenset())
    hashed = time.thread_time()
    name = RoundName(1, 1, "n")
    one = m.RankDigests(0, 64, digests, (), "cuda:0")
    order, report = m.CompareReplicas(name, 10, 1), m.Digests(name, 10, 1, (one,), 0.1)
    protobuf.order_from_wire(protobuf.order_to_wire(order))
    protobuf.report_from_wire(protobuf.report_to_wire(report))
    return hashed - began, time.thread_time() - hashed


def print_hashing(samples: int) -> None:
    """Measure the CPU time of comparisons, and print the share of the steps'."""
    opened = {mib: segment_of(mib) for mib in SIZES}
    found: dict[int, list[tuple[float, float]]] = {mib: [] for mib in SIZES}
    for _ in range(samples):
        for mib, one in opened.items():
            found[mib].append(comparison(one))
    print(f"load {os.getloadavg()[0]:.1f}, {samples} comparisons each: medians (the largest)")
    print("| MiB per rank | hashing | messages | share of a step, 1 and 8 ranks per node |")
    print("|---|---|---|---|")
    for mib, pairs in found.items():
        hashing, messages = ([pair[at] for pair in pairs] for at in range(2))
        one, sent = statistics.median(hashing), statistics.median(messages)
        shares = [
            f"{100 * (one + sent) / max(APART, SHARE * ranks * one):.2f} %" for ranks in (1, 8)
        ]
        print(
            f"| {mib} | {1e3 * one:.1f} ms ({1e3 * max(hashing):.1f}) "
            f"| {1e3 * sent:.2f} ms ({1e3 * max(messages):.2f}) | {' and '.join(shares)} |"
        )


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--hashing", type=int, default=9)
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--seconds", type=float, default=35.0)
    options.add_argument("--mib", type=int, default=256)
    args = options.parse_args()
    if args.hashing:
        print_hashing(args.hashing)
    if not args.pairs:
        return
    steps: dict[str, list[float]] = {"off": [], "tell": []}
    savers: dict[str, list[float]] = {"off": [], "tell": []}
    for number in range(args.pairs):
        first = ("off", "tell")[number % 2]
        for mode, found in pair(args.seconds, args.mib, first).items():
            steps[mode] += found["steps"][20:]
            savers[mode].append(found["saver"])
    print(f"load {os.getloadavg()[0]:.1f}, {args.mib} MiB on each of 2 ranks, {args.pairs} pairs")
    print("| | off | tell | ratio |\n|---|---|---|---|")
    for name, of in (("median", statistics.median), ("mean", statistics.mean)):
        off, tell = 1e3 * of(steps["off"]), 1e3 * of(steps["tell"])
        print(f"| {name} of a step | {off:.2f} ms | {tell:.2f} ms | {tell / off:.4f} |")
    off, tell = (statistics.median(savers[mode]) for mode in ("off", "tell"))
    share = 100 * (tell - off) / args.seconds
    print(f"| CPU of the saver | {off:.2f} s | {tell:.2f} s | {share:.2f} % of one core |")


if __name__ == "__main__":
    main()
