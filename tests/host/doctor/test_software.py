"""Which torch, CUDA, NCCL, driver and devices are here, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.host.accelerators.base import Build
from elasticrun.host.doctor import software
from elasticrun.wire.types import Level

DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    "GCC version:  gcc version 13.3.0\n"
)


def seen(root: Path, monkeypatch: pytest.MonkeyPatch, build: Build, **versions: str) -> str:
    found = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(software, "installed", lambda name: found.get(name, ""))
    monkeypatch.setattr(software, "torch_build", lambda: build)
    (finding,) = software.examine(root)
    assert (finding.check, finding.state == Level.OK) == ("torch", "torch" in versions)
    return finding.seen


def test_a_machine_with_nothing_but_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = seen(tmp_path, monkeypatch, Build(), torch="2.13.0+cpu")
    assert said == "torch 2.13.0+cpu, no CUDA, no NCCL, no NVIDIA driver, no NVIDIA device"


def test_a_machine_with_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(DRIVER)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    build = Build(cuda="13.0")
    said = seen(tmp_path, monkeypatch, build, torch="2.15.0", nvidia_nccl_cu13="2.28.9")
    assert said == "torch 2.15.0, CUDA 13.0, NCCL 2.28.9, driver 580.65.06, 2 NVIDIA devices"


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has no torch" in seen(tmp_path, monkeypatch, Build())
