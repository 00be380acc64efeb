"""Ascend NPUs without the hardware: tables as npu-smi prints them, device files in a folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from elasticrun.host.accelerators import ascend
from elasticrun.host.accelerators.ascend import Ascend, parse, visible
from elasticrun.host.accelerators.child_output import NoAnswer
from elasticrun.wire.types import Finding, Level
from tests.host.accelerators.standins import bare, npu_smi

RULE = "+---------------------------+---------------+-----------------------------------------+"
HEAD = f"""\
{RULE}
| npu-smi 24.1.1                   Version: 24.1.1                                      |
{RULE}
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+=========================================+
"""
PROCESSES = f"""\
{RULE}
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+=========================================+
"""


def chip(number: int, health: str = "OK", used: int = 3416, total: int = 65536) -> str:
    """An NPU of one chip, in npu-smi's two lines."""
    return (
        f"| {number}     910B4               | {health:13} | 88.2        30           0    / 0  |\n"
        f"| 0     {number}                   | 0000:C{number}:00.0  | 0    0    / 0    "
        f"{used}/ {total} |\n{RULE}\n"
    )


def idle(number: int) -> str:
    return f"| No running processes found in NPU {number}           |\n{RULE}\n"


def printing(folder: Path, *parts: str) -> dict[str, str]:
    """An environment whose npu-smi prints this, and an error where it is asked for anything else"""
    (folder / "table").write_text(HEAD + "".join(parts))
    return npu_smi(folder, f'[ "$*" = info ] || exit 2\ncat {folder}/table')


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ascend:
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in ("davinci0", "davinci1", "davinci2", "davinci3", "davinci_manager", "hisi_hdc"):
        (dev / name).touch()
    monkeypatch.setattr(ascend, "installed", lambda name: {"torch_npu": "2.5.1"}.get(name, ""))
    return Ascend(str(dev))


def bad(findings: tuple[Finding, ...]) -> list[Finding]:
    return [finding for finding in findings if finding.state is not Level.OK]


# ---------------------------------------------------------------- which NPUs


@pytest.mark.parametrize(
    ("listed", "seen"),
    [
        (None, [0, 1, 2, 3]), ("", []), ("1", [1]), ("1,2,3", [1, 2, 3]), ("1,2,-1,3", [1, 2]),
        ("1, 2,3", [1]), ("1,3,8", [1, 3]), ("x", []), ("0,0", [0]), ("2x,3", [2]),
    ],
)  # fmt: skip
def test_visible_devices_as_cann_documents_them(listed: str | None, seen: list[int]) -> None:
    assert visible(listed, 4) == seen


def test_counting(four: Ascend, tmp_path: Path) -> None:
    assert four.present()
    assert four.count(bare()) == 4
    assert four.count(bare() | {"ASCEND_RT_VISIBLE_DEVICES": "0,3"}) == 2
    assert Ascend(str(tmp_path / "nowhere")).count(bare()) == 0
    assert not Ascend(str(tmp_path / "nowhere")).present()


def test_npus_without_torch_npu_are_of_no_use(
    four: Ascend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ascend, "installed", lambda name: "")
    assert not four.present()


# ---------------------------------------------------------------- the table


def test_a_table_of_two_chips_a_card() -> None:
    """The newer form, with a physical id in the second line and a container's column at the end."""
    table = HEAD + (
        "| 0     Ascend910           | OK            | 178.5       36           0    / 0    |\n"
        "| 0     0                   | 0000:9D:00.0  | 0           0    / 0     3416 / 65536|\n"
        "+-----------------------------------------------------------------------------------+\n"
        "| 0     Ascend910           | Warning       | -           36           0    / 0    |\n"
        "| 1     1                   | 0000:9F:00.0  | 0           0    / 0     3195 / 65536|\n"
    ) + PROCESSES + "| 0       1   | 90004242   | python3.11   | 1024   | 77  |\n"  # fmt: skip
    first, second = parse(table)
    assert (first.npu, first.chip, first.name, first.health) == (0, 0, "Ascend910", "OK")
    assert (first.used, first.total, first.processes) == (3416, 65536, ())
    assert (second.npu, second.chip, second.health) == (0, 1, "Warning")
    assert second.processes == ((90004242, 1024),)


def test_a_table_of_an_older_release_without_hbm() -> None:
    table = (
        "| 2     310P3               | OK            | NA          40                0     / 0  |\n"
        "| 0                         | 0000:01:00.0  | 0           1854 / 44280                 |\n"
    )
    (only,) = parse(table)
    assert (only.npu, only.chip, only.used, only.total) == (2, 0, 1854, 44280)


def test_a_page_that_is_no_table() -> None:
    with pytest.raises(NoAnswer, match="lists no chip"):
        parse("dcmi model initialized failed, because the device is used. ret is -8020\n")


# ---------------------------------------------------------------- how they are


def test_good_npus(four: Ascend, tmp_path: Path) -> None:
    environ = printing(tmp_path, *map(chip, range(4)), PROCESSES, *map(idle, range(4)))
    findings = four.examine(4, environ)
    assert not bad(findings)
    assert [finding.check for finding in findings] == ["NPU count", "NPU health", "NPU memory"]
    assert findings[0].seen == "4 NPUs for 4 ranks (torch_npu 2.5.1)"


def test_bad_npus_are_named(four: Ascend, tmp_path: Path) -> None:
    holder = (
        "| 3       0                 | 90004242          | python      | 512                  |\n"
    )
    environ = printing(
        tmp_path, chip(0), chip(1, "Alarm"), chip(2, "Warning", used=40000), chip(3), PROCESSES,
        idle(0), idle(1), idle(2), holder,
    )  # fmt: skip
    alarm, warning, full, held = bad(four.examine(4, environ))
    assert (alarm.state, warning.state) == (Level.FAILED, Level.WARNING)
    assert alarm.seen == "NPU 1 chip 0 (910B4): npu-smi reports Alarm"
    assert alarm.todo == "see npu-smi info -t health -i 1 -c 0"
    assert (full.state, held.state) == (Level.FAILED, Level.WARNING)
    assert full.seen.startswith("NPU 2 chip 0: 39.1 of 64.0 GiB of its memory (61 %, limit 30 %)")
    assert "process 90004242 (512 MiB)" in held.seen


def test_what_is_not_visible_is_not_judged(four: Ascend, tmp_path: Path) -> None:
    environ = printing(tmp_path, chip(0), chip(1, "Alarm"), chip(2), chip(3))
    assert not bad(four.examine(2, environ | {"ASCEND_RT_VISIBLE_DEVICES": "0,2"}))
    (few,) = bad(four.examine(3, environ | {"ASCEND_RT_VISIBLE_DEVICES": "0,2"}))
    assert few.seen.startswith("only 2 NPUs can be seen, 3 are requested")


# ---------------------------------------------------------------- no answer


def test_no_npu_smi_is_a_warning(four: Ascend, tmp_path: Path) -> None:
    (finding,) = bad(four.examine(4, bare() | {"PATH": str(tmp_path)}))
    assert finding.state is Level.WARNING
    assert "not on the PATH" in finding.seen


def test_npu_smi_that_hangs_is_given_up_with_all_it_started(
    four: Ascend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ascend, "NPU_SMI_LIMIT", 0.5)
    environ = npu_smi(tmp_path, "sleep 1000 &\nwait")
    began = time.monotonic()
    (finding,) = bad(four.examine(4, environ))
    assert time.monotonic() - began < 60.0
    assert finding.state is Level.FAILED
    assert finding.seen == "npu-smi could not be queried: no answer within 0.5 s"


def test_npu_smi_that_fails_is_one_sentence(four: Ascend, tmp_path: Path) -> None:
    environ = npu_smi(tmp_path, "echo 'dcmi module initialize failed. ret is -8005' >&2; exit 1")
    (finding,) = bad(four.examine(4, environ))
    assert finding.state is Level.FAILED
    assert (
        finding.seen == "npu-smi could not be queried: dcmi module initialize failed. ret is -8005"
    )
