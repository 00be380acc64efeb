"""Messages as hypothesis draws them: everything that their bounds allow."""

from __future__ import annotations

import types
import typing
from enum import StrEnum
from functools import cache
from typing import Annotated, Any

from hypothesis import strategies as st
from msgspec.structs import replace

from elasticrun.wire import messages as m
from elasticrun.wire.types import (
    INT64,
    MAX_SECONDS,
    AtMost,
    Between,
    Exactly,
    OneLine,
    OneOf,
    amount,
    limit,
    ratio,
)

PRINTABLE = st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp", "Zs")) | st.just(" ")
TEXTS = st.text(st.characters(codec="utf-8"), max_size=200)
USUAL: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(0, INT64),
    float: st.floats(0, MAX_SECONDS),
    str: TEXTS,
    bool: st.booleans(),
}
FLOATS = {
    limit: st.floats(0, MAX_SECONDS, exclude_min=True),
    amount: st.floats(0, allow_nan=False, allow_infinity=False),
    ratio: st.floats(1, exclude_min=True, allow_nan=False, allow_infinity=False),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    bound = None
    if typing.get_origin(kind) is Annotated:
        kind, bound = typing.get_args(kind)
    inner = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return st.none() | values(inner[0])
    match bound:
        case AtMost(count=count):
            most = min(count, 4 if hasattr(inner[0], "__annotations__") else 16)
            return st.lists(values(inner[0]), max_size=most).map(tuple)
        case Between(low=low, high=high):
            return st.integers(low, high)
        case OneLine(least=least, most=most):
            return st.text(PRINTABLE, min_size=least, max_size=min(most, 40))
        case OneOf(words=words):
            return st.sampled_from(words)
        case Exactly(length=length, empty=empty):
            whole = st.binary(min_size=length, max_size=length)
            return st.just(b"") | whole if empty else whole
    if bound in FLOATS:
        return FLOATS[bound]
    if issubclass(kind, StrEnum):
        return st.sampled_from(kind)
    return USUAL[kind] if kind in USUAL else records(kind)


@cache
def records(of: Any) -> st.SearchStrategy[Any]:
    """Records of this kind whose fields agree."""
    hints = typing.get_type_hints(of, include_extras=True)
    drawn = {name: values(kind) for name, kind in hints.items()}
    if "protocol" in drawn:
        drawn["protocol"] = st.just(m.PROTOCOL_VERSION)
    return st.fixed_dictionaries(drawn).map(lambda made: of(**_agreeing(of, made)))


def _agreeing(of: type, made: dict[str, Any]) -> dict[str, Any]:
    """The same, but for what contradicts something else."""
    if of in (m.Start, m.Probe):
        made["group_rank"] %= made["group_world_size"]
        made["first_rank"] %= made["info"].world_size if of is m.Start else made["world_size"]
    elif of is m.JobSpec:
        made["min_nodes"], made["max_nodes"] = sorted((made["min_nodes"], made["max_nodes"]))
    elif of is m.Holding:
        contents = made["contents"] = made["contents"] or (7,)
        made["world_size"] = max(made["world_size"], len(contents))
        made["first_rank"] %= made["world_size"] - len(contents) + 1
    elif of in (m.DatasetShare, m.WorkGrant):
        edges = sorted(set(made["leases"]))
        made["leases"] = tuple(edges[: len(edges) // 2 * 2])
    elif of is m.WorkState:
        marks = len(made["marked"])
        filled = [(*one.marks, *(0,) * marks)[:marks] for one in made["shares"]]
        made["shares"] = tuple(map(_with_marks, made["shares"], filled))
    elif of in (m.Replicate, m.Persist):
        world = made["world_size"]
        ranks = made["ranks"] = tuple({rank % world for rank in made["ranks"]}) or (0,)
        if of is m.Replicate:
            made["contents"] = (made["contents"] + (1,) * len(ranks))[: len(ranks)]
        else:
            made["shared"] = ranks[: len(made["shared"])]
            made["writers"] = max(made["writers"], len(ranks))
            made["coordinates"] = made["coordinator"] is None
    return made


def _with_marks(share: m.DatasetShare, marks: tuple[int, ...]) -> m.DatasetShare:
    return replace(share, marks=marks)


def one_of(union: Any, *but: type) -> st.SearchStrategy[Any]:
    return st.one_of([records(of) for of in typing.get_args(union) if of not in but])


reports = one_of(m.Report)
later_reports = one_of(m.Report, m.Knock, m.Proof, m.Hello)
orders = one_of(m.Order)
answers = one_of(m.StatusAnswer)


def hellos(job_id: str) -> st.SearchStrategy[m.Hello]:
    """Of agents of one job."""
    return records(m.Hello).map(
        lambda hello: replace(hello, spec=replace(hello.spec, job_id=job_id))
    )
