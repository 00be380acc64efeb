"""`--numa-binding` beside torchrun: the same cores, and the same errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.further import further
from tests.harness import ELASTICRUN, TORCHRUN, World, world_in

pytestmark = pytest.mark.slow

PCI = sorted(Path("/sys/bus/pci/devices").glob("*.0"))

TWO_GPUS = """
import types
import torch

def look():
    domain, bus, device = (int(part, 16) for part in "ADDRESS".split("."))
    place = types.SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=device)
    torch.cuda.get_device_properties = lambda index: place
    for counting in (torch.cuda, torch.accelerator):  # binding asks either
        counting.device_count = lambda: 2
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda: torch.device("cuda")

look()
"""
"""Shows torch two GPUs, which are both the first PCI device of this machine."""

NUMACTL = """#!/bin/sh
cores=${1#--physcpubind=}
shift
exec taskset -c "$cores" "$@"
"""

SCRIPT = """
import os
print("rank", os.environ["RANK"], "on", *sorted(os.sched_getaffinity(0)))
import torch
print("rank", os.environ["RANK"], "has", torch.get_num_threads(), torch.cuda.is_initialized())
"""


def two_gpus(folder: Path) -> dict[str, str]:
    """The variable by which Python finds them; torch loads them at its import."""
    info = folder / "two_gpus-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: two-gpus\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntwo_gpus = two_gpus:look\n")
    address = PCI[0].name.removesuffix(".0").replace(":", ".")
    (folder / "two_gpus.py").write_text(TWO_GPUS.replace("ADDRESS", address))
    return {"PYTHONPATH": str(folder)}


def numactl(folder: Path) -> dict[str, str]:
    (folder / "bin").mkdir()
    (folder / "bin/numactl").write_text(NUMACTL)
    (folder / "bin/numactl").chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def run(
    world: World, launcher: str, env: Mapping[str, str], folder: Path, *flags: str
) -> tuple[int, list[str], str]:
    """Exit code, what ranks print, stderr."""
    (folder / "bound.py").write_text(SCRIPT)
    words = ("--nproc-per-node=2", *flags, str(folder / "bound.py"))
    job = world.launch(launcher, *words, env=env)
    code = job.wait()
    return code, sorted(line for line in job.stdout.splitlines() if "rank" in line), job.stderr


@pytest.mark.skipif(not PCI, reason="needs a PCI device")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@further("forkserver/test_ranks::test_torch_names_the_cores_in_a_process_of_its_own")
@pytest.mark.parametrize("mode", ["exclusive", "node"])
def test_ranks_have_the_cores_that_torchrun_gives_them(mode: str, tmp_path: Path) -> None:
    flag = f"--numa-binding={mode}"
    machine = {**numactl(tmp_path), **two_gpus(tmp_path / "site")}
    with world_in(tmp_path / "t") as world:
        theirs = run(world, TORCHRUN, machine, tmp_path, flag)
    assert theirs[0] == 0, theirs[2]
    assert len(theirs[1]) == 4
    with world_in(tmp_path / "e") as world:
        ours = run(world, ELASTICRUN, machine, tmp_path, flag, "--launch=exec")
    assert ours[:2] == theirs[:2], ours[2]
    if mode == "exclusive":
        assert theirs[1][1] != theirs[1][3].replace("rank 1", "rank 0"), "each has its own core"


@further(
    "forkserver/test_ranks::test_torch_names_the_cores_in_a_process_of_its_own",
)
@pytest.mark.parametrize("launch", ["fork", "exec"])
def test_without_a_gpu_both_fail_and_say_what_torch_says(launch: str, tmp_path: Path) -> None:
    env = {**numactl(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    flag = "--numa-binding=node"
    with world_in(tmp_path / "t") as world:
        theirs = run(world, TORCHRUN, env, tmp_path, flag)
    error = theirs[2].splitlines()[-1]
    with world_in(tmp_path / "e") as world:
        ours = run(world, ELASTICRUN, env, tmp_path, flag, f"--launch={launch}")
    assert (ours[0], ours[1]) == (theirs[0], theirs[1]) == (1, [])
    assert f"{flag}: {error}" in ours[2]
    assert "Failed to apply NUMA binding" in ours[2]


@further("forkserver/test_ranks::test_torch_names_the_cores_in_a_process_of_its_own")
def test_ranks_of_numa_affinity_run_unbound_without_a_gpu(tmp_path: Path) -> None:
    env = {**numactl(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    with world_in(tmp_path / "e") as world:
        code, said, stderr = run(world, ELASTICRUN, env, tmp_path, "--numa-affinity")
    assert code == 0, stderr
    everywhere = " ".join(map(str, sorted(os.sched_getaffinity(0))))
    assert f"rank 1 on {everywhere}" in said
