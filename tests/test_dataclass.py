"""Our `@dataclass` makes what the standard library's makes."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from typing import Any, ClassVar

import pytest

from elasticrun import dataclass as ours

FLAGS = [
    {"frozen": frozen, "slots": slots, "eq": eq, "kw_only": kw_only, "order": order}
    for frozen, slots, eq, kw_only, order in itertools.product((False, True), repeat=5)
    if eq or not order
]


def both(of: type, **flags: Any) -> tuple[Any, Any]:
    """The class as each of the two decorators makes it."""
    made = []
    for decorator in (dataclasses.dataclass, ours.dataclass):
        body = {
            name: value
            for name, value in vars(of).items()
            if name not in ("__dict__", "__weakref__")
        }
        made.append(decorator(**flags)(type(of.__name__, of.__bases__, body)))
    return made[0], made[1]


class Row:
    """A row."""

    kind: ClassVar[str] = "row"
    number: int
    name: str = "x"
    tags: list[str] = dataclasses.field(default_factory=list, compare=False)
    hidden: int = dataclasses.field(default=3, repr=False)
    made: int = dataclasses.field(init=False, default=7)


class Checked:
    """With methods of its own."""

    low: int
    high: float

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("the wrong way round")

    def __repr__(self) -> str:
        return "checked"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.low == other.low


class Nothing:
    """Without a field."""


def said(function: Any) -> Any:
    """What a call returns, or how it fails."""
    try:
        return function()
    except Exception as error:
        return type(error), str(error).replace("Row.__init__", "__init__")


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "-".join(n for n in f if f[n]) or "plain")
def test_it_is_the_same(flags: dict[str, Any]) -> None:
    """Fields, methods, order, hash, text, copies: for all flags."""
    theirs, mine = both(Row, **flags)
    for cls in (theirs, mine):
        cls.__qualname__ = "Row"
    nan = float("nan")

    def seen(cls: Any) -> list[Any]:
        one, same, other = cls(number=1), cls(number=1, tags=["t"]), cls(number=2, hidden=4)
        odd = cls(number=nan)
        return [
            repr(one),
            repr(other),
            one.tags is not cls(number=1).tags,
            one == same,
            one == other,
            one == 1,
            odd == odd,
            odd == cls(number=nan),
            said(lambda: one < other),
            said(lambda: one >= 1),
            said(lambda: hash(one) == hash(same)),
            said(lambda: hash(one) == hash(other)),
            said(lambda: setattr(one, "number", 5)),
            said(lambda: delattr(same, "number")),
            bool(said(lambda: setattr(one, "new", 5))),
            one.number,
            said(lambda: cls(3, "y").name),
            said(lambda: cls()),
            said(lambda: cls(number=1, made=2)),
            said(lambda: cls(number=1, wrong=2)),
            cls.__match_args__,
            [field.name for field in dataclasses.fields(cls)],
            dataclasses.asdict(other),
            repr(dataclasses.replace(other, name="z")),
            repr(copy.deepcopy(other)),
            repr(copy.copy(other)),
            cls.__doc__,
            cls.kind,
            cls.__init__.__qualname__,
            getattr(cls, "__slots__", None),
        ]  # fmt: skip

    assert seen(mine) == seen(theirs)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_class_has_of_its_own_stays(frozen: bool) -> None:
    """Its methods; a hash is added where Python only took it away."""
    for cls in both(Checked, frozen=frozen):
        assert repr(cls(1, 2)) == "checked"
        assert cls(1, 2) == cls(1, 3)
        assert said(lambda cls=cls: hash(cls(1, 2)) == hash(cls(1, 2.0))) == (
            True if frozen else (TypeError, "unhashable type: 'Checked'")
        )
        assert said(lambda cls=cls: cls(2, 1)) == (ValueError, "the wrong way round")


def test_one_without_fields_and_one_that_contains_itself() -> None:
    """The ends of the table."""
    for cls in both(Nothing, frozen=True, slots=True):
        assert cls() == cls()
        assert hash(cls()) == hash(())
    for cls in both(Row):
        one = cls(1)
        one.tags.append(one)
        assert "tags=[...]" in repr(one)


@ours.dataclass(frozen=True, slots=True)
class Sent:
    """One that pickle finds by its name."""

    number: int
    name: str = "x"


def test_a_frozen_one_with_slots_is_pickled() -> None:
    """pickle would assign to its fields."""
    assert pickle.loads(pickle.dumps(Sent(3))) == Sent(3)


def test_a_class_inherits_the_fields() -> None:
    """Of a dataclass below it."""

    @ours.dataclass(slots=True, kw_only=True)
    class More(Row):
        number: int
        extra: int = 1

    assert More(number=1, extra=2) == More(number=1, extra=2)
    assert repr(More(number=1)).endswith("More(number=1, extra=1)")
