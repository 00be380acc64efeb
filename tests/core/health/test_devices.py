"""What the states of GPUs and network ports mean."""

from __future__ import annotations

from typing import Any

import pytest

from elasticrun.core.health.devices import (
    FATAL_XIDS,
    OTHER_XIDS,
    SLOW_AFTER,
    DeviceJudge,
    DeviceState,
    GpuState,
    NicState,
)
from elasticrun.wire.messages import MAX_NOTICES


def judged(**what: Any) -> tuple[str, tuple[str, ...]]:
    return DeviceJudge().judge(DeviceState((GpuState(0), GpuState(3, **what))))


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ({"xids": (79,)}, "GPU 3 reports Xid 79 (GPU has fallen off the bus); reboot the node"),
        (
            {"xids": (31, 95)},
            "GPU 3 reports Xid 95 (uncontained memory error); reset the GPU (nvidia-smi "
            "--gpu-reset) or reboot",
        ),
        ({"lost": "GPU is lost"}, "GPU 3 does not answer (GPU is lost); reboot the node"),
        ({"recovery": 2}, "the driver of GPU 3 asks for its recovery; reboot the node"),
    ],
)
def test_faults(what: dict[str, Any], fault: str) -> None:
    assert judged(**what)[0] == fault


@pytest.mark.parametrize(
    ("what", "notice"),
    [
        ({"xids": (94,)}, "GPU 3 reports Xid 94 (contained memory error)"),
        ({"xids": (999,)}, "GPU 3 reports Xid 999"),
        ({"ecc": True}, "GPU 3 has had uncorrected memory errors since this agent started"),
        ({"recovery": 4}, "the driver of GPU 3 asks for a reset when its work is done"),
        ({"links": 18, "down": 2}, "GPU 3: 2 of its 18 NVLinks have gone down"),
    ],
)
def test_notices(what: dict[str, Any], notice: str) -> None:
    assert judged(**what) == ("", (notice,))


def test_a_healthy_node_has_neither() -> None:
    assert judged() == ("", ())


def test_an_xid_is_fatal_or_not() -> None:
    assert not set(FATAL_XIDS) & set(OTHER_XIDS)


def test_gpus_that_no_rank_sees_do_not_count() -> None:
    state = DeviceState((GpuState(0, xids=(79,)), GpuState(1, xids=(94,))))
    assert DeviceJudge().judge(state, [1]) == (
        "",
        ("GPU 1 reports Xid 94 (contained memory error)",),
    )
    assert DeviceJudge().judge(state, [0])[0]
    assert DeviceJudge().judge(state, None)[0]


def test_slow_clocks_are_a_notice_once_they_last() -> None:
    """A GPU at its limit is slowed down for a moment again and again."""
    judge = DeviceJudge()

    def shown(*slow: bool) -> list[int]:
        states = [DeviceState((GpuState(0, slowed=("power brake",) * one),)) for one in slow]
        return [len(judge.judge(state)[1]) for state in states]

    assert shown(True, False, True, False) == [0, 0, 0, 0]
    assert shown(*[True] * SLOW_AFTER) == [0] * (SLOW_AFTER - 1) + [1]
    assert shown(False, True, True) == [1, 1, 1]
    assert shown(*[False] * SLOW_AFTER) == [1] * (SLOW_AFTER - 1) + [0]


def test_network_ports() -> None:
    """A counter that goes on rising is a new notice at each power of ten."""

    def of(**what: Any) -> tuple[str, ...]:
        return DeviceJudge().judge(DeviceState(nics=(NicState("mlx5_0 port 1", **what),)))[1]

    assert of(up=True) == ()
    assert of(up=False) == ("network port mlx5_0 port 1 has gone down",)
    assert of(up=True, errors={"link_downed": 1}) == of(up=True, errors={"link_downed": 9})
    assert of(up=True, errors={"link_downed": 47}) == (
        "network port mlx5_0 port 1: link_downed has risen by 10 or more",
    )


def test_notices_are_bounded() -> None:
    state = DeviceState(tuple(GpuState(index, ecc=True) for index in range(64)))
    assert len(DeviceJudge().judge(state)[1]) == MAX_NOTICES
