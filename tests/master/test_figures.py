"""What the status shows beside the brain's picture."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from elasticrun.master.loop import Figures
from elasticrun.wire.messages import Holding, Holdings, Steps
from tests.master.people import ROUND, status


def test_the_step_its_age_and_the_jobs() -> None:
    now = 100.0
    figures = Figures(lambda: now)
    assert figures.shown(status()).step == -1
    report = Steps(ROUND, 40, 5, 0.1, 0.0, 0.0)
    figures.heard(report)
    now = 103.0
    figures.heard(report)  # the same step again is no news
    page = figures.shown(status())
    assert (page.step, page.step_age, page.age) == (40, 3.0, 3.0)
    again = replace(ROUND, number=2)
    figures.started(again)
    figures.heard(structs.replace(report, step=50))  # of a round that is over
    assert figures.shown(status()).step == 40
    figures.heard(structs.replace(report, round=again, step=30))  # it has gone back to a snapshot
    page = figures.shown(status())
    assert (page.step, page.step_age) == (30, 0.0)


def test_a_snapshot_in_memory_tells_the_step_too() -> None:
    figures = Figures(lambda: 0.0)
    figures.started(ROUND, nodes=2)
    assert figures.nodes == 2
    old = Holding(replace(ROUND, number=9), 90, 0, 2, (1, 1), wanted=False)
    held = tuple(structs.replace(old, round=ROUND, step=step) for step in (20, 30))
    figures.heard(Holdings(None, (old, *held)))
    assert figures.shown(status()).step == 30
