"""Measures the floors that snapshots are compared with, without elasticrun: memcpy, O_DIRECT,
torch's own saves.

argv: GiB of state, number of tensors, samples, a folder on the disk in question, a free port.
Prints one line of JSON: a list of seconds for each name.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from state import Shared, State, timed
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

BLOCK = 8 * 1024 * 1024
"""Bytes of one write: larger writes are no faster."""

PAUSE = 0.1
"""Seconds between two samples: the kernel has then finished the work of the previous one."""

Samples = dict[str, list[float]]


def cpu_seconds() -> float:
    """CPU seconds that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def add_sample(found: Samples, name: str, value: float) -> None:
    """Add a sample."""
    found.setdefault(name, []).append(value)


def measure_memory(state: State, shared: Shared, samples: int, found: Samples) -> None:
    """Measure copies between private and shared memory, both warm, and a copy from a fresh mapping.
    Also measure how long the kernel takes to provide the same amount of private memory, which every
    new process needs."""
    tensors = state.tensors()
    for _ in range(samples):
        time.sleep(PAUSE)
        untouched = [torch.empty_like(tensor) for tensor in tensors]
        touch = timed(lambda untouched=untouched: torch._foreach_zero_(untouched))
        add_sample(found, "first touch", touch)
        del untouched
        add_sample(found, "memcpy", timed(lambda: shared.take(tensors)))
        add_sample(found, "memcpy back", timed(lambda: shared.give(tensors)))
        fresh = shared.mapped(tensors)
        again = timed(lambda fresh=fresh: torch._foreach_copy_(tensors, fresh))
        add_sample(found, "memcpy back, fresh mapping", again)
        del fresh


def measure_direct_write(shared: Shared, folder: Path, samples: int, found: Samples) -> None:
    """Measure a plain O_DIRECT write of the same bytes, with fsync, to a new file each time."""
    view = memoryview(mmap.mmap(shared.descriptor, shared.nbytes, mmap.MAP_SHARED, mmap.PROT_READ))
    path = folder / "direct"
    for _ in range(samples):
        used, began = cpu_seconds(), time.perf_counter()
        target = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        os.posix_fallocate(target, 0, shared.nbytes)
        for at in range(0, shared.nbytes, BLOCK):
            os.pwrite(target, view[at : at + BLOCK], at)
        os.fsync(target)
        os.close(target)
        add_sample(found, "O_DIRECT", time.perf_counter() - began)
        add_sample(found, "O_DIRECT cpu", cpu_seconds() - used)
        path.unlink()
        time.sleep(PAUSE)


def measure_dcp_save(state: State, folder: Path, samples: int, found: Samples) -> None:
    """Measure torch's synchronous save with fsync, and its load into existing tensors."""
    path = folder / "dcp"
    contents = {"model": state.state_dict()}
    for _ in range(samples):
        shutil.rmtree(path, ignore_errors=True)
        writer = dcp.FileSystemWriter(path, sync_files=True, thread_count=1)
        used, began = cpu_seconds(), time.perf_counter()
        dcp.save(contents, storage_writer=writer, no_dist=True)
        add_sample(found, "dcp.save", time.perf_counter() - began)
        add_sample(found, "dcp.save cpu", cpu_seconds() - used)
        load = timed(lambda: dcp.load(contents, checkpoint_id=path, no_dist=True))
        add_sample(found, "dcp.load", load)
    shutil.rmtree(path, ignore_errors=True)


def measure_async_save(state: State, folder: Path, samples: int, found: Samples) -> None:
    """Measure how long torch's asynchronous save blocks training: with its shared-memory stager and
    a writer process, and with its defaults."""
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=True,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    contents = {"model": state.state_dict()}
    ways = {
        "async_save": {
            "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
            "async_stager": DefaultStager(options),
        },
        "async_save, default": {},
    }
    for name, way in ways.items():
        for number in range(samples + 1):
            path = folder / "async"
            began = time.perf_counter()
            saved = dcp.async_save(contents, checkpoint_id=path, **way)
            stall = time.perf_counter() - began
            add_sample(found, name if number else f"{name}, first", stall)
            getattr(saved, "upload_completion", saved).result()
            shutil.rmtree(path, ignore_errors=True)
            time.sleep(PAUSE)


def main() -> None:
    """Measure and print."""
    gib, count, samples = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    folder = Path(sys.argv[4])
    torch.set_num_threads(1)
    state = State(gib, count)
    state.fill(1.5)
    found: Samples = {}
    shared = Shared(state.tensors())
    measure_memory(state, shared, samples, found)
    measure_direct_write(shared, folder, samples, found)
    del shared
    measure_dcp_save(state, folder, samples, found)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[5]}
    dist.init_process_group("gloo", rank=0, world_size=1)
    measure_async_save(state, folder, samples, found)
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
