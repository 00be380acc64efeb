"""Reasons as data: each has a sentence, and comes back from a wire or a record as it went."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest

from elasticrun.core import reasons
from elasticrun.core.reasons import (
    Banned,
    ByOperator,
    Dead,
    Excluded,
    HasLeft,
    Leaves,
    LostContact,
    NodeLost,
    NoRestartsLeft,
    RankFailed,
    Reason,
    Said,
    Saved,
    Then,
    TooFewNodes,
    code,
    exclusion_in,
    failure_in,
    is_by_operator,
    read,
    text,
    text_and_code,
    text_without_evidence,
    unreachable_side,
)
from elasticrun.wire.messages import MAX_CODE, ReasonCode

KINDS = typing.get_args(Reason)

SECRET = "ValueError: cannot read /data/secret"


def sample(kind: Any, depth: int = 0) -> Any:
    """A value of a field of this type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return inner[0]
    if origin is tuple:
        return ("a", "b")
    if inner:  # a union: reasons within reasons come to an end
        return RankFailed(3, "b", SECRET) if RankFailed in inner else sample(inner[depth % 2])
    if kind in (str, int, float, bool):
        return {str: SECRET, int: 7, float: 5.5, bool: True}[kind]
    return made(kind, depth + 1)


NAMES = ("node", "host", "name", "done", "who", "by", "signal")
"""Fields that hold names and words of ours."""


def made(kind: Any, depth: int = 0) -> Any:
    hints = typing.get_type_hints(kind, vars(reasons))
    values = {name: sample(hints[name], depth) for name in kind.__struct_fields__}
    values |= {name: "n1" for name in NAMES if values.get(name) == SECRET}
    return kind(**values)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_has_a_sentence_and_comes_back_as_it_went(kind: type) -> None:
    reason = made(kind)
    sentence, beside = text_and_code(reason)
    assert sentence
    assert sentence == text(reason)
    assert read(sentence, beside) == reason
    assert read("", None) is None


def test_one_that_nobody_knows_is_its_text() -> None:
    assert read("a wind blows", ReasonCode("wind", '{"force":9}')) == Said("a wind blows")
    assert read("node b is dead", ReasonCode("node_lost", '{"node":7}')) == Said("node b is dead")
    assert read("cut", ReasonCode("node_lost", '{"node":"b"')) == Said("cut")
    assert read("by a person", None) == Said("by a person")


def test_what_is_too_long_to_be_told_is_told_as_text() -> None:
    long = RankFailed(0, "", "x" * MAX_CODE)
    assert code(long) is None
    assert read(*text_and_code(long)) == Said(text(long))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_stranger_reads_nothing_that_a_rank_has_said(kind: type) -> None:
    assert SECRET not in text_without_evidence(made(kind))


def test_what_is_asked_of_a_reason() -> None:
    gone = NodeLost("b", Dead(LostContact("broken", 5.0)))
    assert text(gone) == "node b is dead: its connection broke and it sent nothing for 5.0 s"
    assert unreachable_side(TooFewNodes(1, 2, 60.0, gone)) == "node"
    assert unreachable_side(NodeLost("b", Dead(LostContact("broken", missed=True)))) == ""
    first = RankFailed(3, "b", "ValueError: bad luck")
    over = NoRestartsLeft(first, 0, 0.0, "")
    assert text(over).endswith("bad luck; no restarts left (--max-restarts is 0)")
    assert failure_in(Saved(over, 7)) == first
    assert failure_in(gone) is None
    assert is_by_operator(Saved(ByOperator("stopped", "me@h", "enough"), 7))
    assert not is_by_operator(over)
    banned = Banned(Excluded("asked", "asked by me"), 60.0)
    assert exclusion_in(Then(banned, Leaves("received SIGTERM", 15))) == banned
    assert text_without_evidence(NodeLost("b", HasLeft(Leaves(SECRET)))) == "node b left"


def test_kinds_are_names_that_last() -> None:
    """A record and a peer of another release know them by these."""
    kinds = sorted(msgspec.structs.fields(kind) and kind.__struct_config__.tag for kind in KINDS
                   if kind.__struct_fields__)  # type: ignore[attr-defined]  # fmt: skip
    assert "node_lost" in kinds
    assert len(set(kinds)) == len(kinds)
