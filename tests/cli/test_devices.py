"""Counting devices without torch: its build, NVML, and what CUDA_VISIBLE_DEVICES leaves."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from elasticrun.cli import devices
from elasticrun.cli.devices import Build, count_accelerators, torch_build, visible
from elasticrun.cli.values import UsageError

UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"]


def silent(sentence: str) -> None:
    raise AssertionError(f"nothing takes long here: {sentence}")


def test_the_build_is_read_without_importing_torch() -> None:
    version = torch.version
    assert torch_build() == Build(version.cuda or "", version.hip or "", version.xpu or "")


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("from typing import Optional\ncuda: Optional[str] = '13.0'\nhip = None\n", Build("13.0")),
        ("cuda = None\nhip: Optional[str] = '7.1'\nxpu = None\n", Build(hip="7.1")),
        ("__version__ = '2.5'\ncuda = '12.4'\n", Build("12.4")),
        ("xpu = '2025'\n", Build(xpu="2025")),
        ("this is not Python", Build()),
        (None, Build()),
    ],
)
def test_other_builds(text: str | None, build: Build, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "version.py").write_text(text)
    assert torch_build(str(tmp_path)) == build


@pytest.mark.parametrize(
    ("listed", "count"),
    [
        (None, 4), ("", 0), ("0", 1), ("0,1", 2), ("3,1,0", 3), (" 1 , 2 ", 2),
        ("0,0", 0), ("1,2,1", 0), ("0,-1,2", 1), ("-1", 0), ("7", 0), ("0,7,1", 1),
        ("1gpu2,2ampere", 2), ("gpu", 0), ("0,x,1", 1), ("+1", 1), ("GPU-aa11", 1),
        ("GPU-aa1,GPU-b", 2), ("GPU-aa", 0), ("GPU-zz", 0), ("GPU-aa11,GPU-aa11", 0),
        ("MIG-1234", None), ("0,MIG-1", None),
    ],
)  # fmt: skip
def test_visible_devices(listed: str | None, count: int | None) -> None:
    assert visible(listed, UUIDS) == count


@pytest.mark.parametrize("listed", ["", "0", "0,1", "3,1,0", "0,0", "0,-1,2", "x", "1gpu2,2ampere"])
def test_visible_devices_as_torch_reads_them(listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible(listed, UUIDS) == len(torch.cuda._parse_visible_devices())


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
@pytest.mark.parametrize("word", ["gpu", "xpu", "auto"])
def test_a_torch_for_cpus_has_no_devices_and_nobody_is_asked(word: str) -> None:
    assert count_accelerators(word, os.environ, silent) == 0


def test_an_unknown_word_is_known_to_be_unknown_at_once() -> None:
    assert count_accelerators("warp-core", os.environ, silent) is None


def test_cores_are_those_this_process_may_use() -> None:
    assert devices.cores() == torch._utils.cpu_count()


def test_torch_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the child says is what torch says here; one sentence announces the wait."""
    said: list[str] = []
    build = Build(cuda="13.0", xpu="2025")  # as if this torch could have such devices
    monkeypatch.setattr(devices, "torch_build", lambda: build)
    assert count_accelerators("xpu", os.environ, said.append) == (
        torch.xpu.device_count() if torch.xpu.is_available() else 0
    )
    assert len(said) == 1
    assert "asking torch" in said[0]


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is an NVIDIA driver here")
def test_a_torch_for_cuda_on_a_node_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: Build(cuda="13.0"))
    assert count_accelerators("gpu", os.environ, silent) == 0
    assert count_accelerators("auto", os.environ, silent) == 0


NVML = """
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetMigMode(handle):
    if handle == MIG: return (1, 1)
    raise NVMLError("not supported")
MIG = None
"""


def test_cuda_devices_are_counted_by_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's whole conversation, with a stand-in for the driver's library."""
    monkeypatch.setattr(devices, "torch_build", lambda: Build(cuda="13.0"))
    (tmp_path / "pynvml.py").write_text(NVML)
    bare = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    environ = bare | {"PYTHONPATH": str(tmp_path)}
    assert count_accelerators("gpu", environ, silent) == 3
    assert count_accelerators("auto", environ, silent) == 3
    assert count_accelerators("gpu", environ | {"CUDA_VISIBLE_DEVICES": "2,0"}, silent) == 2
    assert count_accelerators("gpu", environ | {"CUDA_VISIBLE_DEVICES": ""}, silent) == 0


def test_only_cuda_itself_counts_mig_instances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: Build(cuda="13.0"))
    (tmp_path / "pynvml.py").write_text(NVML.replace("MIG = None", "MIG = 1"))
    said: list[str] = []
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    expected = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert count_accelerators("gpu", environ, said.append) == expected
    assert len(said) == 1


def test_a_folder_named_torch_does_not_mislead_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('the wrong torch')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "torch_build", lambda: Build(xpu="2025"))
    assert count_accelerators("xpu", os.environ, lambda _: None) is not None


def test_a_child_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: Build(xpu="2025"))
    monkeypatch.setattr(devices, "TORCH_LIMIT", 0.5)
    monkeypatch.setattr(devices, "_TORCH_CHILD", "import signal; signal.pause()")
    with pytest.raises(UsageError, match="could not be asked"):
        count_accelerators("xpu", os.environ, lambda _: None)


def test_a_child_that_writes_rubbish(monkeypatch: pytest.MonkeyPatch) -> None:
    for code in ("print('hello')", "print('[]')", "", "raise SystemExit(3)"):
        assert devices._child([sys.executable, "-c", code], os.environ, 30.0) is None
