from __future__ import annotations

from elasticrun.core.rounds.budget import Budget


def test_first_restart_is_immediate_then_one_two_four_up_to_the_longest() -> None:
    budget = Budget(max_restarts=9, window=0.0, backoff=5.0)
    delays = []
    for _ in range(6):
        delays.append(budget.delay(life=0.1))
        budget.charge(0.0, life=0.1)
    assert delays == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert budget.delay(life=31.0) == 0.0, "it was healthy"
    budget.charge(100.0, life=31.0)
    assert budget.delay(life=0.1) == 1.0
    assert budget.count == 7
    assert budget.left(100.0) == 2


def test_no_backoff_never_waits() -> None:
    budget = Budget(max_restarts=500, window=0.0, backoff=0.0)
    for _ in range(200):
        assert budget.delay(life=0.01) == 0.0
        budget.charge(0.0, life=0.01)
    assert budget.left(0.0) == 300


def test_a_window_makes_the_budget_a_rate() -> None:
    budget = Budget(max_restarts=2, window=60.0, backoff=0.0)
    budget.charge(0.0, life=100.0)
    budget.charge(10.0, life=100.0)
    assert budget.left(59.0) == 0
    assert budget.left(60.0) == 1
    assert budget.left(70.0) == 2
    assert budget.count == 2


def test_an_adopted_count_is_spent_once() -> None:
    budget = Budget(max_restarts=3, window=0.0, backoff=0.0)
    budget.adopt(2)
    budget.adopt(2)
    budget.adopt(1)
    assert (budget.count, budget.left(0.0)) == (2, 1)
    budget.charge(0.0, life=1.0)
    assert (budget.count, budget.left(0.0)) == (3, 0)
