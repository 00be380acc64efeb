"""NVIDIA GPUs: what the real child makes of what NVML says, with a stand-in for NVML."""

from __future__ import annotations

import ast
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticrun.host import accelerators
from elasticrun.host.accelerators import nvidia, nvidia_child
from elasticrun.host.accelerators.base import descends_from_us
from elasticrun.host.accelerators.nvidia import Nvidia, visible
from elasticrun.wire.types import Finding, Level
from tests.harness import LIMIT
from tests.host.accelerators.standins import PYNVML, bare, gpu, library, nvml

UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"]
STRANGER = 90000077
"""A process id above the largest that Linux gives."""

CHECKS = ["GPU count", "GPU memory", "GPU ECC", "GPU pages", "GPU clocks", "NVLink"]


def bad(findings: tuple[Finding, ...]) -> list[Finding]:
    return [finding for finding in findings if finding.state is not Level.OK]


def the_bad_one(folder: Path, wanted: int = 2, **what: Any) -> Finding:
    """The one finding that is not ok on a node whose GPU 1 is like this."""
    (finding,) = bad(Nvidia().examine(wanted, nvml(folder, gpu(0), gpu(1, **what))))
    return finding


# ---------------------------------------------------------------- no invented names


def test_every_name_of_nvml_is_real() -> None:
    """What the child uses, and what the stand-in offers, is in the installed nvidia-ml-py."""
    import pynvml

    tree = ast.parse(Path(nvidia_child.__file__).read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "pynvml"
    }
    assert len(used) > 15
    assert [name for name in sorted(used) if not hasattr(pynvml, name)] == []
    offered = {
        node.name if isinstance(node, ast.FunctionDef) else node.targets[0].id  # type: ignore[attr-defined]
        for node in ast.parse(PYNVML).body
        if isinstance(node, ast.FunctionDef | ast.Assign)
    }
    offered = {name for name in offered if name.lower().startswith("nvml")}
    assert used <= offered | {
        "NVMLError",
        "NVMLLibraryMismatchError",
        "nvmlDeviceGetCurrentClocksEventReasons",
    }
    assert [name for name in sorted(offered) if not hasattr(pynvml, name)] == []


def test_the_stand_in_has_nvmls_numbers() -> None:
    import pynvml

    for node in ast.parse(PYNVML).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            name = node.targets[0].id  # type: ignore[attr-defined]
            assert getattr(pynvml, name) == node.value.value, name


# ---------------------------------------------------------------- which GPUs


@pytest.mark.parametrize(
    ("listed", "seen"),
    [
        (None, [0, 1, 2, 3]), ("", []), ("0", [0]), ("0,1", [0, 1]), ("3,1,0", [3, 1, 0]),
        (" 1 , 2 ", [1, 2]), ("0,0", []), ("1,2,1", []), ("0,-1,2", [0]), ("-1", []), ("7", []),
        ("0,7,1", [0]), ("1gpu2,2ampere", [1, 2]), ("gpu", []), ("0,x,1", [0]), ("+1", [1]),
        ("GPU-aa11", [0]), ("GPU-aa1,GPU-b", [0, 2]), ("GPU-aa", []), ("GPU-zz", []),
        ("GPU-aa11,GPU-aa11", []), ("GPU-aa1,GPU-aa11", []), ("MIG-1234", None), ("0,MIG-1", [0]),
        ("0,GPU-bb33", [0]), ("GPU-bb33,0", [2]), ("GPU-bb33,MIG-1", [2]), ("0,7,7", []),
    ],
)  # fmt: skip
def test_visible_devices(listed: str | None, seen: list[int] | None) -> None:
    assert visible(listed, UUIDS) == seen


ENTRIES = ["0", "3", "7", "-1", "-0", "", "x", "1gpu2", "+1", " 2 "]
ENTRIES += ["GPU-aa11", "GPU-aa1", "GPU-aa", "GPU-zz", "GPU-bb33", " GPU-bb33", "MIG-1"]


def test_visible_devices_as_torch_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every list of up to three of these; torch's own code was compared with CUDA's driver."""
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: UUIDS)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: len(UUIDS))
    lists = [items for most in (1, 2, 3) for items in itertools.product(ENTRIES, repeat=most)]
    wrong = []
    for items in lists:
        listed = ",".join(items)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        counted, seen = torch.cuda._device_count_nvml(), visible(listed, UUIDS)
        if seen is None:  # torch is asked
            assert listed.startswith("MIG-")
        elif counted != len(seen):
            wrong.append((listed, counted, seen))
    assert len(lists) > 5000
    assert not wrong, wrong[:20]


def test_counting(tmp_path: Path) -> None:
    environ = nvml(tmp_path, gpu(0), gpu(1), gpu(2))
    assert Nvidia().count(environ) == 3
    assert Nvidia().count(environ | {"CUDA_VISIBLE_DEVICES": "2,0"}) == 2
    assert Nvidia().count(environ | {"CUDA_VISIBLE_DEVICES": ""}) == 0


def test_only_cuda_itself_counts_mig_instances(tmp_path: Path) -> None:
    environ = nvml(tmp_path, gpu(0), gpu(1, mig=1))
    assert Nvidia().count(environ) is None
    (count, *others) = Nvidia().examine(4, environ)
    assert count.state is Level.OK
    assert "MIG" in count.seen
    assert not bad(tuple(others))


@pytest.mark.parametrize("driver", [True, False])
def test_nvml_without_an_answer_is_counted_by_cuda_where_there_is_a_driver(
    driver: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "has_driver", lambda: driver)
    assert Nvidia().count(nvml(tmp_path, broken=18)) == (None if driver else 0)


# ---------------------------------------------------------------- how they are


def test_good_gpus(tmp_path: Path) -> None:
    findings = Nvidia().examine(8, nvml(tmp_path, *(gpu(n) for n in range(8))))
    assert [finding.check for finding in findings] == CHECKS
    assert not bad(findings)
    assert findings[0].seen == "8 GPUs for 8 ranks (NVIDIA H100 80GB HBM3; driver 570.1)"


def test_an_old_gpu_that_knows_little_is_good(tmp_path: Path) -> None:
    """What a GPU does not support is no fault; neither are links of one that has none up."""
    environ = nvml(
        tmp_path, {"uuid": "GPU-1", "name": "P4"}, gpu(1, links=[0, 0], reasons=4), old=True
    )
    assert not bad(Nvidia().examine(2, environ))


@pytest.mark.parametrize(
    ("wanted", "listed", "seen"),
    [
        (4, None, "only 2 GPUs can be seen, 4 are requested"),
        (2, "1", "only 1 GPU can be seen, 2 are requested"),
        (1, "", "only 0 GPUs can be seen, 1 are requested"),
    ],
)
def test_fewer_than_asked_for(wanted: int, listed: str | None, seen: str, tmp_path: Path) -> None:
    environ = nvml(tmp_path, gpu(0), gpu(1))
    environ |= {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    (finding,) = bad(Nvidia().examine(wanted, environ))
    assert (finding.check, finding.state) == ("GPU count", Level.FAILED)
    assert finding.seen.startswith(seen)
    assert "CUDA_VISIBLE_DEVICES" in finding.todo


def test_a_lost_gpu_is_named_and_does_not_count(tmp_path: Path) -> None:
    few, lost = bad(Nvidia().examine(2, nvml(tmp_path, gpu(0), gpu(1, lost=True))))
    assert few.seen.startswith("only 1 GPU can be seen, 2 are requested")
    assert (lost.state, lost.seen) == (Level.FAILED, "GPU 1 does not answer: GPU is lost")
    # ... also one that is lost while it is asked
    *_, lost = bad(Nvidia().examine(2, nvml(tmp_path, gpu(0), gpu(1, ecc="lost"))))
    assert lost.seen == "GPU 1 does not answer: GPU is lost"


BAD: list[tuple[dict[str, Any], str, Level, str]] = [
    ({"ecc": 2}, "GPU ECC", Level.FAILED, "2 uncorrected memory errors"),
    ({"rows": [1, 2, 0, 1]}, "GPU pages", Level.FAILED, "could not be remapped"),
    ({"rows": [1, 2, 1, 0]}, "GPU pages", Level.WARNING, "rows wait to be remapped"),
    ({"retiring": 1}, "GPU pages", Level.WARNING, "pages wait to be retired"),
    ({"reasons": 0x08 | 0x80, "temperature": 91}, "GPU clocks", Level.WARNING,
     "at 91 °C: hardware slowdown, power brake"),
    ({"reasons": 0x20}, "GPU clocks", Level.WARNING, "software thermal slowdown"),
    ({"reasons": 0x40}, "GPU clocks", Level.WARNING, "hardware thermal slowdown"),
    ({"memory": [2**30, 80 * 2**30], "held": [[STRANGER, 600 * 2**20], [STRANGER + 1, None]]},
     "GPU memory", Level.WARNING,
     f"(1 %) held by process {STRANGER} (600 MiB), process {STRANGER + 1}"),
    ({"memory": [40 * 2**30, 80 * 2**30], "held": [[1, 39 * 2**30]]}, "GPU memory",
     Level.FAILED, "(50 %, limit 30 %) held by process 1 (39936 MiB)"),
    ({"memory": [24 * 2**30, 80 * 2**30]}, "GPU memory", Level.FAILED, "cannot be seen from here"),
    ({"links": [1] * 15 + [0] * 3}, "NVLink", Level.WARNING, "3 of its 18 NVLinks are down"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "check", "state", "part"), BAD)
def test_a_bad_gpu_is_named(
    what: dict[str, Any], check: str, state: Level, part: str, tmp_path: Path
) -> None:
    finding = the_bad_one(tmp_path, **what)
    assert (finding.check, finding.state) == (check, state)
    assert part in finding.seen
    assert finding.seen.startswith("GPU 1")
    assert finding.todo
    assert "\n" not in finding.seen + finding.todo


def test_what_this_job_holds_itself_is_no_finding(tmp_path: Path) -> None:
    """Ranks may run before NVML has answered: a grandchild of ours holds most of the GPU."""
    shell = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        grandchild = int(shell.stdout.readline())
        held = {"memory": [70 * 2**30, 80 * 2**30], "held": [[grandchild, 69 * 2**30]]}
        assert not bad(Nvidia().examine(1, nvml(tmp_path, gpu(0, **held))))
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()
    assert not descends_from_us(grandchild)
    assert descends_from_us(STRANGER) is None
    assert descends_from_us(1) is False
    assert descends_from_us(os.getpid()) is True


@pytest.mark.parametrize(
    ("pids", "which"),
    [
        ([STRANGER], "it is"),
        ([STRANGER, STRANGER + 1], "2 of these 2 are"),
        ([1, STRANGER], "1 of these 2 are"),  # ids of the host: this 1 may be any process
    ],
)
def test_a_process_that_is_not_found_here_may_be_ours(
    pids: list[int], which: str, tmp_path: Path
) -> None:
    """NVML may tell a container the host's process ids, those of its own ranks too."""
    held = [[pid, 30 * 2**30] for pid in pids]
    finding = the_bad_one(tmp_path, memory=[70 * 2**30, 80 * 2**30], held=held)
    assert (finding.check, finding.state) == ("GPU memory", Level.WARNING)
    assert f"(88 %, limit 30 %) held by process {pids[0]} (30720 MiB)" in finding.seen
    assert finding.seen.endswith(
        f"; {which} not seen from here (ended since, or numbered by a host around this container) "
        "and may be this job's own"
    )
    assert finding.todo.startswith("see on the host itself whose they are; end what another")


def test_what_is_not_visible_is_not_judged(tmp_path: Path) -> None:
    environ = nvml(tmp_path, gpu(0), gpu(1, ecc=5), gpu(2, lost=True))
    assert not bad(Nvidia().examine(1, environ | {"CUDA_VISIBLE_DEVICES": "0"}))
    assert len(bad(Nvidia().examine(2, environ | {"CUDA_VISIBLE_DEVICES": "0,1"}))) == 1


def test_an_idle_gpu_is_not_slowed_down(tmp_path: Path) -> None:
    reasons = 0x1 | 0x2 | 0x4 | 0x10  # idle, clocks that were set, power cap, sync boost
    assert not bad(Nvidia().examine(1, nvml(tmp_path, gpu(0, reasons=reasons))))


def test_many_strangers_are_counted_not_listed(tmp_path: Path) -> None:
    finding = the_bad_one(tmp_path, held=[[pid, 2**20] for pid in range(90000100, 90000130)])
    assert "process 90000107 (1 MiB) and 22 more" in finding.seen


@pytest.mark.parametrize("age", ["OLD", "NEW"])
def test_the_real_pynvml_over_a_stand_in_for_the_drivers_library(age: str, tmp_path: Path) -> None:
    """Names and structures are those of the C interface, of an older driver too."""
    environ = library(tmp_path, f"-D{age}")
    assert Nvidia().count(environ) == 2
    findings = Nvidia().examine(2, environ)
    assert findings[0].seen == "2 GPUs for 2 ranks (NVIDIA A100; driver 535.1)"
    holder = "held by process 90004242 (19456 MiB); it is not" if age == "NEW" else "held by proc"
    wanted = [
        (
            "GPU memory",
            f"GPU 1: 20.0 of 40.0 GiB of its memory (50 %, limit 30 %) {holder}",
        ),
        ("GPU ECC", "GPU 1: 3 uncorrected memory errors"),
        ("GPU pages", "GPU 1: bad rows wait to be remapped"),
        (
            "GPU clocks",
            "GPU 1 runs slower than it could at 88 °C: hardware slowdown, hardware t",
        ),
        ("NVLink", "GPU 1: 2 of its 12 NVLinks are down"),
    ]
    found = bad(findings)
    assert [finding.check for finding in found] == [check for check, _ in wanted]
    for finding, (_, part) in zip(found, wanted, strict=True):
        assert part in finding.seen


# ---------------------------------------------------------------- no answer


@pytest.mark.parametrize(
    ("driver", "part"),
    [(True, "NVML could not be queried: RM has detected"), (False, "there is no NVIDIA driver")],
)
def test_nvml_that_fails_is_one_sentence(
    driver: bool, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "has_driver", lambda: driver)
    (finding,) = Nvidia().examine(1, nvml(tmp_path, broken=18))
    assert finding.state is Level.FAILED
    assert part in finding.seen


@pytest.mark.parametrize(
    ("listed", "mig", "seen"),
    [(None, 0, [(97, 512), (-1, 512)]), ("1,0", 0, [(-1, 512), (97, 512)]), ("0", 1, [])],
)
def test_how_busy_the_visible_ones_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    listed: str | None,
    mig: int,
    seen: list[tuple[int, int]],
) -> None:
    monkeypatch.setattr(nvidia, "has_driver", lambda: True)
    silent = gpu(1)
    del silent["busy"]
    environ = nvml(tmp_path, gpu(0, busy=97, mig=mig), silent)
    if listed is not None:
        environ["CUDA_VISIBLE_DEVICES"] = listed
    assert list(accelerators.loads("", environ, LIMIT)) == seen
    assert accelerators.loads("cpu", environ, LIMIT) == ()


def test_nvml_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "NVML_LIMIT", 1.0)
    monkeypatch.setattr(nvidia, "has_driver", lambda: True)
    began = time.monotonic()
    (finding,) = Nvidia().examine(1, nvml(tmp_path, hangs=True))
    assert time.monotonic() - began < 60.0
    assert finding.state is Level.FAILED
    assert finding.seen == "NVML could not be queried: no answer within 1 s"


def test_a_child_whose_caller_is_gone_ends_by_itself(tmp_path: Path) -> None:
    environ = nvml(tmp_path, hangs=True)
    path = nvidia_child.__file__
    code = os.spawnve(os.P_WAIT, sys.executable, [sys.executable, path, "count", "0"], environ)
    assert code == -14  # SIGALRM


@pytest.mark.skipif(nvidia.has_driver(), reason="there is an NVIDIA driver here")
def test_the_real_nvml_on_a_node_without_a_driver() -> None:
    (finding,) = Nvidia().examine(1, bare())
    assert finding.state is Level.FAILED
    assert "there is no NVIDIA driver on this node" in finding.seen
    assert Nvidia().count(bare()) == 0


@pytest.mark.skipif(not nvidia.has_driver(), reason="needs an NVIDIA driver")
def test_the_real_nvml() -> None:
    findings = Nvidia().examine(1, bare())
    assert findings[0].check == "GPU count"
    assert "NVML could not be queried" not in findings[0].seen


@pytest.mark.parametrize("answer", [{"gpus": [{"colour": 1}]}, {"gpus": 3}, {}, {"gpus": [7]}])
def test_an_answer_of_another_shape_is_no_answer(
    answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "_query", lambda what, environ: answer)
    (finding,) = Nvidia().examine(1, {})
    assert finding.state is Level.FAILED
