"""By whom a rank was killed: the kernel's log is looked at then; one that is shut is told once."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from elasticrun.agent.workers.exits import Killers
from elasticrun.wire.messages import Failure, FailureKind

KILLED = Failure("h", 3, 1, 4711, -9, 1, FailureKind.SIGNAL, "Signal 9", "", "")


def looked(root: Path, caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    async def twice() -> None:
        killers = Killers(root)
        await killers.look(KILLED)
        await killers.look(KILLED)

    with caplog.at_level(level, "elasticrun"):
        asyncio.run(twice())
    return caplog.messages


def test_a_log_that_cannot_be_read_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert looked(tmp_path, caplog, logging.WARNING) == [
        "rank 3: who killed it is not known: no count says that memory was short, and the kernel's "
        "log cannot be read here (no such file or directory); look there as root, with dmesg"
    ]


def test_a_log_that_names_nobody_is_no_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").touch()
    assert looked(tmp_path, caplog, logging.WARNING) == []
    assert looked(tmp_path, caplog, logging.INFO) != []
