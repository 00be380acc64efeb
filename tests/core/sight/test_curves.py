"""The curves of a training: few points however long it takes, and none of them wrong."""

from __future__ import annotations

from elasticrun.core.sight.curves import LONGEST, MAX_BUCKETS, MAX_CURVES, Curves
from elasticrun.core.sight.picture import TrainingRow

DAY = 86_400.0


def row(curves: Curves, now: float) -> TrainingRow:
    found = curves.row(now)
    assert found is not None
    return found


def values(found: TrainingRow, name: str) -> tuple[float | None, ...]:
    return next(curve.values for curve in found.curves if curve.name == name)


def test_nothing_was_reported() -> None:
    assert Curves().row(5.0) is None


def test_each_second_has_its_mean_and_the_time_of_a_step() -> None:
    curves = Curves()
    for step in range(12):
        curves.add(100.0 + step / 4, 1, step, {"loss": str(10 - step), "total": "20"})
    found = row(curves, 104.0)
    assert found.ages == (4.0, 3.0, 2.0)
    assert found.steps == (3, 7, 11)
    assert values(found, "loss") == (8.5, 4.5, 0.5)
    assert values(found, "step") == (0.25, 0.25, 0.25)
    assert (found.total, found.left) == (20, 2.25)


def test_the_second_that_is_not_over_is_left_out() -> None:
    """Otherwise each picture would change it."""
    curves = Curves()
    for step in range(10):
        curves.add(step / 4, 1, step, {"loss": "1"})
    assert row(curves, 2.3).steps == (3, 7)
    first = Curves()
    first.add(7.5, 1, 0, {"loss": "1"})
    assert row(first, 7.6).steps == (0,)  # but for the first one


def test_a_restart_is_no_long_step_and_repeated_steps_count_again() -> None:
    curves = Curves()
    for round_number, begin in ((1, 0.0), (2, 60.0)):
        for step in range(8):
            curves.add(begin + step / 4, round_number, step, {})
    found = row(curves, 70.0)
    assert values(found, "step") == (0.25,) * 4
    assert found.steps == (3, 7, 3, 7)
    assert found.left == -1.0  # the script has not told its last step


def test_less_exact_reports_are_ignored_beside_those_of_rank_0() -> None:
    curves = Curves()
    for step in range(8):
        curves.add(step / 4, 1, step, {"loss": "1"})
        curves.add(step / 4 + 0.2, 1, step + 1, {})
    assert values(row(curves, 9.0), "step") == (0.25, 0.25)


def test_a_day_takes_as_many_points_as_an_hour() -> None:
    curves = Curves()
    for step in range(int(3 * DAY / 20)):
        curves.add(20.0 * step, 1, step, {"loss": str(step)})
        assert len(row(curves, 20.0 * step + 1).ages) <= MAX_BUCKETS
    found = row(curves, 3 * DAY)
    assert found.width == LONGEST
    assert found.ages[0] >= DAY
    assert (
        len({round(one - two, 1) for one, two in zip(found.ages, found.ages[1:], strict=False)})
        == 1
    )
    assert all(value == 20.0 for value in values(found, "step"))
    losses = [one for one in values(found, "loss") if one is not None]
    assert losses == sorted(losses)
    assert len(losses) == len(found.ages)


def test_what_is_no_number_and_too_many_names_are_left_out() -> None:
    curves = Curves()
    curves.add(0.0, 1, 0, {"loss": "nan", "total": "nan", "text": "x"})
    curves.add(0.5, 1, 1, {f"m{k}": "1e3" for k in range(100)} | {"loss": "inf"})
    found = row(curves, 5.0)
    assert [curve.name for curve in found.curves] == ["step", *(f"m{k}" for k in range(MAX_CURVES))]
    assert (found.total, found.left) == (-1, -1.0)
