"""A job of Slurm from submit to delete, by the words that people type on the login machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.further import further
from tests.harness import await_true
from tests.slurm.conftest import Slurm
from tests.snapshots.conftest import ENDLESS, TRAIN, checkpoints, starts, until_printed

pytestmark = pytest.mark.slow

UNHURRIED = ("--departure-grace", "100", "--rdzv-conf", "last_call_timeout=1,heartbeat_timeout=60")


def typed(slurm: Slurm, *words: str) -> str:
    """What a verb prints that ends well."""
    own = slurm.folder / "login"
    own.mkdir(exist_ok=True)
    done = slurm.types("elasticrun", *words, env={"XDG_RUNTIME_DIR": str(own)})
    assert done.wait() == 0, (words, done.stdout, done.stderr)
    return done.stdout


def row(slurm: Slurm) -> dict[str, Any]:
    """What `list` says of the only job."""
    (found,) = json.loads(typed(slurm, "list", "-o", "json"))
    return dict(found)


def until(slurm: Slurm, **values: object) -> None:
    await_true(lambda: values.items() <= row(slurm).items(), f"{values}")


@pytest.mark.parametrize(
    "waits",
    [
        False,
        pytest.param(
            True, marks=further("slurm/test_batch::test_a_requeued_job_goes_on_where_it_was")
        ),
    ],
)
def test_a_job_from_submit_to_delete(slurm: Slurm, waits: bool) -> None:
    """Slurm lets a job that was requeued begin some 15 s later: the shorter test does not wait for
    that, and cancels it in the queue, which no machine may leave meanwhile."""
    out = slurm.folder / "out"
    out.mkdir()
    program = [str(TRAIN), *ENDLESS, "--every", "5", "--print-at", "5"]
    program += ["--out", str(out), "--ckpt", str(slurm.folder / "ckpt")]
    said = typed(
        slurm, "submit", "--on", "slurm", "--name", "tr", "--nodes", "2", "--cpus-per-task", "2",
        "--time", "30", "--env", f"XDG_RUNTIME_DIR={slurm.cluster.disk}/run", *UNHURRIED,
        "--", *program,
    )  # fmt: skip
    assert "job tr is submitted as Slurm job" in said
    for rank in (0, 1):
        until_printed(out, rank)
    until(slurm, state="running", nodes=2, where="slurm")
    assert "2 ranks on 2 nodes" in typed(slurm, "status", "tr")
    typed(slurm, "logs", "tr", "--tail", "1")
    page = json.loads(typed(slurm, "status", "tr", "-o", "json"))
    ids = [one["node"] for one in page["master"]["nodes"]]
    hosts = [typed(slurm, "exec", "tr", "--node", node, "--", "hostname").strip() for node in ids]
    assert len({*hosts} & {*slurm.cluster.nodes}) == 2, (ids, hosts)
    assert "the job now uses at most 1 node" in typed(slurm, "scale", "tr", "1")
    until(slurm, nodes=1)
    assert "its allocation has 2 nodes, and Slurm adds no more" in typed(slurm, "scale", "tr", "3")
    until(slurm, nodes=2)

    said = typed(slurm, "suspend", "tr")
    (step,) = re.findall(r"job tr is suspended at step (\d+);", said)
    assert int(step) == checkpoints(slurm.folder / "ckpt")[-1], "the step that was saved"
    assert row(slurm)["state"] == "suspended"
    lives = len(starts(out, 0))
    if not waits:  # else it may begin before it is looked at
        slurm.cluster.drain(lift=False)
    typed(slurm, "resume", "tr")
    if waits:
        await_true(lambda: len(starts(out, 0)) > lives, "another life")
        assert starts(out, 0)[-1] > 0
        until(slurm, state="running")
        assert "stopped by" in typed(slurm, "stop", "tr", "--reason", "enough")
    else:
        assert row(slurm)["state"] == "submitted"
        assert "is cancelled" in typed(slurm, "stop", "tr")
        slurm.cluster.drain(lift=True)
    until(slurm, state="stopped")
    run = row(slurm)["run"]
    typed(slurm, "delete", "tr")
    assert not Path(run).exists()
    assert slurm.cluster.jobs() == []
