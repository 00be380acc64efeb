"""The generated code is what the proto says, and the proto is what messages.py says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from elasticrun.wire import messages as m
from elasticrun.wire.pb import job_pb2 as pb
from elasticrun.wire.rpc.protobuf import NAMES, kinds, rules
from elasticrun.wire.types import Endpoint, RoundName

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
