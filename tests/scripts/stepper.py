"""A training script that counts its steps: one all-reduce each, written down by every rank.

Rank 0 draws a number for each life of the world and all ranks learn it by the first all-reduce, so
the lines of those that really computed together carry the same number, whatever the launcher
believes. A line is written after the all-reduce of its step; the checkpoint of a step only after
that of the next one, when every rank has written its line. It ends when the file `stop` is there.

$STEPS_FOLDER: one file of lines a process, `checkpoint`, `stop`. $STEPS_PAUSE: seconds between two
steps. $STEPS_FAIL_ON: group ranks or node ids whose ranks die right after their first step.

Orders, obeyed between two steps: exit(code) · die(signum) · ignore(signum) ·
slow(seconds, until) · chat
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from stage import Stage  # isort: skip

FOLDER = Path(os.environ["STEPS_FOLDER"])
PAUSE = float(os.environ.get("STEPS_PAUSE", "0.02"))
FAILING = set(filter(None, os.environ.get("STEPS_FAIL_ON", "").split(",")))


class Stepper:
    """One rank of one life."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.stage = Stage(script="stepper", node=os.environ.get("STEPS_NODE", ""))
        self.orders: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self.chatty = False
        self.slow = False
        threading.Thread(target=self._listen, daemon=True).start()
        name = f"{time.monotonic_ns()}-{os.getpid()}.jsonl"
        self.log = os.open(FOLDER / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _listen(self) -> None:
        for order in self.stage.orders():
            self.orders.put(order)

    def run(self) -> None:
        """Steps until `stop`; returns at the same step on every rank."""
        dist.init_process_group("gloo")
        step, world = self._agree()
        while True:
            began = time.monotonic()
            word = torch.tensor([1, int((FOLDER / "stop").exists())])
            self._all_reduce(word)
            done = time.monotonic()
            assert int(word[0]) == self.size
            step += 1
            self._write(world, step, began, done)
            if self.rank == 0:
                self._checkpoint(step - 1)
            if FAILING & {os.environ["GROUP_RANK"], os.environ.get("STEPS_NODE", "")}:
                os._exit(13)
            if int(word[1]):
                break
            self._obey()
            time.sleep(PAUSE)
        dist.barrier()
        if self.rank == 0:
            self._checkpoint(step)
        dist.destroy_process_group()

    def _all_reduce(self, word: torch.Tensor) -> None:
        try:
            dist.all_reduce(word)
        except RuntimeError:
            while self.slow:  # a peer has gone; this one ends when it is told to, and not before
                signal.pause()
            raise

    def _agree(self) -> tuple[int, int]:
        """The step to go on from, and this life's number."""
        word = torch.zeros(2, dtype=torch.int64)
        if self.rank == 0:
            saved = FOLDER / "checkpoint"
            word[0] = int(saved.read_text()) if saved.exists() else 0
            word[1] = random.SystemRandom().getrandbits(62)
        dist.all_reduce(word)
        return int(word[0]), int(word[1])

    def _write(self, world: int, step: int, began: float, done: float) -> None:
        line = {
            "world": world,
            "rank": self.rank,
            "size": self.size,
            "step": step,
            "began": began,
            "done": done,
            "pid": os.getpid(),
            "group_rank": int(os.environ["GROUP_RANK"]),
            "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            "store": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            "node": os.environ.get("STEPS_NODE", ""),
        }
        os.write(self.log, json.dumps(line).encode() + b"\n")
        if self.chatty:
            print(f"rank {self.rank} step {step} " + "x" * 2000, flush=True)

    @staticmethod
    def _checkpoint(step: int) -> None:
        fresh = FOLDER / "checkpoint.new"
        fresh.write_text(str(step))
        fresh.rename(FOLDER / "checkpoint")

    def _obey(self) -> None:
        while not self.orders.empty():
            order = self.orders.get()
            do = order.pop("do")
            getattr(self, f"do_{do}")(**order)
            self.stage.say("done", what=do)

    def do_exit(self, code: int = 0) -> None:
        os._exit(code) if code else sys.exit(0)

    def do_die(self, signum: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), signum)

    def do_ignore(self, signum: int = signal.SIGTERM) -> None:
        signal.signal(signum, signal.SIG_IGN)

    def do_slow(self, seconds: float, until: str = "") -> None:
        """Need so long to end when told to (SIGTERM), and until there is such a file."""

        def late(*_: object) -> None:
            time.sleep(seconds)
            while until and not Path(until).exists():
                time.sleep(0.02)
            os._exit(0)

        signal.signal(signal.SIGTERM, late)
        self.slow = True

    def do_chat(self) -> None:
        self.chatty = True


if __name__ == "__main__":
    Stepper().run()
