"""A rank with a large state that takes a snapshot every step, and is killed after some steps.

argv: GiB of state, number of tensors, samples of each kind, lives. Every life but the last ends by
SIGKILL; the next one must continue at the step after the last snapshot. All durations go to
$BENCH_STEPS/figures, one line of JSON each. Reported as events: `script`, `imported`, `made`,
`restored` and `again` (the first training step), and `dies`.

In the first life, snapshots alternate with copies of the same bytes into warm shared memory. In
lives with odd numbers the state is filled before it is restored, as in a model that initializes
itself: there only the restore is measured. In the others its memory was never touched, and the
times between the events are the parts of the time from the death to the first training step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from report import report

report("script")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from state import Shared, State, timed  # noqa: E402

from elasticrun.training import Checkpointer  # noqa: E402

report("imported")

PAUSE = 0.5
"""Seconds between two snapshots: a training step, in which the saver hashes the last one."""

LIFE = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def write_figure(name: str, seconds: float) -> None:
    """Append one sample to $BENCH_STEPS/figures."""
    line = json.dumps({"name": name, "life": LIFE, "seconds": seconds}) + "\n"
    with (Path(os.environ["BENCH_STEPS"]) / "figures").open("a") as file:
        file.write(line)


def train(state: State, step: int) -> None:
    """Train for one step: change the state, and call a collective."""
    with torch.no_grad():
        state.weights[0].fill_(float(step))
    dist.all_reduce(torch.ones(1))


def step_of(state: State) -> int:
    """The step at which `train` last changed the state."""
    return int(state.weights[0][-1].item())


def main() -> None:
    """Train, save, die; the last life succeeds."""
    gib, count, samples, lives = float(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = State(gib, count)
    folder = os.path.join(os.environ["BENCH_STEPS"], "checkpoints")
    touched = LIFE % 2 == 1
    if touched:
        state.fill(0.0)
    report("made")
    checkpointer = Checkpointer(folder, model=state, every_steps=1, on_busy="wait")
    began = time.perf_counter()
    start = checkpointer.restore()
    restored = time.perf_counter() - began
    report("restored")
    if LIFE == 0:
        state.fill(0.0)
    else:
        write_figure("restore" if touched else "restore, untouched", restored)
        assert step_of(state) == start > 0, (
            f"restored step {start}, but the state is of {step_of(state)}"
        )
    step = start + 1
    train(state, step)
    report("again")
    name = "first" if LIFE == 0 else "first after restart"
    stall = timed(lambda: checkpointer.step(step))
    write_figure(name if checkpointer.stats.snapshots else f"{name}: skipped", stall)
    tensors = state.tensors()
    shared = Shared(tensors) if LIFE == 0 else None
    for _ in range(samples if shared else 2):
        time.sleep(PAUSE)
        if shared:
            write_figure("memcpy", timed(lambda: shared.take(tensors)))
            write_figure("memcpy back", timed(lambda: shared.give(tensors)))
        step += 1
        train(state, step)
        before = checkpointer.stats.snapshots
        stall = timed(lambda step=step: checkpointer.step(step))
        write_figure("stall" if checkpointer.stats.snapshots > before else "skipped", stall)
    if lives - 1 > LIFE:
        write_figure("last step", float(step))
        report("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
