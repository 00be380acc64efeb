"""Jobs of `steady.py`, one after the other in the same folder: what they tell of their lives, and
whether what they have left in storage is right to the bit.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.snapshots.conftest import Training, saver
from tests.snapshots.steady import JOB, common, mark, sharded

STEADY = Path(__file__).with_name("steady.py")
WORLD = 2

STEPS_BEFORE = 5
"""Of a life, before something is done to it: all slots were written."""


@dataclass
class Life:
    """One life of one rank, out of its log."""

    number: int
    start: int
    source: str
    of: int  # the life that had made what was restored
    pid: int
    begun: int = -1  # the newest step whose snapshot it began
    done: int = -1


def lives(out: Path, rank: int) -> list[Life]:
    file = out / f"rank-{rank}.log"
    found: list[Life] = []
    for line in file.read_text().splitlines() if file.exists() else ():
        word, *rest = line.split()
        assert word != "torn", line
        if word == "start":
            number, start, source, of, pid = rest
            found.append(Life(int(number), int(start), source, int(of), int(pid)))
        elif word == "b":
            found[-1].begun = int(rest[0])
        else:
            found[-1].done = int(rest[0])
    return found


class Steadily:
    """See the module's head. `mib`: of the share of one rank; a copy of 16 takes milliseconds."""

    def __init__(self, training: Training, *, mib: int = 16, keep: int = 3) -> None:
        self.training = training
        self._mib, self._keep = mib, keep
        self._until = training.out / "until"
        self._number = 0

    # ------------------------------------------------------------ jobs

    def begin(self) -> None:
        """A job; it goes on from the newest checkpoint with a marker, if there is one."""
        training = self.training
        stored = training.checkpoints()
        self._number += 1
        training.start(
            *("--until", self._until, "--job", str(self._number)),
            *("--mib", str(self._mib), "--keep", str(self._keep)),
            script=STEADY,
            max_restarts=1_000_000,
            options=["--restart-backoff=0"],
        )
        self._await_life(self._number * JOB)
        for life in self.present():
            source = ("storage", stored[-1]) if stored else ("nothing", 0)
            assert (life.source, life.start) == source

    def end(self) -> None:
        """Let the ranks end by themselves, all at the same step."""
        ranks = [psutil.Process(life.pid) for life in self.present()]
        for rank in ranks:  # or one might be past that step before it is written down
            freeze(self.training, rank)
        fresh = self._until.with_suffix(".new")
        fresh.write_text(str(max(life.begun for life in self.present()) + 20))
        fresh.rename(self._until)
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
        self.training.finish()
        self.look_at_storage()

    # ------------------------------------------------------------ lives

    def present(self) -> list[Life]:
        """The newest life of each rank."""
        return [lives(self.training.out, rank)[-1] for rank in range(WORLD)]

    def _await_life(self, number: int) -> None:
        """Wait until every rank is in this life, or a later one."""

        def there() -> bool:
            every = [lives(self.training.out, rank) for rank in range(WORLD)]
            return all(of and of[-1].number >= number for of in every)

        self.training.until(there, f"life {number} of every rank")

    def trains(self) -> list[Life]:
        """Wait until the newest life has trained for a while; that life, rank by rank."""

        def under_way() -> bool:
            found = self.present()
            same = len({life.number for life in found}) == 1
            return same and all(life.done >= life.start + STEPS_BEFORE for life in found)

        self.training.until(under_way, "five steps of a life")
        return self.present()

    def goes_on(self, before: list[Life]) -> None:
        """Wait for the life after `before`, which was looked at before anything was done to it: it
        has the newest step that all ranks had."""
        over = max(life.number for life in before)
        self._await_life(over + 1)
        every = [lives(self.training.out, rank) for rank in range(WORLD)]
        last = [next(life for life in of if life.number == over) for of in every]
        found = self.present()
        for life in found:
            assert (life.source, life.of) == ("memory", over)
            assert min(a.done for a in last) <= life.start <= min(a.begun for a in last)
        assert len({life.start for life in found}) == 1

    # ------------------------------------------------------------ the saver, and what it writes

    def stage(self) -> str:
        """How far a frozen saver has come with the newest checkpoint."""
        newest = max(self.training.ckpt.glob("step-*"))
        names = {path.name for path in newest.iterdir()}
        if ".metadata" in names:
            return "saver after the marker"
        if any(name.startswith((".metadata", "elasticrun.json")) for name in names):
            return "saver between manifest and marker"
        return "saver in mid-persist"

    def freeze_in_mid_persist(self) -> psutil.Process:
        """The saver, stopped while it writes a part. On a busy machine this process must not be
        later than the end of the part: the saver has a lower priority meanwhile."""
        for _ in range(50):
            process = saver(self.training.job)
            for thread in process.threads():
                os.setpriority(os.PRIO_PROCESS, thread.id, 19)
            self.await_begin()
            freeze(self.training, process)
            if self.stage() == "saver in mid-persist":
                return process
            process.send_signal(signal.SIGCONT)
        raise AssertionError("it was never met while it wrote")

    def await_begin(self) -> None:
        """Wait until one more checkpoint is begun."""
        ckpt = self.training.ckpt
        known = set(ckpt.glob("step-*"))
        self.training.until(lambda: set(ckpt.glob("step-*")) - known, "checkpoint that is begun")

    def await_checkpoint(self, above: int) -> None:
        """Wait until a checkpoint of a later step is committed."""
        self.training.until(
            lambda: max(self.training.checkpoints(), default=-1) > above, f"step above {above}"
        )

    def look_at_storage(self) -> None:
        """Plain torch reads what has a marker, to the bit, and nothing else. Nobody may write."""
        for path in self.training.ckpt.glob("step-*"):
            if (path / ".metadata").exists():
                self.check(path)
            else:
                with pytest.raises(OSError):
                    dcp.FileSystemReader(path).read_metadata()

    def check(self, path: Path) -> None:
        """A checkpoint is that of one life and its step."""
        step = int(re.sub(r"\D", "", path.name))
        bases = {"share": sharded(self._mib, WORLD), "same": common(self._mib)}
        state: dict[str, Any] = {name: torch.empty_like(base) for name, base in bases.items()}
        state["name"] = {"life": -1, "step": -1}
        own = {f"__rank{rank}": {"own": {"life": -1, "step": -1}} for rank in range(WORLD)}
        dcp.load({"state": state, **own}, checkpoint_id=path, no_dist=True)
        life = state["name"]["life"]
        assert state["name"] == {"life": life, "step": step}
        assert all(one["own"] == state["name"] for one in own.values())
        for name, base in bases.items():
            assert torch.equal(state[name], base + mark(life, step)), f"{path}: {name}"


def freeze(training: Training, process: psutil.Process) -> None:
    """Stop a process where it stands."""
    process.send_signal(signal.SIGSTOP)
    training.until(lambda: process.status() == psutil.STATUS_STOPPED, "stop")
