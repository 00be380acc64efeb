"""A newcomer is probed by itself: twice before it is convicted, each time for one answer."""

from __future__ import annotations

from elasticrun.config import PROBE_ANSWER_SLACK
from elasticrun.core.health.groups import Group
from elasticrun.core.health.netcheck import TRIES, Doors
from elasticrun.wire.messages import Probed, ProbePhase

LIMIT = 10.0
FIRST, SECOND = Group("1", ("n",)), Group("2", ("n",))


def said(check: str, ok: bool = False, reason: str = "broken") -> Probed:
    phase = ProbePhase.DONE if ok else ProbePhase.COMPUTE
    return Probed(check, ok, phase, True, False, reason, 0.0, 0.0, (), 0.0, 0.0)


def visited() -> Doors:
    """A door at which one node is probed for the first time, since the moment 0."""
    doors = Doors(LIMIT)
    doors.probe(FIRST, 0.0)
    return doors


def test_who_passes_is_let_in_and_forgotten() -> None:
    doors = visited()
    assert doors.group_of("n") == FIRST
    assert doors.answered("n", said("1", ok=True)) is True
    assert (doors.group_of("n"), doors.next_deadline()) == (None, None)
    assert doors.answered("n", said("1", ok=True)) is False, "it has been let in already"


def test_two_failures_convict_and_both_are_named() -> None:
    assert TRIES == 2
    doors = visited()
    assert doors.answered("n", said("1", reason="no memory")) is False
    assert doors.take_again() == ["n"]
    doors.probe(SECOND, 5.0)
    verdict = doors.answered("n", said("2", reason="too hot"))
    assert isinstance(verdict, str)
    assert verdict.startswith("n failed its own probes twice: ")
    assert "no memory" in verdict
    assert "too hot" in verdict
    assert (doors.group_of("n"), doors.next_deadline()) == (None, None)


def test_one_answer_is_counted_once() -> None:
    """The same one again, while its next probe is not even ordered, convicts nobody."""
    doors = visited()
    doors.answered("n", said("1"))
    assert doors.group_of("n") is None
    assert doors.answered("n", said("1")) is False
    assert doors.answered("n", said("1", ok=True)) is False
    assert doors.take_again() == ["n"]
    assert doors.take_again() == [], "each is told once"
    doors.probe(SECOND, 1.0)
    assert doors.answered("n", said("1")) is False, "of the probe before"
    assert doors.group_of("n") == SECOND
    assert doors.answered("n", said("2", ok=True)) is True


def test_what_nobody_asked_for_is_no_answer() -> None:
    doors = visited()
    assert doors.answered("other", said("1", ok=True)) is False
    assert doors.answered("n", said("9", ok=True)) is False
    assert doors.group_of("n") == FIRST
    assert doors.next_deadline() == LIMIT + PROBE_ANSWER_SLACK


def test_who_does_not_answer_has_failed() -> None:
    doors = visited()
    due = LIMIT + PROBE_ANSWER_SLACK
    assert doors.overdue(due - 0.001) == []
    ((node, answer),) = doors.overdue(due)
    assert (node, answer.check, answer.ok) == ("n", "1", False)
    assert "did not answer" in answer.reason
    assert doors.answered(node, answer) is False
    assert doors.take_again() == ["n"]


def test_who_goes_is_asked_no_more() -> None:
    doors = visited()
    doors.answered("n", said("1"))
    doors.gone("n")
    doors.gone("n")
    assert doors.take_again() == []
    doors.probe(SECOND, 0.0)
    doors.gone("n")
    assert doors.next_deadline() is None
    doors.probe(FIRST, 0.0)
    assert doors.answered("n", said("1")) is False, "it is new here: nothing is held against it"
