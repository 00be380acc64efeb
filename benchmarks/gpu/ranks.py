"""What the ranks of the jobs do: ranks.py MODE [ARGUMENT ...], started by a launcher."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.scripts.report import report

report("script")
import torch  # noqa: E402  # its duration is a part of what is measured
import torch.distributed as dist  # noqa: E402

cuda: Any = torch.cuda  # untyped
report("imported", cuda=cuda.is_initialized(), bad_fork=cuda._is_in_bad_fork())

from benchmarks.gpu.results import (  # noqa: E402
    CUDA,
    NCCL,
    emit,
    gib,
    in_gib,
    median,
    text,
    trying,
)

RANK: Final = int(os.environ["RANK"])
LIFE: Final = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
LOCAL_RANK: Final = int(os.environ["LOCAL_RANK"])
HOME: Final = torch.device(f"cuda:{LOCAL_RANK % cuda.device_count()}" if CUDA else "cpu")
CPU_MEMORY: Final = 80
"""GiB that the stand-in for a device has, before they are divided."""

WANTED, HELD = 0.6, 0.25
"""Shares of a device's memory: a restarted rank wants the first, while a dying one holds the
second. Each of several ranks on one device gets its part of them."""

WANTED_LIMIT: Final = 20.0
ENDLESS_CYCLES: Final = 10**13
"""Device cycles of a kernel that does not end during the check."""

TENSORS: Final = 64
SAVES: Final = 6


def wait_for_device() -> None:
    if CUDA:
        cuda.synchronize()


def use_device() -> torch.Tensor:
    """Run the first kernel of this process."""
    if CUDA:
        cuda.set_device(HOME)
    ones = torch.ones(1000, device=HOME).mul_(1)
    wait_for_device()
    return ones


def memory_of_device() -> tuple[int, int]:
    """Free and total bytes."""
    if not CUDA:
        return gib(CPU_MEMORY), gib(CPU_MEMORY)
    free, total = cuda.mem_get_info(HOME)
    return int(free), int(total)


# ---------------------------------------------------------------- starts and restarts


def die(backend: str, deaths: str) -> None:
    """In each of `deaths` lives: form a group, use the device, reduce, and kill the last rank while
    it holds memory. The life after these ends well."""
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend)
    report("group")
    ones = use_device()
    free, total = memory_of_device()
    report("context", free=in_gib(free))
    if LIFE:
        seconds, refused = allocate(int(total * WANTED / world))
        report("memory", seconds=seconds, refused=refused)
    dist.all_reduce(ones)
    wait_for_device()
    report("reduced")
    held = torch.empty(int(total * HELD / world), dtype=torch.uint8, device=HOME)
    held[:: 1 << 20] = 1
    wait_for_device()
    if int(deaths) > LIFE:
        if world - 1 == RANK:
            report("dead")
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            dist.all_reduce(ones)
    dist.destroy_process_group()


def allocate(size: int) -> tuple[float, int]:
    """Allocate and free memory of the device. Returns the seconds until it was there (-1: never)
    and how often it was refused."""
    began, refused = time.monotonic(), 0
    while time.monotonic() - began < WANTED_LIMIT:
        try:
            torch.empty(size, dtype=torch.uint8, device=HOME)
        except RuntimeError:  # OutOfMemoryError is one
            refused += 1
            time.sleep(0.02)
            continue
        took = time.monotonic() - began
        if CUDA:
            cuda.empty_cache()
        return took, refused
    return -1.0, refused


def touch(folder: str) -> None:
    """Use the device when the file `go` is there, end when `leave` is."""
    for word in ("go", "leave"):
        while not Path(folder, word).exists():
            time.sleep(0.02)
        if word == "go":
            use_device()
            report("touched")


# ---------------------------------------------------------------- sight


def work() -> None:
    """Compute on the device and report steps until killed."""
    from elasticrun import training

    dist.init_process_group(NCCL)
    wide = torch.ones(4096 if CUDA else 512, 4096 if CUDA else 512, device=HOME)
    step = 0
    while True:
        for _ in range(20):
            torch.mm(wide, wide)
        dist.all_reduce(wide[0].clone())
        wait_for_device()
        step += 1
        training.progress(step)
        if step == 20:
            report("works")


def hang(how: str, rank: str) -> None:
    """This rank stops taking part: it sleeps, or waits for a kernel that does not end."""
    dist.init_process_group("gloo")
    ones = use_device()
    for _ in range(20):
        dist.all_reduce(ones)
    wait_for_device()
    if int(rank) == RANK:
        report("stuck")
        stuck(how)
    dist.all_reduce(ones)


def stuck(how: str) -> None:
    """The location that must be named."""
    if how == "sleep":
        time.sleep(3600)
    elif CUDA:
        cuda._sleep(ENDLESS_CYCLES)
        cuda.synchronize()
    wide = torch.ones(1500, 1500)
    while True:
        torch.mm(wide, wide)


COLLECTIVES: Final = 3


def recorder() -> None:
    """Write what torch's flight recorders hold, and what elasticrun reads from them: after some
    collectives, and while one more is open on the device."""
    dist.init_process_group(NCCL)
    ones = use_device()
    for _ in range(COLLECTIVES):
        dist.all_reduce(ones)
    wait_for_device()
    time.sleep(1)  # torch's watchdog polls
    read_recorders("done", COLLECTIVES, done=(COLLECTIVES,))
    if CUDA:
        cuda._sleep(10**10)  # seconds
    work = dist.all_reduce(ones, async_op=True)
    # a single rank of gloo waits for nobody
    done = (COLLECTIVES,) if CUDA else (COLLECTIVES, COLLECTIVES + 1)
    read_recorders("one open", COLLECTIVES + 1, done=done)
    work.wait()
    wait_for_device()
    dist.destroy_process_group()


def read_recorders(when: str, entered: int, done: tuple[int, ...]) -> None:
    from elasticrun.training.monitor import recorder, recorders

    found = recorders.recorders(recorders.groups())
    names = [one.key or "default" for one in found]
    emit(f"{when}: recorders", str(names), ok=bool(found))
    for one in found:
        status, entries = one.whole()
        title = f"{when}: recorder {one.key or 'default'}"
        emit(title, len(entries), "entries", json.dumps(status))
        last = {k: v for k, v in entries[-1].items() if k != "frames"} if entries else {}
        text(f"{title}, its last entry", json.dumps(last, indent=1))
    with trying(f"{when}: positions"):
        began = time.monotonic()
        groups = recorder.positions()
        took = time.monotonic() - began
        good = any(one.entered == entered and one.done in done for one in groups)
        either = " or ".join(map(str, done))
        wanted = f"expected: entered {entered}, done {either}; {took * 1e3:.2f} ms"
        emit(f"{when}: positions", len(groups), "groups", f"{wanted}: {groups}", good)
    counters = recorder.Counters()
    counters.read()
    emit(f"{when}: counters", str(counters.read()))


# ---------------------------------------------------------------- recovery


def recover(kind: str, folder: str) -> None:
    """A recoverable function that computes until there is a file `leave`. `device`: its group is on
    the device; `mixed`: its group is gloo's, and each rank has a group of its own on the device."""
    from torch._dynamo.utils import counters

    from elasticrun import training

    steps = [0]  # of this process, over all calls

    def build() -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
        began = time.monotonic()
        seed = torch.Generator(HOME).manual_seed(7)
        kept = torch.rand(1 << 20, generator=seed, device=HOME)
        function = compiled(kept)
        wait_for_device()
        report("built", seconds=time.monotonic() - began)
        return function, kept

    @training.recoverable
    def train() -> None:
        initialized = bool(cuda.is_initialized())
        report("called", initialized=initialized)
        dist.init_process_group(NCCL if kind == "device" else "gloo")
        group = None
        if kind == "mixed":
            alone = [dist.new_group([rank], backend=NCCL) for rank in range(dist.get_world_size())]
            group = alone[dist.get_rank()]
        function, kept = training.keep("compiled", build, stateless=True)
        seed = torch.Generator(HOME).manual_seed(7)
        equal = torch.equal(kept, torch.rand(1 << 20, generator=seed, device=HOME))
        is_first, leaves = True, torch.zeros(1, device=HOME)
        while not leaves.item():
            function(kept)
            leaves.fill_(Path(folder, "leave").exists())
            dist.all_reduce(leaves, group=group)
            dist.all_reduce(leaves)
            wait_for_device()
            if is_first:
                graphs = int(counters["stats"]["unique_graphs"])
                report("entered", graphs=graphs, equal=equal, initialized=initialized)
            is_first = False
            steps[0] += 1
            training.progress(steps[0])
            time.sleep(0.01)
        dist.destroy_process_group()

    if CUDA:
        cuda.set_device(HOME)
    train()


def compiled(sample: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A compiled function. inductor needs a compiler on the machine, so eager takes its place if it
    fails, and in a rehearsal."""
    why = "a rehearsal"
    for backend in ("inductor", "eager") if CUDA else ("eager",):
        function = torch.compile(lambda x: (x * 2).sin().sum(), backend=backend)
        try:
            function(sample)
        except Exception as error:
            why = str(error)
            continue
        emit(f"rank {RANK}: compiled by", backend, "", why if backend == "eager" else "")
        return function
    raise RuntimeError(why)


# ---------------------------------------------------------------- snapshots


def tensor(index: int, number: int, step: int = 0) -> torch.Tensor:
    """A tensor of the state at a step: the same bits in every life."""
    seed = torch.Generator(HOME).manual_seed(index)
    made = torch.randint(0, 2**20, (number,), generator=seed, device=HOME, dtype=torch.int32)
    return made.add_(step).float()


class State:
    """Parameters, and an optimizer whose step adds one to each of their elements."""

    def __init__(self, number: int, *, is_filled: bool) -> None:
        self.number = number
        self.model = torch.nn.ParameterList(
            torch.nn.Parameter(tensor(i, number) if is_filled else torch.zeros(number, device=HOME))
            for i in range(TENSORS)
        )
        less = torch.full((1,), -1.0, device=HOME)
        for one in self.model:
            one.grad = less.expand(number)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=1.0, foreach=False)

    @property
    def size(self) -> int:
        return sum(one.nbytes for one in self.model)

    def equals(self, step: int) -> bool:
        """Whether all bits are those of this step."""
        pairs = ((one, tensor(i, self.number, step)) for i, one in enumerate(self.model))
        return all(torch.equal(one.detach(), wanted) for one, wanted in pairs)


def snapshot(size: str, folder: str, source: str) -> None:
    """Take snapshots of a state of `size` GiB, die, and restore it. `source`: where the restore
    must come from, memory (in the second life) or storage."""
    from elasticrun.training import Checkpointer

    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    is_first = source == "memory" and LIFE == 0
    title, number = f"{size} GiB", gib(float(size)) // 4 // TENSORS
    state = State(number, is_filled=is_first)
    wait_for_device()
    saver = Checkpointer(
        folder, every_steps=1, persist_every_seconds=None, on_busy="wait", slots=2,
        model=state.model, optim=state.optim,
    )  # fmt: skip
    began = time.monotonic()
    step = saver.restore()
    wait_for_device()
    took = time.monotonic() - began
    report("restored")
    if not is_first:
        equal, found = state.equals(step), saver.stats.source
        good = equal and step > 0 and found == source
        note = f"step {step}; bits are equal: {equal}"
        emit(f"{title}: restore from {found or 'nothing'}", took, "s", note, good)
    if source == "memory":
        step = save_some(title, saver, state, step, 1 if LIFE else SAVES)
        if is_first:
            with trying(f"{title}: dcp.async_save"):
                async_save(title, state)
            with trying(f"{title}: overlapped"):
                save_beside(title, saver, state, step)
            report("dead")
            os.kill(os.getpid(), signal.SIGKILL)
        if float(size) <= 1:
            emit(f"{title}: save_now", saver.save_now(step), "", saver.stats.error)
    saver.close()
    dist.destroy_process_group()


def save_some(title: str, saver: Any, state: State, step: int, times: int) -> int:
    """Change the state and take a snapshot this many times. Returns the last step."""
    stalls, before = [], saver.stats.snapshots
    for _ in range(times):
        step += 1
        state.optim.step()
        wait_for_device()
        began = time.monotonic()
        saver.step(step)
        stalls.append(time.monotonic() - began)
        time.sleep(0.3)
    taken = saver.stats.snapshots - before
    which = "first step() after the restart" if LIFE else "first step()"
    emit(f"{title}: {which}", stalls[0], "s", saver.stats.error, taken == times)
    if times > 1:
        middle = sorted(stalls[1:])[len(stalls[1:]) // 2]
        rate = in_gib(state.size) / middle
        median(f"{title}: step(), the next ones", stalls[1:], "s", f"{rate:.3g} GiB/s")
    return step


def save_beside(title: str, saver: Any, state: State, step: int) -> None:
    """The same with copies that overlap what the device does next, which changes the state. The
    newest is what the next life must restore."""
    taker = saver._backend._taker
    taker._overlap = True
    stalls, copied, failed = [], [], saver.stats.failed
    for _ in range(SAVES):
        step += 1
        state.optim.step()
        began = time.monotonic()
        saver.step(step)
        stalls.append(time.monotonic() - began)
        state.optim.step()  # must wait for the copies, on the device
        wait_for_device()
        taker._settle(60)
        copied.append(taker.copy_seconds)
        for one in state.model:
            one.detach().sub_(1)
        wait_for_device()
    good = saver.stats.failed == failed
    median(f"{title}: step(), overlapped", stalls, "s", f"step {step} is the last one")
    median(f"{title}: the copies of these", copied)
    emit(f"{title}: overlapped snapshots failed", saver.stats.error, ok=good)


def async_save(title: str, state: State) -> None:
    """torch's own way, into shared memory."""
    from torch.distributed.checkpoint.state_dict_saver import async_save as save

    base = os.environ.get("ELASTICRUN_SHM_DIR", "/dev/shm")
    free = shutil.disk_usage(base).free, psutil.virtual_memory().available
    if free[0] < 1.2 * state.size or free[1] < 2.2 * state.size:  # its copy, and its files
        return emit(f"{title}: dcp.async_save", None, "", "left out: too little memory is free")
    took, target = [], f"{base}/dcp"
    try:
        for _ in range(2):
            shutil.rmtree(target, ignore_errors=True)
            began = time.monotonic()
            future: Any = save({"state": state.model.state_dict()}, checkpoint_id=target)
            took.append(time.monotonic() - began)
            future.result()
    finally:
        shutil.rmtree(target, ignore_errors=True)
    return emit(f"{title}: dcp.async_save to {base}, stall", took[1], "s", f"first {took[0]:.3g} s")


def train(folder: str) -> None:
    from benchmarks.gpu import overlap

    overlap.run(folder)


def corrupt(folder: str) -> None:
    """Replicas on the device. When the file `flip` is there, rank 1 flips a bit; with `die`, rank 0
    dies, and all compare what they have restored; with `leave`, they end."""
    from elasticrun.training import Checkpointer

    dist.init_process_group("gloo")
    state = {f"t{i}": tensor(i, gib(0.25) // 4 // TENSORS).int() for i in range(TENSORS)}
    saver = Checkpointer(
        Path(folder, "ckpt"), every_steps=1, persist_every_seconds=None, state=state
    )
    step = saver.restore()
    if LIFE:
        mine = state["t40"].cpu()
        others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(others, mine)
        equal = all(torch.equal(mine, other) for other in others)
        emit(f"rank {RANK} has restored what its replicas have", equal, "", f"step {step}", equal)
        report("restored")
    flag = torch.zeros(1)
    while not flag.item():
        for one in state.values():
            one.add_(1)
        step += 1
        if RANK == 1 and Path(folder, "flip").exists():
            Path(folder, "flip").unlink()
            state["t40"][7:8].bitwise_xor_(1 << 20)
            report("flipped")
        saver.step(step)
        if RANK == 0 and not LIFE and Path(folder, "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
        flag.fill_(float(Path(folder, "leave").exists()))
        dist.all_reduce(flag)
    saver.close()
    dist.destroy_process_group()


MODES: Final = {
    one.__name__: one
    for one in (die, touch, work, hang, recorder, recover, snapshot, corrupt, train)
}

if __name__ == "__main__":
    MODES[sys.argv[1]](*sys.argv[2:])
