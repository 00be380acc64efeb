"""Which accelerator a word means, and which one is found where no word is given."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from elasticrun.host import accelerators
from elasticrun.host.accelerators.ascend import Ascend
from elasticrun.host.accelerators.base import Build, installed, torch_build
from tests.host.accelerators.standins import bare, gpu, nvml


@pytest.mark.parametrize(
    ("word", "name", "device", "backend", "variable"),
    [
        ("nvidia", "nvidia", "cuda", "nccl", "CUDA_VISIBLE_DEVICES"),
        ("nvidia.com/gpu", "nvidia", "cuda", "nccl", "CUDA_VISIBLE_DEVICES"),
        ("ascend", "ascend", "npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES"),
        ("ascend-npu", "ascend", "npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES"),
        ("cpu", "cpu", "cpu", "gloo", ""),
    ],
)
def test_words(word: str, name: str, device: str, backend: str, variable: str) -> None:
    found = accelerators.accelerator_for(word, {})
    assert (found.name, found.device, found.backend) == (name, device, backend)
    assert found.visible_variable == variable


@pytest.mark.parametrize("word", ["gpu", "mthreads.com/gpu", "NVIDIA"])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="use nvidia, ascend, cpu"):
        accelerators.accelerator_for(word, {})


def test_the_cpu_counts_its_cores_and_has_nothing_to_examine() -> None:
    cpu = accelerators.accelerator_for("cpu", {})
    assert cpu.count({}) == torch._utils.cpu_count()
    assert cpu.examine(1000, {}) == ()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the installed torch were built for CUDA."""
    monkeypatch.setattr(accelerators, "torch_build", lambda: Build(cuda="13.0"))


@pytest.mark.parametrize(
    ("listed", "name"), [({}, "nvidia"), ({"CUDA_VISIBLE_DEVICES": ""}, "cpu")]
)
@pytest.mark.usefixtures("cuda")
def test_gpus_are_found_where_they_are_visible(
    listed: Mapping[str, str], name: str, tmp_path: Path
) -> None:
    assert accelerators.accelerator_for("", nvml(tmp_path, gpu(0)) | listed).name == name


@pytest.mark.usefixtures("cuda")
def test_gpus_that_only_cuda_counts_are_found(tmp_path: Path) -> None:
    assert accelerators.accelerator_for("", nvml(tmp_path, gpu(0, mig=1))).name == "nvidia"


def test_a_torch_for_cpus_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "torch_build", lambda: Build())
    assert accelerators.accelerator_for("", nvml(tmp_path, gpu(0), hangs=True)).name == "cpu"


def test_npus_are_found_where_torch_can_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "davinci0").touch()
    monkeypatch.setattr(accelerators, "torch_build", lambda: Build())
    monkeypatch.setattr(accelerators, "Ascend", lambda: Ascend(str(tmp_path)))
    assert accelerators.accelerator_for("", bare()).name == "cpu"  # torch_npu is not installed
    monkeypatch.setattr("elasticrun.host.accelerators.ascend.installed", lambda name: "2.5.1")
    assert accelerators.accelerator_for("", bare()).name == "ascend"
    hidden = bare() | {"ASCEND_RT_VISIBLE_DEVICES": ""}
    assert accelerators.accelerator_for("", hidden).name == "cpu"


# ---------------------------------------------------------------- what is installed


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


def test_installed_distributions() -> None:
    # the package index's build leaves out of this what it was built for ("+cu130")
    assert installed("torch") in (torch.__version__, torch.__version__.partition("+")[0])
    assert installed("no-such-distribution") == ""


def test_finding_out_imports_neither_torch_nor_a_driver() -> None:
    code = (
        "import os, sys\n"
        "from elasticrun.host import accelerators\n"
        "accelerators.accelerator_for('', os.environ).examine(2, os.environ)\n"
        "print(sorted({'torch', 'torch_npu', 'pynvml', 'grpc'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True,
        check=True, timeout=240,
    )  # fmt: skip
    assert done.stdout == "[]\n"
