"""A job begins in a run folder: fresh, again, after success, beside another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elasticrun.host.runs.index import all_runs, prune
from elasticrun.host.runs.layout import JobRecord, RunFolder, RunResult
from elasticrun.host.runs.opening import (
    OpenRun,
    RankProgram,
    RunRefused,
    already_succeeded,
    open_named,
    open_new,
)
from tests.host.doctor.child import found


def _job(pid: int, **more: Any) -> JobRecord:
    return JobRecord(name="train", host="h", began=float(pid), pid=pid, started=1, **more)


def _end(run: OpenRun, state: str) -> None:
    said = RunResult(state=state, step=120, ended=5.0)
    run.folder.write_result(said)
    run.close()


def test_masters_of_a_launch_share_a_folder_and_launches_do_not(tmp_path: Path) -> None:
    first = open_new(tmp_path, _job(1), "0" * 8)
    first.update_record(
        msgspec.structs.replace(first.job, formed=1.5, attempt=2, git_commit="c0ffee")
    )
    again = open_new(tmp_path, _job(1), "0" * 8)
    assert (again.folder.path, again.job) == (first.folder.path, first.job)
    other = open_new(tmp_path, _job(2), "1" * 8)
    assert other.folder.path != first.folder.path
    assert other.job.attempt == 1


def test_one_live_job_and_attempts_that_count(tmp_path: Path) -> None:
    at, root = tmp_path / "mine", tmp_path / "runs"

    def begin(pid: int, *, fresh: bool = False, is_successor: bool = False) -> OpenRun:
        return open_named(root, _job(pid), f"{pid:08x}", at, fresh=fresh, is_successor=is_successor)

    first = begin(1)
    with pytest.raises(RunRefused, match=r"job train \(process 1 of h\) runs in .*: stop it first"):
        begin(2)
    _end(first, "failed")
    (at / "events.jsonl").write_text("{}\n")
    (at / "incidents").mkdir()
    (at / "incidents/0001.json").touch()
    assert already_succeeded(at) == ""
    second = begin(2)
    assert (second.job.attempt, second.folder.result()) == (2, None)
    second.close()
    assert (at / "incidents/1-0001.json").exists()
    taken = begin(3, is_successor=True)  # a master that takes over: the same job
    assert (taken.job.attempt, taken.job.began) == (2, 2.0)
    _end(taken, "succeeded")
    assert already_succeeded(at) == (
        f"job train has already succeeded at step 120 (in {at}); --fresh runs it again"
    )
    (at / "of-a-person").write_text("")
    third = begin(4, fresh=True)
    third.close()
    assert third.job.attempt == 1
    assert sorted(path.name for path in at.iterdir()) == [
        ".lock", "job.json", "of-a-person", "previous",
    ]  # fmt: skip
    assert already_succeeded(at / "previous" / "1")
    assert (at / "previous/1/events.jsonl").exists()
    (only,) = all_runs(root)
    assert only.path.resolve() == at


@pytest.mark.parametrize(
    ("words", "differs"),
    [
        ("script a.py 1", ""),
        ("script ./a.py 1", ""),
        ("script b.py 1", "it ran the script a.py, this is b.py"),
        ("module a 1", "it ran the script a.py, this is the module a"),
        ("script a.py 2", "its argument 1 was '1', here it is '2'"),
        ("script a.py", "its argument 1 was '1', here it is none"),
        ("script a.py 1 --\x1b", "its argument 2 was none, here it is '--\\x1b'"),
        ("", ""),
    ],
)
def test_another_program_has_succeeded_there(tmp_path: Path, words: str, differs: str) -> None:
    job = _job(1, program=("script", "a.py", "1"), workdir=str(tmp_path))
    first = open_named(tmp_path / "runs", job, "0" * 8, tmp_path, fresh=False, is_successor=False)
    _end(first, "succeeded")
    now = RankProgram(tuple(words.split()), str(tmp_path))
    if not differs:
        assert already_succeeded(tmp_path, now).endswith("--fresh runs it again")
        return
    with pytest.raises(RunRefused) as refused:
        already_succeeded(tmp_path, now)
    assert str(refused.value) == (
        f"job train has already succeeded in {tmp_path} with another program: {differs}; "
        "start over there (--fresh), or use another folder (--run-dir)"
    )


def test_the_same_words_in_another_folder_are_another_script(tmp_path: Path) -> None:
    job = _job(1, program=("script", "a.py"), workdir=str(tmp_path))
    first = open_named(tmp_path / "runs", job, "0" * 8, tmp_path, fresh=False, is_successor=False)
    _end(first, "succeeded")
    with pytest.raises(RunRefused, match=r"it ran the script .*/a\.py, this is .*/b/a\.py"):
        already_succeeded(tmp_path, RankProgram(("script", "a.py"), str(tmp_path / "b")))


def test_a_job_whose_launcher_has_gone_before_its_master_runs(tmp_path: Path) -> None:
    gone = {"host": os.uname().nodename, "pid": os.getpid(), "started": 1}
    run = open_new(tmp_path, JobRecord(name="train", **gone), "0" * 8)
    assert run.folder.state() == "waiting"
    assert prune(tmp_path, 0.0) == {}
    run.close()
    assert run.folder.state() == "lost"
    assert prune(tmp_path, 0.0) == {"train-00000000": None}


def test_a_master_after_another_does_not_begin_afresh_again(tmp_path: Path) -> None:
    for _ in range(2):
        open_named(tmp_path, _job(1), "0" * 8, tmp_path, fresh=True, is_successor=False).close()
        (tmp_path / "events.jsonl").touch()
    assert not (tmp_path / "previous").exists()


def test_one_that_was_submitted_is_the_same_job(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_job(JobRecord(name="train", began=1.0))
    run = open_named(tmp_path / "runs", _job(7), "0" * 8, tmp_path, fresh=False, is_successor=False)
    assert (run.job.attempt, run.job.began, run.job.pid) == (1, 1.0, 7)
    folder.prepare_restart()  # resumed
    assert (job := folder.job()) is not None
    assert (job.attempt, job.pid) == (2, 0)


FULL = """
from pathlib import Path
from elasticrun.host.doctor.verdict import ok
from elasticrun.host.runs.layout import RunFolder, RunResult, lock_folder
folder = RunFolder(Path({place!r}))
held = lock_folder(folder.path)
try:
    with open(folder.path / "full", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
except OSError:
    folder.write_result(RunResult(state="succeeded"))
found = [ok("result", folder.state())]
"""


def test_a_disk_that_has_become_full_takes_the_result(tmp_path: Path) -> None:
    setup = f"mount -t tmpfs -o size=1m tmpfs '{tmp_path}'"
    (only,) = found(FULL.format(place=str(tmp_path)), setup=setup, apart=("--mount",))
    assert only.seen == "succeeded"


def test_a_folder_without_a_list_of_runs(tmp_path: Path) -> None:
    run = open_named(
        Path(os.devnull), _job(1), "0" * 8, tmp_path / "mine", fresh=False, is_successor=False
    )
    assert run.folder.job() == _job(1)
