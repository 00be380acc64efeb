"""Jobs that count their steps, for tests that do harm to them with `elasticrun.testing`.

What a fault did is read from what the ranks did (`job.worlds()`), never from the words of agents or
master alone.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from elasticrun.testing.job import ElasticJob
from elasticrun.testing.steps import World, describe_worlds
from tests.harness import SCRIPTS, await_true


def times(**seconds: float) -> str:
    """--rdzv-conf with these times. Nobody is given up for the silence of a minute where no other
    `heartbeat_timeout` is told: on a busy machine that is a node which stands still for a while."""
    told = {"heartbeat_timeout": 60.0, **seconds}
    return "--rdzv-conf=" + ",".join(f"{name}={value:g}" for name, value in told.items())


QUICK = times(last_call_timeout=1, heartbeat_timeout=10)
"""For tests in which a node falls silent and is given up: as soon as may be, and no sooner, since
any other node may stand still meanwhile for no reason but a busy machine."""


class Counting:
    """The job of one test; its nodes are numbered in the order of their starts."""

    job: ElasticJob

    def __init__(self, elastic_job: Any, folder: Path) -> None:
        self._start = elastic_job
        self._folder = folder
        self._first: World | None = None

    def start(self, nnodes: str, *options: str, **more: Any) -> ElasticJob:
        """Start the job; `more` as for `elastic_job`. Its times are those of `times` where no
        option gives others."""
        words = {"nnodes": nnodes, "options": (times(), *options), **more}
        self.job = self._start(str(SCRIPTS / "counts.py"), self._folder, **words)
        return self.job

    def first(self, world_size: int) -> World:
        """Wait for the world with which the test begins. On a busy machine some nodes may have
        begun without the others: that is not this world, and `finish` leaves it out."""
        self._first = self.job.wait_for_world(world_size)
        return self._first

    def place(self, name: str) -> Path:
        return self._folder / name

    @property
    def endpoint(self) -> str:
        words = (word.partition("=") for word in self.job.nodes[0].command)
        return next(value for flag, _, value in words if flag == "--rdzv-endpoint")

    def let_fail(self) -> None:
        """Ranks that were told to fail later ($COUNTS_FAILS_LATER) do so from now on."""
        (self._folder / "fails").touch()

    def goes_on(self, world: World, steps: int = 5) -> None:
        """Wait until this very world has done so many more steps than now, and no other began."""
        last = next(w.last for w in self.job.worlds() if w.round == world.round)
        self.job.wait_for_world(round=world.round, step=last + steps)
        assert self.job.worlds()[-1].round == world.round, describe_worlds(self.job.worlds())

    def finish(self, *codes: int) -> list[World]:
        """Let the script end: every node that the test has not killed ends with 0, or the nodes end
        with these exit codes, in the order of their starts. The worlds, as `check` has them."""
        (self._folder / "stop").touch()
        result = self.job.result()
        assert result.exit_codes == codes if codes else result.ok, result.outcomes
        return self.check()

    def check(self) -> list[World]:
        """The invariants of every fault: one world at a time, no step missing; the worlds from the
        one with which the test began to the last."""
        self.job.one_world()
        self.job.no_gap()
        began = 0.0 if self._first is None else self._first.began
        return [world for world in self.job.worlds() if world.began >= began]

    def adds_up(self) -> list[dict[str, Any]]:
        """Every second of every slot is in the job's ledger once, as it was at the end: its
        rows."""
        await_true(self._results, "result.json")
        spent = json.loads(self._results()[-1].read_text())["goodput"]
        micros = [round(1e6 * row["seconds"]) for row in spent["rows"]]
        assert sum(micros) == round(1e6 * spent["slot_seconds"]) > 0, spent
        assert min(micros) > 0, spent
        rows: list[dict[str, Any]] = spent["rows"]
        return rows

    def said(self, *numbers: int) -> str:
        """What these nodes have said so far; all of them and the master by hand where none is
        named."""
        nodes = [self.job.nodes[number] for number in numbers] or [*self.job.nodes]
        by_hand = [] if numbers or self.job.master_node is None else [self.job.master_node]
        return "\n".join(node.output() for node in (*nodes, *by_hand))

    def _results(self) -> list[Path]:
        found = (folder / "result.json" for folder in self.job.run_folders)
        return [path for path in found if path.exists()]

    def close(self) -> None:
        """End the job before the fixture does, so that what it left can be seen."""
        ended = all(node.exit_code == 0 for node in self.job.nodes)
        left = [*self.job.memory.iterdir()] if ended else []
        complaint = self.job.close()
        assert not complaint, complaint
        assert not left, f"left in shared memory: {left}"


def rank_on(world: World, number: int) -> int:
    """The rank on this node, one each."""
    return next(rank for rank, node in world.nodes.items() if node == number)


def keeps_ranks(before: World, after: World) -> bool:
    """Whether every node that is in both worlds has the same group rank in both, where the later
    one has that rank at all."""
    places = {node: rank for rank, node in before.nodes.items() if rank < len(after.nodes)}
    return all(places.get(node, rank) == rank for rank, node in after.nodes.items())


def let_pass(seconds: float) -> None:
    """Nothing but time: for schedules of harm and for how long it lasts, never for an event."""
    time.sleep(max(0.0, seconds))  # the moment is what is tested
