"""What agents and masters agree on about etcd, without one."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from elasticrun.wire.rpc.etcd_place import (
    EtcdPlace,
    Keys,
    LeaderKey,
    PlaceError,
    leader_from_bytes,
    parse_place,
)
from elasticrun.wire.types import Endpoint


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("etcd://h1:2379", [("h1", 2379)]),
        ("etcd://h1", [("h1", 2379)]),
        ("etcd://h1:1,h2:2,h1:1/", [("h1", 1), ("h2", 2)]),
        ("etcd://[::1]:23,[fe80::1%eth0]", [("::1", 23), ("fe80::1%eth0", 2379)]),
    ],
)
def test_places(text: str, servers: list[tuple[str, int]]) -> None:
    assert parse_place(text) == EtcdPlace(tuple(Endpoint(*server) for server in servers))


def test_tls_is_a_scheme() -> None:
    place = parse_place("etcds://h1,h2")
    assert place.secure
    assert str(place) == "etcds://h1:2379,h2:2379"


@pytest.mark.parametrize(
    "text",
    [
        "h1:2379", "http://h1:2379", "etcd://", "etcd://h1:", "etcd://h1:0", "etcd://h1:70000",
        "etcd://user:secret@h1:1", "etcd://h1,,h2", "etcd://::1:5", "etcd://h 1", "etcd://h1:²",
        "etcd://" + ",".join(f"h{i}" for i in range(40)),
    ],
)  # fmt: skip
def test_what_is_no_place_is_one_sentence(text: str) -> None:
    with pytest.raises(PlaceError) as told:
        parse_place(text)
    assert "secret" not in str(told.value)
    assert "\n" not in str(told.value)


def test_keys_of_two_jobs_never_meet() -> None:
    ids = ["a", "a/", "a/lead", "a/lead/master", "A", "a%2F", "ä", " a"]
    bases = [Keys(job_id).base for job_id in ids]
    assert not [b for b in bases for other in bases if b != other and b.startswith(other)]
    assert len(set(bases)) == len(ids)


@given(st.text(min_size=1))
def test_a_key_is_one_level(job_id: str) -> None:
    assert Keys(job_id).base.count("/") == 4


def test_a_leader_comes_back() -> None:
    leader = LeaderKey("fe80::1", 29400, "abc", "def")
    assert leader_from_bytes(leader.to_bytes()) == leader


@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_are_no_leader(data: bytes) -> None:
    assert leader_from_bytes(data) is None


@pytest.mark.parametrize(
    "data",
    [
        b"[]", b"null", b"7", b'{"host": "h"}', b'{"host":"h","port":"1","holder":"","nonce":""}',
        b'{"host":"","port":1,"holder":"","nonce":""}',
        b'{"host":"h\\n","port":1,"holder":"","nonce":""}',
        b'{"host":"h","port":0,"holder":"","nonce":""}',
        b'{"host":"h","port":true,"holder":"","nonce":""}',
        b'{"host":"h","port":1,"holder":"","nonce":"","more":1}',
        b"[" * 5000, LeaderKey("h" * 9000, 1, "", "").to_bytes(),
    ],
)  # fmt: skip
def test_what_is_almost_a_leader_is_none(data: bytes) -> None:
    assert leader_from_bytes(data) is None
