"""A folder of a record that answers too late, or not at all."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from elasticrun.config import MasterConfig
from elasticrun.master import records
from tests.harness import LIMIT


async def test_a_folder_that_answers_too_late_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and what comes afterwards disturbs nobody and holds no lock."""
    monkeypatch.setattr(records, "FOLDER_LIMIT", 0.01)
    may, troubles, held = threading.Event(), list[object](), list[int]()

    class Slow(records.Records):
        def _hold(self, folder: Path) -> int:
            assert may.wait(LIMIT)
            held.append(os.open(folder, os.O_RDONLY))
            return held[0]

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: troubles.append(context))
    try:
        config = MasterConfig("job", "127.0.0.1", 0, None, record_dir=str(tmp_path))
        assert await Slow(config, hosted=True).open(1) is None
        (late,) = (t for t in threading.enumerate() if t.name == "elasticrun-folder")
        may.set()
        await asyncio.to_thread(late.join, LIMIT)  # before which it has handed over its answer
    finally:
        loop.set_exception_handler(None)
    assert not troubles
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held[0])
    assert caplog.text.count(f"{tmp_path} has not answered for 0.01 s") == 1
