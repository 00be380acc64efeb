"""The bytes of a sample of every message, of the facts on disk and of what small files hold, as
`golden.json` has them: an older peer or an older record must be understood.

`python -m tests.wire.test_golden` writes the file anew, after a change that is meant."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

import pytest

from elasticrun.core.persisted import Facts
from elasticrun.master.trace.words import in_words
from elasticrun.snapshots.saver import transfer
from elasticrun.wire import frames, messages as m, progress, snapshots, spawning
from elasticrun.wire.rpc import protobuf
from elasticrun.wire.rpc.etcd_place import LeaderKey, leader_from_bytes
from elasticrun.wire.types import RoundName, dumps, fields_of, is_record, loads

GOLDEN: Final = Path(__file__).with_name("golden.json")

NUMBERS: Final = {
    "group_rank": 1,
    "group_world_size": 3,
    "first_rank": 2,
    "world_size": 8,
    "port": 4000,
    "protocol": m.PROTOCOL_VERSION,
    "min_nodes": 2,
    "max_nodes": 4,
    "writers": 8,
}
"""Those that must fit together."""

WORDS: Final = {
    "grow": "now",
    "on_hang": "tell",
    "on_corruption": "tell",
    "NotFinite.value": "nan",
    "verb": "picture",
    "ExcludedNode.kind": "slow",
    "Persist.reason": "breakpoint",
    "WorkBase.source": "storage",
    "host": "fe80::1",
    "message": "tür “zu”\n\U0001f525",
}

ENVELOPES: Final = {
    "Report": (m.Report, protobuf.report_to_wire, protobuf.report_from_wire),
    "Order": (m.Order, protobuf.order_to_wire, protobuf.order_from_wire),
    "StatusAnswer": (m.StatusAnswer, protobuf.answer_to_wire, protobuf.answer_from_wire),
}

CONVERSATIONS: Final = {
    "ToSpawner": spawning.ToSpawner,
    "FromSpawner": spawning.FromSpawner,
    "ToPeer": snapshots.ToPeer,
    "FromPeer": snapshots.FromPeer,
    "FromClient": transfer.FromClient,
    "FromHost": transfer.FromHost,
    "ToWarm": spawning.ToWarm,
    "FromWarm": spawning.FromWarm,
}


def sample(of: type, *, least: bool) -> Any:
    """A value of a record in which everything is said, or as little as may be."""
    hints = fields_of(of)
    made = {
        name: _value(kind, f"{of.__name__}.{name}", least=least)
        for name, kind in hints.items()
        if not (least and _has_default(of, name))
    }
    if least and of.__module__ == snapshots.__name__:  # these may name no round
        made = {n: snapshots.NO_ROUND if isinstance(v, RoundName) else v for n, v in made.items()}
    if of is m.Persist:
        made["coordinates"] = made["coordinator"] is None
    return of(**made)


def _has_default(of: type, name: str) -> bool:
    if dataclasses.is_dataclass(of):
        fields = {field.name: field for field in dataclasses.fields(of)}
        return fields[name].default is not dataclasses.MISSING
    names = of.__struct_fields__
    return name in names[len(names) - len(of.__struct_defaults__) :]


def _value(kind: Any, where: str, *, least: bool) -> Any:
    name = where.partition(".")[2]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if least else _value(inner[0], where, least=least)
    if origin is tuple:
        needed = name in ("contents", "ranks")
        if least and not needed:
            return ()
        if inner[1:] != (...,):
            return tuple(_value(each, where, least=least) for each in inner)
        first = _value(inner[0], where, least=least)
        return (1, 3) if inner[0] is int else (first, first)
    if origin is dict:
        key, item = (_value(part, where, least=least) for part in inner)
        return {} if least else {key: item}
    if is_record(kind):
        return sample(kind, least=least)
    if issubclass(kind, Enum):
        return list(kind)[-1]
    number = 2 + sum(map(ord, name)) % 50  # so that most fields of a message differ
    plain = {
        bool: not least,
        int: NUMBERS.get(name, number),
        float: 1.25 + number,
        bytes: bytes(range(32)),
        str: WORDS.get(where, WORDS.get(name, f"a {name}")),
    }
    return plain[kind]


def everything() -> Iterator[tuple[str, str]]:
    for envelope, (union, write, read) in ENVELOPES.items():
        for of in typing.get_args(union):
            for least in (False, True):
                message = sample(of, least=least)
                data = write(message)
                assert read(data) == message
                yield f"{envelope}.{of.__name__}.{'least' if least else 'full'}", data.hex()
    for conversation, frame_union in CONVERSATIONS.items():
        for said, of in frames.types_of(frame_union).items():
            for least in (False, True):
                message = sample(of, least=least)
                data = frames.encode(message)
                assert list(frames.FrameBuffer(frame_union).feed(data)) == [message]
                name = f"{conversation}.{said}.{'least' if least else 'full'}"
                yield name, f"{data[:4].hex()} {data[4:].decode('ascii')}"
    for least in (False, True):
        facts = sample(Facts, least=least)
        text = dumps(facts)
        assert loads(text, Facts) == facts
        yield f"json.Facts.{'least' if least else 'full'}", text
    leader = sample(LeaderKey, least=False)
    assert leader_from_bytes(leader.to_bytes()) == leader
    yield "etcd.Leader", leader.to_bytes().decode()
    steps = progress.RankSteps(1, 7, 2, 0.5, 0.25, 0.125, progress.Own.KNOWN)
    yield "datagram.RankSteps", progress.encode(steps).hex()
    costs = progress.RankCosts(1, 7, 2, 0.5, 0.25)
    assert progress.decode(progress.encode(costs)) == costs
    yield "datagram.RankCosts", progress.encode(costs).hex()
    word = progress.RankQuiet(1, "judge", 60.0)
    assert progress.decode(progress.encode(word)) == word
    yield "datagram.RankWord", progress.encode(word).hex()


SAMPLES: Final = dict(everything())


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_has_the_bytes_that_it_always_had(name: str) -> None:
    golden = json.loads(GOLDEN.read_text()).get(name)
    assert SAMPLES[name] == golden, "if this is meant, run `python -m tests.wire.test_golden`"


def test_no_sample_was_lost() -> None:
    assert SAMPLES.keys() == json.loads(GOLDEN.read_text()).keys()


def test_every_message_can_be_told() -> None:
    """The forms of `words` name fields in text, which nothing else looks at."""
    for of in (*typing.get_args(m.Report), *typing.get_args(m.Order)):
        assert in_words(sample(of, least=True))
        assert in_words(sample(of, least=False))


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(SAMPLES, indent=1) + "\n")
