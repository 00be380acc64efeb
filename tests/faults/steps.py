"""The step logs of a job, and what must be true of them whatever happened to it.

A *world* is the set of ranks that computed together: they wrote the same number, which their rank
0 drew (tests/scripts/stepper.py). The rules are checked on what the ranks did and at what time by
the host's monotonic clock, not on the rounds that anybody believed in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from inotify_simple import INotify, flags

from elasticrun.testing import steps as testing
from tests.harness import LIMIT

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """One step of one rank."""

    world: int
    rank: int
    size: int
    step: int
    began: float
    done: float
    pid: int
    group_rank: int
    restart: int
    store: str
    node: str


@dataclass
class Life:
    """What one world did, from its first step to its last."""

    world: int
    steps: list[Step] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.steps[0].size

    @property
    def restart(self) -> int:
        """Restarts charged to the job before it, as its ranks were told."""
        return self.steps[0].restart

    @property
    def first(self) -> float:
        """When its first step was done."""
        return min(step.done for step in self.steps)

    @property
    def last_step(self) -> int:
        return max(step.step for step in self.steps)

    @property
    def pids(self) -> dict[int, int]:
        """Process by rank."""
        return {step.rank: step.pid for step in self.steps}

    def pid_of(self, node: str) -> int:
        """The first rank of this node. Which rank it has depends on who joined first."""
        return next(step.pid for step in self.steps if step.node == node)

    @property
    def nodes(self) -> dict[int, str]:
        """Node id by group rank, where the test gave ids."""
        return {step.group_rank: step.node for step in self.steps}

    def whole_steps(self) -> set[int]:
        """The steps that every rank of it has written down."""
        ranks: dict[int, set[int]] = {}
        for step in self.steps:
            ranks.setdefault(step.step, set()).add(step.rank)
        return {step for step, who in ranks.items() if who == set(range(self.size))}


class StepLog:
    """All lines so far, read as they come."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lives: dict[int, Life] = {}
        self._read: dict[Path, int] = {}

    def lives(self) -> list[Life]:
        """Every world, in the order of their first steps."""
        for path in self.folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                step = Step(**json.loads(line))
                self._lives.setdefault(step.world, Life(step.world)).steps.append(step)
        return sorted(self._lives.values(), key=lambda life: life.first)

    @property
    def last(self) -> Life:
        """The youngest world."""
        return self.lives()[-1]

    def until(self, found: Callable[[], T | None], what: str, limit: float = LIMIT) -> T:
        """Wait (inotify) until `found()` gives something, and return it."""
        end = time.monotonic() + limit
        with INotify() as watcher:
            watcher.add_watch(self.folder, flags.CREATE | flags.MODIFY)
            while True:
                result = found()
                if result:
                    return result
                rest = end - time.monotonic()
                assert rest > 0, f"no {what} within {limit:g} s; {self.story()}"
                watcher.read(timeout=int(rest * 1000) + 1, read_delay=20)

    def world_of(self, size: int, *, after: Life | None = None, limit: float = LIMIT) -> Life:
        """Wait for a world of `size` ranks, younger than `after`, that has done a whole step."""

        def found() -> Life | None:
            for life in reversed(self.lives()):
                if after is not None and life.first <= after.first:
                    return None
                if life.size == size and life.whole_steps():
                    return life
            return None

        return self.until(found, f"world of {size} ranks", limit)

    def next_world(self, after: Life) -> Life:
        """Wait for a world of any size younger than `after` that has done a whole step."""

        def found() -> Life | None:
            last = self.last
            return last if last.first > after.first and last.whole_steps() else None

        return self.until(found, "next world")

    def goes_on(self, life: Life, steps: int = 5, limit: float = LIMIT) -> None:
        """Wait until this very world has done `steps` whole steps more than now."""
        self.lives()
        wanted = max(life.whole_steps(), default=0) + steps

        def found() -> bool:
            self.lives()
            return max(life.whole_steps(), default=0) >= wanted

        self.until(found, f"further {steps} steps of the world of {life.size}", limit)

    def stop(self) -> None:
        """Have the script end at the next step."""
        (self.folder / "stop").touch()

    # ------------------------------------------------------------ what must be true

    def check(self, *, stopped: Collection[int] | None = ()) -> list[Life]:
        """The invariants of every fault; all worlds there were. `stopped`: pids that were held up;
        None: any may have been. See `one_world_at_a_time` and `every_step_whole`."""
        lives = self.lives()
        self.one_world_at_a_time(stopped=stopped)
        self.every_step_whole()
        return lives

    def one_world_at_a_time(self, *, stopped: Collection[int] | None = ()) -> None:
        """After the first step of a world no rank of an earlier one completes a step.

        A rank that was stopped between the end of an all-reduce and its line in the log writes
        that line when it is woken. It may do so once, for a step that the others of its world had
        done before the next world began: all-reduces complete for everybody or for nobody."""
        found = [
            testing.Step(
                rank=step.rank,
                step=step.step,
                world_size=step.size,
                round=number,
                world=str(step.world),
                pid=step.pid,
                time=step.done,
            )
            for number, life in enumerate(self.lives())
            for step in life.steps
        ]
        wrong = testing.overlap(found, stopped)
        assert not wrong, f"{wrong}; {self.story()}"

    def every_step_whole(self) -> None:
        """Every step from the first to the last was done by all ranks of one world."""
        lives = self.lives()
        done = set().union(*(life.whole_steps() for life in lives))
        last = max((life.last_step for life in lives), default=0)
        missing = set(range(1, last)) - done
        assert not missing, (
            f"steps {sorted(missing)[:10]} were done by no whole world; {self.story()}"
        )

    def story(self) -> str:
        """The worlds in a few words, for a failing assertion."""
        lives = self.lives()
        start = lives[0].first if lives else 0.0
        return (
            "; ".join(
                f"world of {life.size} from {life.first - start:.2f} s, steps "
                f"{min(s.step for s in life.steps)}-{life.last_step}, restart {life.restart}"
                for life in lives
            )
            or "no step was done"
        )
