"""Measures what comparing replicas costs a step, as a table.

    python benchmarks/corruption_cost.py [--pairs N] [--seconds S] [--mib N]

Two ranks with equal state take a snapshot every ten steps. Two such jobs run side by side, one with
--on-corruption=tell and one with off, so that both have the same machine. Shown are the medians and
means of all steps of rank 0, their ratios, and the CPU seconds of the saver, which hashes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--seconds", type=float, default=35.0)
    options.add_argument("--mib", type=int, default=256)
    args = options.parse_args()
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
