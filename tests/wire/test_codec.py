"""Messages survive the wire; what breaks a bound is a sentence, in both directions; and the
generated code is what the proto says, which is what messages.py says."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st
from msgspec import Struct, structs

from elasticrun.wire import messages as m
from elasticrun.wire.pb import job_pb2 as pb
from elasticrun.wire.rpc import protobuf
from elasticrun.wire.rpc.protobuf import NAMES, ProtocolMismatch, kinds, rules
from elasticrun.wire.types import (
    MAX_LOCAL_RANKS,
    MAX_NAME,
    MAX_TEXT,
    Endpoint,
    RoundName,
    WireError,
)
from tests import starts
from tests.further import examples
from tests.wire import strategies as draw

ROUND = RoundName(7, 3, "0badcafe")
SPEC = m.JobSpec("job", 1, 2, 1, 3, 30.0, 0.0, 600.0, 30.0, 5.0, "auto", 600.0, 30.0, 600.0)
HELLO = m.Hello(
    m.PROTOCOL_VERSION, "1", "n0", "i0", "host", "127.0.0.1", 1, -1, 2, "role", SPEC, None
)
START = m.Start(m.RoundInfo(ROUND, 4, 1), 0, 2, 0, 0, 4, Endpoint("127.0.0.1", 1234), True)
KNOCK = m.Knock(m.PROTOCOL_VERSION, "1", "job", m.Role.AGENT, "n0", "i0", b"x" * 32, True)
PROBED = m.Probed(
    "c1", True, m.ProbePhase.DONE, False, False, "", 0.01, 2.0e9, (m.Transfer(8, 0.1),), 1.0, 0.5
)
PROBE = m.Probe("c1", False, "n1", 0, 2, 0, 4, Endpoint("h", 4000), 60.0)
FAILURE = m.Failure("h", 1, 1, 9, -9, 0, m.FailureKind.SIGNAL, "killed", "", "")


@given(draw.reports)
@settings(max_examples=examples(60), deadline=None)
def test_reports_survive(report: m.Report) -> None:
    data = protobuf.report_to_wire(report)
    assert len(data) <= m.MAX_MESSAGE_BYTES
    assert protobuf.report_from_wire(data) == report


@given(draw.orders)
@settings(max_examples=examples(60), deadline=None)
def test_orders_survive(order: m.Order) -> None:
    assert protobuf.order_from_wire(protobuf.order_to_wire(order)) == order


@given(draw.answers)
@settings(max_examples=examples(30), deadline=None)
def test_answers_to_readers_survive(answer: m.StatusAnswer) -> None:
    assert protobuf.answer_from_wire(protobuf.answer_to_wire(answer)) == answer


@given(st.binary(max_size=300))
@example(b"")
@example(b"\xff" * 20)
@settings(max_examples=examples(100), deadline=None)
def test_any_bytes_are_a_message_or_a_sentence(data: bytes) -> None:
    for decode in (protobuf.report_from_wire, protobuf.order_from_wire, protobuf.answer_from_wire):
        with contextlib.suppress(WireError):
            decode(data)


@pytest.mark.slow
@given(draw.reports, st.data())
@settings(max_examples=examples(60), deadline=None)
def test_a_damaged_message_is_a_message_or_a_sentence(report: m.Report, data: Any) -> None:
    wire = bytearray(protobuf.report_to_wire(report))
    wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        again = protobuf.report_from_wire(bytes(wire))
        assert protobuf.report_from_wire(protobuf.report_to_wire(again)) == again


def test_a_kind_that_we_do_not_have() -> None:
    unknown = b"\xc2\x3e\x00"  # field 1000, length-delimited, empty
    with pytest.raises(WireError, match="kind"):
        protobuf.report_from_wire(unknown)
    with pytest.raises(WireError, match="kind"):
        protobuf.order_from_wire(b"")


def test_a_message_over_the_bound() -> None:
    with pytest.raises(WireError, match="longer than 65536"):
        protobuf.report_from_wire(b"\0" * (m.MAX_MESSAGE_BYTES + 1))


def changed(message: m.Report, **fields: Any) -> bytes:
    """On the wire with other values of some fields, `spec__grow` for one within another."""
    made = pb.Report.FromString(protobuf.report_to_wire(message))
    for name, value in fields.items():
        target = getattr(made, made.WhichOneof("kind"))
        *path, last = name.split("__")
        for step in path:
            target = getattr(target, step)
        setattr(target, last, value)
    return made.SerializeToString()


@pytest.mark.parametrize(
    ("message", "field", "value", "said"),
    [
        (HELLO, "node", "", "hello.node is empty"),
        (HELLO, "node", "x" * (MAX_NAME + 1), "hello.node has 1025 characters"),
        (HELLO, "node", "a\x1b[2J", "cannot be printed"),
        (HELLO, "incarnation", "", "incarnation is empty"),
        (HELLO, "address", "a\nb", "cannot be printed"),
        (HELLO, "node_rank", -2, "node_rank is -2"),
        (HELLO, "node_rank", m.MAX_NODES, "node_rank"),
        (HELLO, "local_world_size", 0, "local_world_size is 0"),
        (HELLO, "local_world_size", 100_000, "local_world_size"),
        (HELLO, "spec.min_nodes", 0, "min_nodes is 0"),
        (HELLO, "spec.min_nodes", 5, "min_nodes 5 > max_nodes 2"),
        (HELLO, "spec.max_nodes", 100_001, "max_nodes"),
        (HELLO, "spec.max_restarts", -1, "max_restarts is -1"),
        (HELLO, "spec.join_timeout", float("nan"), "join_timeout is nan"),
        (HELLO, "spec.join_timeout", float("inf"), "join_timeout is inf"),
        (HELLO, "spec.heartbeat_timeout", -0.5, "heartbeat_timeout"),
        (HELLO, "spec.grow", "never", "'never', not one of auto, now"),
        (HELLO, "spec.checks.slow_ratio", -1.0, "slow_ratio is -1.0, not a ratio above 1"),
        (HELLO, "spec.checks.slow_ratio", 0.0, "slow_ratio is 0.0, not a ratio above 1"),
        (HELLO, "spec.checks.slow_ratio", 1.0, "slow_ratio is 1.0, not a ratio above 1"),
        (HELLO, "spec.checks.slow_ratio", float("inf"), "slow_ratio is inf"),
        (HELLO, "spec.checks.slow_ratio", float("nan"), "slow_ratio is nan"),
        (HELLO, "spec.checks.perf_floor", float("inf"), "perf_floor is inf"),
        (HELLO, "spec.checks.probe_limit", float("nan"), "probe_limit is nan"),
        (
            HELLO,
            "spec.checks.probe_limit",
            0.0,
            "probe_limit is 0.0 s, but a time limit must be above 0",
        ),
        (HELLO, "spec.checks.probe_limit", -1.0, "probe_limit is -1.0 s, not between 0"),
        (KNOCK, "nonce", b"", "knock.nonce has 0 bytes, not 32"),
        (KNOCK, "nonce", b"x" * 33, "knock.nonce has 33 bytes, not 32"),
        (KNOCK, "role", "master", "'master', not one of agent, reader"),
        (KNOCK, "node", "x" * (MAX_NAME + 1), "knock.node has 1025 characters"),
        (KNOCK, "job_id", "a\x1b[2J", "cannot be printed"),
        (KNOCK, "version", "", "knock.version is empty"),
        (PROBED, "check", "", "check is empty"),
        (PROBED, "phase", "mood", "'mood', not one of"),
        (PROBED, "compute", -1.0, "compute is -1"),
        (PROBED, "flops", float("inf"), "flops is inf"),
        (m.Proof(b""), "proof", b"x", "proof has 1 bytes"),
        (m.Proof(b""), "proof", b"x" * 31, "proof has"),
        (m.Proof(b""), "proof", b"x" * 33, "proof has"),
        (m.Proof(b""), "proof", b"x" * 60_000, "proof has"),
    ],
    ids=lambda it: type(it).__name__ if isinstance(it, Struct) else f"{it!s:.40}",
)
def test_what_comes_in_and_breaks_a_bound(
    message: m.Report, field: str, value: object, said: str
) -> None:
    with pytest.raises(WireError, match=re.escape(said)):
        protobuf.report_from_wire(changed(message, **{field.replace(".", "__"): value}))


def test_a_hello_without_its_spec() -> None:
    made = pb.Report.FromString(protobuf.report_to_wire(HELLO))
    made.hello.ClearField("spec")
    with pytest.raises(WireError, match=r"hello\.spec is missing"):
        protobuf.report_from_wire(made.SerializeToString())


def test_another_protocol_is_named_before_its_fields_are_read() -> None:
    data = changed(HELLO, protocol=99, version="7.0", node="", spec__grow="sideways")
    with pytest.raises(ProtocolMismatch) as seen:
        protobuf.report_from_wire(data)
    assert seen.value.protocol == 99
    assert "7.0" in str(seen.value)
    welcome = pb.Order(welcome=pb.Welcome(protocol=1, version="2\x1b[2J")).SerializeToString()
    with pytest.raises(ProtocolMismatch) as seen:
        protobuf.order_from_wire(welcome)
    assert "\x1b" not in str(seen.value)
    newer = m.PROTOCOL_VERSION + 1
    for knock in (pb.Knock(protocol=1, nonce=b"short"), pb.Knock(protocol=newer, role="cook")):
        with pytest.raises(ProtocolMismatch):
            protobuf.report_from_wire(pb.Report(knock=knock).SerializeToString())


@pytest.mark.parametrize(
    "change",
    [{"group_rank": 2}, {"first_rank": 4}, {"group_rank": -1}, {"world_size": 0}],
    ids=str,
)
def test_a_place_that_cannot_be(change: dict[str, int]) -> None:
    made = pb.Order.FromString(protobuf.order_to_wire(START))
    for name, value in change.items():
        setattr(made.start.info if name == "world_size" else made.start, name, value)
    with pytest.raises(WireError):
        protobuf.order_from_wire(made.SerializeToString())


def test_an_unknown_word_and_a_bad_port() -> None:
    made = pb.Report.FromString(protobuf.report_to_wire(m.RanksFailed(ROUND, (FAILURE,))))
    made.ranks_failed.failures[0].kind = "mood"
    with pytest.raises(WireError, match="'mood', not one of"):
        protobuf.report_from_wire(made.SerializeToString())
    for port in (0, -1, 65536):
        with pytest.raises(WireError, match="port"):
            protobuf.report_to_wire(m.Join(Endpoint("h", port)))


def test_lists_are_bounded_by_the_receiver() -> None:
    made = pb.Report.FromString(protobuf.report_to_wire(PROBED))
    made.probed.transfers.extend([made.probed.transfers[0]] * m.MAX_TRANSFERS)
    with pytest.raises(WireError, match="lists 17, more than 16"):
        protobuf.report_from_wire(made.SerializeToString())
    made = pb.Report.FromString(protobuf.report_to_wire(m.RanksFailed(ROUND, (FAILURE,))))
    for _ in range(m.MAX_FAILURES):
        made.ranks_failed.failures.append(made.ranks_failed.failures[0])
    with pytest.raises(WireError, match="lists 17, more than 16"):
        protobuf.report_from_wire(made.SerializeToString())
    pids = pb.Report(running=pb.Running(pids=[1] * (MAX_LOCAL_RANKS + 1)))
    pids.running.round.CopyFrom(made.ranks_failed.round)
    with pytest.raises(WireError, match="pids lists"):
        protobuf.report_from_wire(pids.SerializeToString())


def test_the_sender_cuts_texts_and_keeps_the_end_of_a_traceback() -> None:
    long = structs.replace(
        FAILURE, message="m" * 9000 + "end", traceback="first" + "t" * 9000 + "the error"
    )
    heard = protobuf.report_from_wire(protobuf.report_to_wire(m.RanksFailed(ROUND, (long,))))
    (failure,) = heard.failures
    assert len(failure.message) == len(failure.traceback) == MAX_TEXT
    assert failure.traceback.endswith("the error")
    assert failure.message.startswith("mmm")


def test_many_long_failures_fit_into_one_message() -> None:
    wide = structs.replace(
        FAILURE, message="\U0001f525" * 5000, traceback="\U0001f525" * 5000, error_file="/e" * 100
    )
    many = tuple(structs.replace(wide, rank=rank) for rank in range(40))
    data = protobuf.order_to_wire(m.End(1, "reason", many))
    assert len(data) <= m.MAX_MESSAGE_BYTES
    heard = protobuf.order_from_wire(data)
    assert [failure.rank for failure in heard.failures] == list(range(m.MAX_FAILURES))
    assert all(failure.message for failure in heard.failures)


def test_half_a_surrogate_pair_does_not_stop_a_report() -> None:
    path = b"/tmp-\xff".decode("utf-8", "surrogateescape")
    odd = structs.replace(FAILURE, error_file=path, message="\ud800")
    heard = protobuf.report_from_wire(protobuf.report_to_wire(m.RanksFailed(ROUND, (odd,))))
    assert heard.failures[0].message == "?"


def test_a_number_too_large_for_the_wire_is_a_sentence() -> None:
    with pytest.raises(WireError, match="number"):
        protobuf.report_to_wire(m.Beat(2**70))
    with pytest.raises(WireError):
        protobuf.report_to_wire(m.Beat("seven"))  # type: ignore[arg-type]


PERSIST = m.Persist(
    "a1", ROUND, 120, 4, (0, 1), (0,), 4, True, None, reason="periodic", limit=120.0
)
HOLDING = m.Holding(ROUND, 120, 0, 4, (7, 0), wanted=False)


@pytest.mark.parametrize(
    ("message", "change", "said"),
    [
        (PERSIST, {"ranks": ()}, "no rank"),
        (PERSIST, {"ranks": (0, 4)}, "beyond 4"),
        (PERSIST, {"shared": (2,)}, "not among its 4 writers"),
        (PERSIST, {"writers": 1}, "not among its 1 writers"),
        (PERSIST, {"coordinates": False}, "is told who does"),
        (PERSIST, {"coordinator": Endpoint("h", 1)}, "is told who does"),
        (PERSIST, {"attempt": ""}, "attempt is empty"),
        (PERSIST, {"attempt": "x" * 65}, "attempt has 65 characters, more than 64"),
        (PERSIST, {"limit": 0.0}, "limit is 0.0 s"),
        (PERSIST, {"reason": "whim"}, "'whim', not one of"),
        (PERSIST, {"step": -1}, "step is -1"),
        (HOLDING, {"contents": ()}, "0 ranks from rank 0 on of 4"),
        (HOLDING, {"first_rank": 3}, "2 ranks from rank 3 on of 4"),
        (HOLDING, {"contents": (-1,)}, "contents is -1"),
        (HOLDING, {"world_size": 0}, r"world_size|2 ranks from rank 0 on of 0"),
        (START, {"group_rank": 2}, "node 2 of 2"),
        (START, {"first_rank": 4}, "first rank 4 of 4"),
        (START, {"group_rank": -1}, "group_rank is -1"),
        (START, {"world_size": 0}, "first rank 0 of 0"),
        (PROBE, {"group_rank": 2}, "node 2 of 2"),
        (PROBE, {"first_rank": 4}, "first rank 4 of 4"),
        (PROBE, {"world_size": 0}, "first rank 0 of 0"),
    ],
    ids=lambda it: type(it).__name__ if isinstance(it, Struct) else f"{it!s:.40}",
)
def test_what_cannot_be_is_not_sent(message: Any, change: dict[str, Any], said: str) -> None:
    wrong = (starts.changed if message is START else structs.replace)(message, **change)
    write: Any = protobuf.order_to_wire
    if isinstance(wrong, m.Holding):
        wrong, write = m.Holdings(None, (wrong,)), protobuf.report_to_wire
    with pytest.raises(WireError, match=said):
        write(wrong)


def test_what_a_node_holds_is_bounded_and_fits_into_a_message() -> None:
    half = m.MAX_CONTENTS // 2
    long = m.Holding(ROUND, 2**62, 0, half, (2**63 - 1,) * half, wanted=True)
    both = m.Holdings(Endpoint("h", 4000), (long, long))
    assert protobuf.report_from_wire(protobuf.report_to_wire(both)) == both
    with pytest.raises(WireError, match="lists 4098 ranks, more than 4096"):
        protobuf.report_to_wire(
            m.Holdings(None, (long, long, structs.replace(HOLDING, contents=(1, 1))))
        )
    with pytest.raises(WireError, match="lists 9, more than 8"):
        protobuf.report_to_wire(m.Holdings(None, (HOLDING,) * 9))


# ---------------------------------------------------------------- the proto


ROOT = Path(__file__).resolve().parents[2]
MADE = ROOT / "elasticrun" / "wire" / "pb"
MESSAGES = [of for of in vars(m).values() if isinstance(of, type) and issubclass(of, Struct)] + [
    RoundName,
    Endpoint,
]
MESSAGES.remove(Struct)


def _proto(of: type) -> Any:
    name = next((name for name, named in NAMES.items() if named is of), of.__name__)
    return getattr(pb, name).DESCRIPTOR


@pytest.mark.slow
def test_the_generated_code_is_fresh() -> None:
    pytest.importorskip("grpc_tools")
    script = ROOT / "scripts" / "gen_proto.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_stale_file_is_found(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    for name in ("protos/elasticrun/v1/job.proto", "scripts/gen_proto.py"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((ROOT / name).read_text())
    script = [sys.executable, tmp_path / "scripts" / "gen_proto.py"]
    subprocess.run(script, check=True, capture_output=True)
    proto = tmp_path / "protos/elasticrun/v1/job.proto"
    proto.write_text(proto.read_text().replace("int64 number = 1;", "int64 numeral = 1;"))
    done = subprocess.run([*script, "--check"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "job_pb2.py" in done.stdout


@pytest.mark.parametrize("of", MESSAGES, ids=lambda of: of.__name__)
def test_every_field_has_a_bound_and_a_place_on_the_wire(of: type) -> None:
    message = _proto(of)
    assert {field.name for field in message.fields} == rules(of).keys()
    stub = (MADE / "job_pb2.pyi").read_text()
    assert f"class {message.name}(" in stub
    for field in message.fields:
        assert f" {field.name}:" in stub or f"def {field.name}(" in stub


def test_every_report_order_and_answer_has_an_envelope() -> None:
    envelopes = ((m.Report, pb.Report), (m.Order, pb.Order), (m.StatusAnswer, pb.StatusAnswer))
    for union, envelope in envelopes:
        assert set(kinds(envelope).values()) == set(union.__args__)
