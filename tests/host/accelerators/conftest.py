"""Limits of this room's children: a busy machine may let one of them stand still for a while."""

from __future__ import annotations

import pytest

from elasticrun.host.accelerators import ascend, nvidia
from tests.harness import LIMIT


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML and npu-smi answer in time unless a test says otherwise."""
    monkeypatch.setattr(nvidia, "NVML_LIMIT", LIMIT)
    monkeypatch.setattr(ascend, "NPU_SMI_LIMIT", LIMIT)
