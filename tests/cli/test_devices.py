"""What the words of --nproc-per-node count, without torch in this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from elasticrun.cli import devices
from elasticrun.cli.devices import count_accelerators
from elasticrun.cli.settings import UsageError
from elasticrun.host.accelerators.base import Build
from tests.further import further
from tests.host.accelerators.standins import gpu, nvml

pytestmark = pytest.mark.slow  # it imports torch


def silent(sentence: str) -> None:
    raise AssertionError(f"nothing takes long here: {sentence}")


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
@pytest.mark.parametrize("word", ["gpu", "xpu", "auto"])
def test_a_torch_for_cpus_has_no_devices_and_nobody_is_asked(word: str) -> None:
    assert count_accelerators(word, os.environ, silent) == 0


def test_an_unknown_word_is_known_to_be_unknown_at_once() -> None:
    assert count_accelerators("warp-core", os.environ, silent) is None


def test_cores_are_those_this_process_may_use() -> None:
    assert devices.cores(silent, quota=1e9) == torch._utils.cpu_count()


@pytest.mark.parametrize(("quota", "count"), [(0.3, 1), (1.0, 1), (2.9, 2), (64.0, 4)])
def test_a_containers_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, quota: float, count: int
) -> None:
    """As many ranks as have a core's worth of time, and one sentence where that is fewer."""
    said: list[str] = []
    monkeypatch.setattr(devices, "all_cores", lambda: 4)
    assert devices.cores(said.append, quota) == count
    assert len(said) == (quota < 4)


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


def test_cuda_devices_are_counted_by_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's whole conversation, with a stand-in for the driver's library."""
    monkeypatch.setattr(devices, "torch_build", lambda: Build(cuda="13.0"))
    environ = nvml(tmp_path, gpu(0), gpu(1), gpu(2))
    assert count_accelerators("gpu", environ, silent) == 3
    assert count_accelerators("auto", environ, silent) == 3
    assert count_accelerators("gpu", environ | {"CUDA_VISIBLE_DEVICES": "2,0"}, silent) == 2
    assert count_accelerators("gpu", environ | {"CUDA_VISIBLE_DEVICES": ""}, silent) == 0


def test_only_cuda_itself_counts_mig_instances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: Build(cuda="13.0"))
    said: list[str] = []
    environ = nvml(tmp_path, gpu(0, mig=1))
    expected = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert count_accelerators("gpu", environ, said.append) == expected
    assert len(said) == 1


@further(
    "test_torch_is_asked_in_a_process_of_its_own",
    "forkserver/test_trust::test_a_torch_folder_in_the_cwd_does_not_disturb",
)
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
    with pytest.raises(UsageError, match="could not count its devices"):
        count_accelerators("xpu", os.environ, lambda _: None)
