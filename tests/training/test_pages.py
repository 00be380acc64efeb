"""The scripts with which pages begin work as they stand, and survive the loss of a rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.further import further
from tests.tutorials.pages import blocks_of

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"


@further(
    "training/recovery/test_jobs::test_survivors_keep_their_process_and_the_weights_are_the_same",
    "training/data/test_work_jobs::test_each_sample_is_used_once_over_kills_and_resizes",
)
@pytest.mark.parametrize("page", ["recovery.md", "data.md"])
def test_the_script_of_the_page_goes_on(
    page: str, elastic_job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = blocks_of(DOCS / page)[0]
    script = tmp_path / block.path
    script.write_text(block.text)
    monkeypatch.chdir(tmp_path)  # of its checkpoints
    job = elastic_job(script, nproc_per_node=2, max_restarts=3)
    job.wait_for_output(0, re.compile(r"rank 0: step [1-9]"))
    pid = job.rank_pid(0)
    job.kill_rank(1)
    job.wait_for_output(0, re.compile(r"(?s)resume from step [1-9]\d* in memory.*rank 0: step"))
    assert (job.rank_pid(0) == pid) == (page == "recovery.md")
