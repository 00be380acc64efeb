"""Planted faults: what can be written, for whom it counts, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from elasticrun.wire import env
from elasticrun.wire.env import BadFault, Fault, FaultKind


def test_a_list_is_read_with_its_defaults() -> None:
    text = "probe-fail@n0, probe-fail=wrong@n1,probe-hang@n2,probe-hang=meet@n3,slow=3x@*"
    assert [(f.text, f.node) for f in env.read_faults(text)] == [
        ("probe-fail=comm", "n0"),
        ("probe-fail=wrong", "n1"),
        ("probe-hang=comm", "n2"),
        ("probe-hang=meet", "n3"),
        ("slow=3x", "*"),
    ]
    assert env.read_faults("") == ()


def test_a_node_has_its_own_and_those_of_every_node() -> None:
    text = "slow=2x@*,probe-fail=compute@rank-1,probe-hang@rank-10"
    assert env.write_own_faults(env.faults_of_node(text, "rank-1")) == "slow=2x,probe-fail=compute"
    assert env.write_own_faults(env.faults_of_node(text, "n7")) == "slow=2x"


def test_what_a_process_is_told_reads_back() -> None:
    there = env.read_own_faults("probe-hang=compute,slow=2.5x")
    assert env.fault_value(there, FaultKind.PROBE_HANG) == "compute"
    assert env.fault_value(there, FaultKind.PROBE_FAIL) == ""
    assert env.slowness(there) == 2.5
    assert env.slowness(env.read_own_faults("")) == 1.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("probe-fail", "names no node"),
        ("probe-fail@", "names no node"),
        ("explode@n1", "is no fault; there are probe-fail, probe-hang, slow"),
        ("probe-fail=often@n1", "probe-fail may be comm, compute, wrong"),
        ("probe-fail=@n1", "probe-fail may be comm, compute, wrong"),
        ("probe-hang=wrong@n1", "probe-hang may be comm, compute, meet"),
        ("slow@n1", "needs a factor from 1x to 100x"),
        ("slow=0.5x@n1", "needs a factor"),
        ("slow=nan@n1", "needs a factor"),
        ("slow=1000x@n1", "needs a factor"),
        ("slow=3x@n0,nonsense@n1", "'nonsense@n1'"),
        ("slow=3x@n0," * 1001, "at most 1000"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(BadFault) as caught:
        env.read_faults(text)
    sentence = str(caught.value)
    assert sentence.startswith("ELASTICRUN_FAULT")
    assert words in sentence
    assert "\n" not in sentence


@given(st.text(max_size=200))
def test_whatever_a_process_finds_in_its_environment_is_read_or_left(text: str) -> None:
    for fault in env.read_own_faults(text):
        assert isinstance(fault, Fault)
        assert env.read_own_faults(fault.text) == (fault,)


@given(st.text(max_size=200))
def test_whatever_the_operator_writes_is_read_or_refused(text: str) -> None:
    try:
        found = env.read_faults(text)
    except BadFault:
        return
    assert all(fault.node.strip() for fault in found)
    again = ",".join(f"{fault.text}@{fault.node}" for fault in found)
    assert env.read_faults(again) == found
