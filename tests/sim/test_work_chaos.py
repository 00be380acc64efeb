"""Work that is handed out, in scripts, and in a world in which all goes wrong: what must hold
stands in `workers`. `python -m tests.sim.test_work_chaos` writes the traces of the scripts
again."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from elasticrun.core.work.spans import Spans
from elasticrun.core.work.work import Taker
from elasticrun.training.work import Spec
from tests.further import cases, fresh_seeds, further
from tests.sim.workers import Uses, dataset
from tests.simulator.chaos import Findings
from tests.simulator.script import Script, difference, read, run
from tests.simulator.training import TrainingChaos
from tests.simulator.world import World

SEEDS = 30
FRESH_SEEDS = 500
BATCH = 10
TURN = 0.2
"""Seconds in which a rank uses up to five samples."""


class WorkChaos(TrainingChaos):
    def __init__(self, seed: int, *, duration: float = 60.0) -> None:
        super().__init__(seed, duration=duration)
        rng = self.rng
        self.world.shelves.forgets = True
        sizes = (rng.choice([100, 300]), rng.choice([1, 7, 64]), rng.choice([1, 2]))
        spec = Spec("train", *sizes, shuffle=rng.choice([-1, 7]))
        self.uses = self.world.uses = Uses(spec, rng, restores=seed % 5 != 0)

    def run(self) -> Findings:
        self.world.clock.after(TURN, self._work)
        findings = super().run()
        self.uses.settle([name for name in self.world.worlds.stepping if self.world.over is None])
        return replace(findings, faults=(*findings.faults, *self.uses.faults))

    def _work(self) -> None:
        if self.world.over is None:
            self.world.clock.after(TURN, self._work)
        for name in tuple(self.world.worlds.stepping):
            for node in self.world.nodes.values():
                if node.alive and any(one.round == name for one in node.ranks.values()):
                    assert node.memory.work is not None
                    node.memory.work.use(self.rng.choice([0, 1, 2, 5]), [])

    def _train(self) -> None:
        for name in self.world.worlds.stepping:  # from storage too, steps go on
            if (key := self.uses.sources[name][1]) is not None:
                self.steps.setdefault(name, key[1])
        if self.uses.restores:
            super()._train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "count"),
    cases([(0, 3), *product(range(0, SEEDS, BATCH), [BATCH])], kept=[(0, 3)], several=True),
)
def test_invariants_hold(first: int, count: int) -> None:
    finished = restores = 0
    for seed in range(first, first + count):
        chaos = WorkChaos(seed)
        findings = chaos.run()
        assert not findings.faults, (seed, findings.faults[:5], findings.lines[-40:])
        finished += chaos.uses.finished
        restores += sum(one[0] != "nothing" for one in chaos.uses.sources.values())
    assert finished, "all work was done"
    assert restores > count, "ranks have resumed with work"


SCRIPTS = sorted((Path(__file__).parent / "work").glob("*.txt"))


def play(script: Script) -> World:
    """`world work=20,4,1` in a script is its dataset; with `world restores=0` the ranks have no
    Checkpointer."""
    spec, restores = dataset(script.world["work"]), script.world.get("restores") != "0"

    def plug(world: World) -> None:
        world.uses = Uses(spec, random.Random(0), restores)

    return run(script, plug)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    script = read(path.read_text())
    assert not (found := difference(script, play(script).lines)), found


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (Taker, "counts_at", lambda taker, step, share: 0),
        (Spans, "gaps", lambda spans, upto: [(0, upto)]),
    ],
)
def test_what_must_hold_can_fail(
    owner: object, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    assert [fault for path in SCRIPTS for fault in play(read(path.read_text())).worlds.faults]


@pytest.mark.slow
@further("test_invariants_hold")
@pytest.mark.parametrize("first", fresh_seeds(FRESH_SEEDS, 100))
def test_invariants_hold_for_fresh_seeds(first: int) -> None:
    for seed in range(first, first + 100):
        findings = WorkChaos(seed, duration=120.0).run()
        assert not findings.faults, (seed, findings.faults[:5], findings.lines[-40:])


if __name__ == "__main__":
    for name in sys.argv[1:] or map(str, SCRIPTS):
        text = read(Path(name).read_text())
        Path(name).write_text("\n".join([text.commands, "---", *play(text).lines]) + "\n")
