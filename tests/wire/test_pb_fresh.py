"""The generated code is what the proto says, and the proto is what messages.py says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.config import fields_of
from elasticrun.wire import messages as m
from elasticrun.wire.fields import _FIELDS
from elasticrun.wire.pb import job_pb2 as pb
from elasticrun.wire.types import Endpoint, RoundName

ROOT = Path(__file__).resolve().parents[2]
MADE = ROOT / "elasticrun" / "wire" / "pb"
NAMES = {RoundName: "Round", Endpoint: "Endpoint", m.JobStatus: "StatusReply"}


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


@pytest.mark.parametrize("of", list(_FIELDS), ids=lambda of: of.__name__)
def test_every_field_has_a_row_and_a_place_on_the_wire(of: type) -> None:
    names = set(fields_of(of))
    assert set(_FIELDS[of]) == names
    message = getattr(pb, NAMES.get(of, of.__name__))
    assert {field.name for field in message.DESCRIPTOR.fields} == names


def test_the_stubs_know_every_message_and_field() -> None:
    stub = (MADE / "job_pb2.pyi").read_text()
    for of in _FIELDS:
        message = getattr(pb, NAMES.get(of, of.__name__)).DESCRIPTOR
        assert f"class {message.name}(" in stub
        for field in message.fields:
            assert f" {field.name}:" in stub or f"def {field.name}(" in stub


def test_every_report_and_order_has_an_envelope() -> None:
    for union, envelope in ((m.Report, pb.Report), (m.Order, pb.Order)):
        kinds = {field.message_type.name for field in envelope.DESCRIPTOR.fields}
        assert kinds == {of.__name__ for of in union.__args__}
