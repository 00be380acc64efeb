from __future__ import annotations

from hypothesis import given, strategies as st

from elasticrun.core.deadlines import Deadlines

moves = st.lists(
    st.tuples(
        st.sampled_from(["arm", "disarm", "pop", "shift"]), st.integers(0, 5), st.integers(0, 50)
    ),
    max_size=80,
)


@given(moves)
def test_behaves_like_a_plain_dictionary(steps: list[tuple[str, int, int]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    plain: dict[int, float] = {}
    for what, key, value in steps:
        if what == "arm":
            deadlines.arm(key, float(value))
            plain[key] = float(value)
        elif what == "disarm":
            deadlines.disarm(key)
            plain.pop(key, None)
        elif what == "shift":
            deadlines.shift(value / 10)
            plain = {k: when + value / 10 for k, when in plain.items()}
        else:
            due = deadlines.pop_due(float(value))
            expected = {k for k, when in plain.items() if when <= value}
            assert set(due) == expected
            assert [plain[k] for k in due] == sorted(plain[k] for k in due)
            for k in expected:
                del plain[k]
        assert deadlines.next() == min(plain.values(), default=None)
        assert len(deadlines) == len(plain)
        assert all(deadlines.when(k) == when for k, when in plain.items())


def test_moving_later_does_not_grow_the_queue() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for beat in range(10_000):
        deadlines.arm("node", 60.0 + beat)
    assert len(deadlines._heap) == 1
    assert deadlines.next() == 60.0 + 9_999


def test_moving_earlier_does_not_grow_the_queue_without_bound() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for step in range(10_000):
        deadlines.arm("node", -float(step))
    assert len(deadlines._heap) < 100
    assert deadlines.pop_due(0.0) == ["node"]
    assert deadlines.next() is None


def test_what_is_due_at_one_time_comes_in_the_order_of_arming() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for key in "cab":
        deadlines.arm(key, 1.0)
    assert deadlines.pop_due(1.0) == ["c", "a", "b"]
