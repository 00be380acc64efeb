"""Run folders as files: how a job stands by them, which one is meant, which ones go."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elasticrun.host.runs import index
from elasticrun.host.runs.claim import Claimed, claimed
from elasticrun.host.runs.index import (
    NoRun,
    SeveralRuns,
    all_runs,
    find,
    keep_newest,
    make_run,
    prune,
    runs_root,
)
from elasticrun.host.runs.last_word import LastWord
from elasticrun.host.runs.layout import JobRecord, LocalAgent, RunFolder, RunResult, Starting
from elasticrun.host.system.processes import ProcessId

ME = ProcessId.own()
ELSEWHERE = {"boot_id": "another", "host": "elsewhere"}
HERE: dict[str, Any] = {
    "host": ME.host,
    "boot_id": ME.boot,
    "pid": ME.pid,
    "started": ME.started,
    "pid_namespace": ME.namespace,
    "began": 1000.0,
}


def _run(
    root: Path, name: str, result: str = "", ended: float = 0.0, at: Path | None = None, **job: Any
) -> RunFolder:
    folder = RunFolder(make_run(root, name, secrets.token_hex(4), at))
    folder.write_job(JobRecord(name=name, **{**HERE, **job}))
    if result:
        folder.write_result(RunResult(state=result, step=7, ended=ended))
    return folder


@pytest.mark.parametrize(
    ("job", "result", "state"),
    [
        ({}, "", "waiting"),
        ({"formed": 1001.0}, "", "running"),
        ({"formed": 1001.0}, "succeeded", "succeeded"),
        ({"formed": 1001.0, "started": 1}, "", "lost"),
        ({"formed": 1001.0, "boot_id": "an earlier start"}, "", "lost"),
        ({"formed": 1001.0, **ELSEWHERE}, "", "running"),
        ({"formed": 1001.0, "host": "the name before"}, "", "running"),
        ({"started": 1}, "failed", "failed"),
        ({"pid": 0, "where": "slurm"}, "", "submitted"),
    ],
)
def test_how_a_job_stands(tmp_path: Path, job: dict[str, Any], result: str, state: str) -> None:
    assert _run(tmp_path, "train", result, **job).state() == state


@pytest.mark.parametrize(
    ("own", "last", "state"),
    [
        ({}, "", "submitted"),  # however long it checks out code
        ({"started": 1}, "", "lost"),
        ({"started": 1}, "a rank's words\n", "lost"),
        ({"started": 1}, LastWord("no such commit"), "failed"),
        ({"started": 1, "began": 1e12}, LastWord("of an earlier start"), "lost"),
        ({"boot_id": "an earlier start"}, "", "lost"),
        ({"host": "the name before", "started": 1}, "", "lost"),
        ({**ELSEWHERE, "started": 1}, "", "submitted"),
    ],
)
def test_a_job_that_has_not_begun_is_over_when_its_processes_have_gone(
    tmp_path: Path, own: dict[str, Any], last: str | LastWord, state: str
) -> None:
    process = {**HERE, **own}
    run = _run(tmp_path, "train", pid=0, host=process["host"], began=process["began"])
    if isinstance(last, LastWord):
        (run.path / "last-word.json").write_bytes(msgspec.json.encode(last))
    else:
        (run.path / "console.log").write_text(last)
    agent = JobRecord(name="", **{**process, "began": 0.0}).process
    known = Starting(agents=(LocalAgent("node0", agent),))
    (run.path / "submitted.json").write_bytes(msgspec.json.encode(known))
    assert run.state() == state


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("", -1),
        ("time,round,step\n", -1),
        ("time,round,step\n1.5,1,12\n", 12),
        ("time,round,step,loss\n1.5,1,12,0.1\n2.5,1,13,0.1\n2.6,1,1", 13),  # a row in the making
        ("time,round\n1.5,1\n", -1),
        ("time,round,step\n" + "1.25,1,99\n" * 20000, 99),
    ],
)
def test_the_last_step(tmp_path: Path, text: str, step: int) -> None:
    (tmp_path / "progress.csv").write_text(text)
    run = RunFolder(tmp_path)
    assert run.last_step() == step
    run.write_result(RunResult(state="stopped", step=50))
    assert run.last_step() == max(step, 50)


def test_a_job_that_was_resumed_is_at_the_step_that_it_goes_on_from(tmp_path: Path) -> None:
    """Its last start told 57 at its end, has a row of step 55, and a checkpoint of step 50."""
    run = RunFolder(tmp_path)
    run.write_job(JobRecord(name="train", began=1.0, pid=7))
    progress = tmp_path / "progress.csv"
    progress.write_text("time,round,step\n2.5,1,55\n")
    run.write_result(RunResult(state="saved", step=57, saved=50))
    assert run.last_step() == 57
    run.prepare_restart()
    assert run.last_step() == 50
    run.prepare_restart()  # its launcher has failed before it wrote a result
    assert run.last_step() == 50
    with progress.open("a") as file:
        file.write(f"{time.time() + 1.0},1,51\n")
    assert run.last_step() == 51


def test_a_file_that_is_none_of_ours_says_nothing(tmp_path: Path) -> None:
    for text in ("", "{", "[1]", '{"name": 7}', "\xff\xfe"):
        (tmp_path / "job.json").write_text(text, encoding="latin-1")
        assert RunFolder(tmp_path).job() is None, text
    (tmp_path / "job.json").write_text('{"name": "t", "of a later version": 1}')
    assert RunFolder(tmp_path).job() == JobRecord(name="t")
    assert RunFolder(tmp_path / "missing").state() == "lost"


def test_an_argument_that_is_no_text_is_written_as_far_as_it_is(tmp_path: Path) -> None:
    job = _run(tmp_path, "train", command=("train.py", os.fsdecode(b"a\xffb"), "né")).job()
    assert job is not None
    assert job.command == ("train.py", "a?b", "né")


def test_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    root = tmp_path / ".local/state/elasticrun/runs"
    assert runs_root({}) == runs_root({"XDG_STATE_HOME": "not/absolute"}) == root
    assert runs_root({"XDG_STATE_HOME": "/state"}) == Path("/state/elasticrun/runs")
    assert runs_root({"XDG_STATE_HOME": "/state", "ELASTICRUN_RUNS": "/runs"}) == Path("/runs")
    assert all_runs(root) == []


def test_which_one_is_meant(tmp_path: Path) -> None:
    old = _run(tmp_path, "train", began=1.0, result="succeeded")
    new = _run(tmp_path, "train", began=2.0, id="run17")
    other = _run(tmp_path, "eval-large", began=3.0)
    _run(tmp_path, "eval-small", began=4.0)
    for wanted, run in (
        ("run17", new),
        (old.path.name, old),
        (old.id, old),
        ("eval-l", other),
    ):
        assert find(tmp_path, wanted).path == run.path, wanted
    for wanted, sentence in (
        ("eval", "several jobs match eval: eval-large, eval-small; name one"),
        ("eval-larg3", "did you mean eval-large?"),
        ("xyz", "there is eval-large, eval-small, train"),
    ):
        with pytest.raises(NoRun, match=sentence):
            find(tmp_path, wanted)
    placed = _run(tmp_path, "placed", at=tmp_path / "mine" / "one")
    assert placed.path == tmp_path / "mine" / "one"
    found = find(tmp_path, str(placed.path))  # as it is listed
    assert (found.path.parent, found.place) == (tmp_path, placed.path)
    assert find(tmp_path, "eval-large", whole="delete").path == other.path
    for wanted in ("tr", "eval-l", "eval"):
        with pytest.raises(NoRun, match="delete needs the full name or the id; there is"):
            find(tmp_path, wanted, whole="delete")
    with pytest.raises(NoRun, match=r"no job train has a run folder in [^;]*$"):
        find(tmp_path / "missing", "train")


def test_a_name_that_several_jobs_have(tmp_path: Path) -> None:
    """The one that lives, else none but for verbs that only look: those show the newest."""
    old = _run(tmp_path, "train", began=1.0, result="failed")
    new = _run(tmp_path, "train", began=2.0, result="succeeded")
    for wanted in ("train", "tr"):
        none = f"2 jobs are called {wanted}, and none of them runs"
        with pytest.raises(SeveralRuns) as several:
            find(tmp_path, wanted)
        for one, state in ((old, "failed"), (new, "succeeded")):
            assert f"{one.id} ({state} since 1970-01-01 " in str(several.value)
        assert str(several.value).startswith(f"{none}: {new.id} (succ")
        assert str(several.value).endswith("; give the id of one")
        assert find(tmp_path, wanted, newest=True).path == new.path
    live = _run(tmp_path, "train", began=0.5)
    assert find(tmp_path, "train").path == find(tmp_path, "tr").path == live.path
    with pytest.raises(SeveralRuns, match="3 jobs are called train"):
        find(tmp_path, "train", whole="delete")
    assert find(tmp_path, old.id, whole="delete").path == old.path
    suspended = _run(tmp_path, "train", began=0.7)
    suspended.write_result(RunResult(state="saved", suspended=True))
    for newest in (False, True):
        with pytest.raises(
            SeveralRuns, match=r"2 jobs are .* \(suspended since .* \(waiting since"
        ):
            find(tmp_path, "train", newest=newest)


@pytest.mark.parametrize(
    ("before", "result", "step", "continued"),
    [
        ({}, {}, 68, True),
        ({}, {}, 66, False),  # it has begun from an older step, or from the beginning
        ({}, {"suspended": True}, 68, False),  # it is resumed by its name
        ({}, {"state": "stopped"}, 68, True),
        ({}, {"state": "failed"}, 68, False),
        ({}, {"saved": -1}, 68, False),
        ({}, {"ended": 1001.0}, 68, False),  # it ran at the same time
        ({"program": ("script", "other.py")}, {}, 68, False),
        ({"workdir": "/other"}, {}, 68, False),
    ],
)
def test_a_saved_job_that_another_run_continues(
    tmp_path: Path, before: dict[str, Any], result: dict[str, Any], step: int, continued: bool
) -> None:
    same = {"program": ("script", "train.py"), "workdir": "/work"}
    old = _run(tmp_path, "train", **{**same, **before})
    old.write_result(RunResult(**{"state": "saved", "saved": 67, "ended": 999.0, **result}))
    before_it = old.result()
    new = _run(tmp_path, "train", **same)
    again = _run(tmp_path, "train", **same, attempt=2)
    index.mark_continued(tmp_path, again, 1000)
    assert old.result() == before_it
    index.mark_continued(tmp_path, new, step)
    found = old.result()
    assert found is not None
    assert (found.state == "continued", found.continued_by) == (continued, new.id * continued)
    assert [run.path for run in (old, new, again) if run.result()] == [old.path]
    prune(tmp_path, 0.0)
    assert old.path.exists() != (continued or result.get("state") == "failed")


def test_jobs_that_nobody_has_named(tmp_path: Path) -> None:
    """Each is called after its script and its id, and found by its script too."""
    jobs = []
    for number in range(2):
        launch = f"{number}{secrets.token_hex(4)[1:]}"
        folder = RunFolder(make_run(tmp_path, "train", launch))
        folder.write_job(JobRecord(name=f"train-{launch[:4]}", launch=launch, **HERE))
        folder.write_result(RunResult(state="failed"))
        jobs.append((f"train-{launch[:4]}", folder))
    for name, folder in jobs:
        assert find(tmp_path, name, whole="delete").path == folder.path
    with pytest.raises(SeveralRuns, match="2 jobs are called train"):
        find(tmp_path, "train")
    with pytest.raises(NoRun, match="delete needs the full name or the id; there is tr"):
        find(tmp_path, "train", whole="delete")
    named = _run(tmp_path, "train", result="failed")  # whose whole name it is
    assert find(tmp_path, "train").path == named.path
    _run(tmp_path, "training", result="failed")
    with pytest.raises(NoRun, match="several jobs match trai: "):
        find(tmp_path, "trai", newest=True)


def test_what_goes(tmp_path: Path) -> None:
    now, root = time.time(), tmp_path / "runs"
    running = _run(root, "running")
    old = _run(root, "old", "failed", ended=now - 1000.0)
    new = _run(root, "new", "succeeded", ended=now - 10.0)
    lost = _run(root, "lost", started=1)
    saved = _run(root, "saved", "saved", ended=now - 1000.0)
    placed = _run(root, "placed", "stopped", ended=now - 1000.0, at=tmp_path / "mine")
    (root / "none-of-ours").mkdir()
    assert prune(root, 100.0, only=[old.path]) == {old.path.name: None}
    assert list(prune(root, 100.0).values()) == [placed.path]
    assert placed.result() is not None  # what a person has placed stays
    assert sorted(prune(root, 0.0)) == sorted([new.path.name, lost.path.name])
    assert {folder.path for folder in all_runs(root)} == {running.path, saved.path}
    assert prune(root, 0.0, only=[saved.path])
    assert (root / "none-of-ours").is_dir()


def test_no_more_ended_ones_than_a_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_ENDED", 2)
    runs = [_run(tmp_path, f"job{at}", "failed", began=float(at)) for at in range(4)]
    running = _run(tmp_path, "running")
    foreign = make_run(tmp_path, "no-job-yet", "0" * 8)
    for at, path in enumerate([foreign, running.path, *(run.path for run in runs)]):
        os.utime(path, (at, at))
    keep_newest(tmp_path)
    left = {folder.path for folder in all_runs(tmp_path)}
    assert left == {running.path, runs[2].path, runs[3].path}
    assert foreign.is_dir()


@pytest.mark.parametrize(
    ("before", "works"),
    [
        ((), True),
        (("1 1 {namespace} {boot} {host}",), True),  # another process has that pid
        (("1 {started} {namespace} an-earlier-start {host}", "none of ours"), True),
        (("1 {started} {namespace} {boot} {host}",), False),
        (("1 1 {namespace} another elsewhere",), False),
    ],
)
def test_a_name_is_claimed_by_one_process(
    tmp_path: Path, before: tuple[str, ...], works: bool
) -> None:
    for number, whose in enumerate(before, start=1):
        own = dataclasses.asdict(ProcessId.of(1))
        (tmp_path / f".a_b-claim-{number}").symlink_to(whose.format(**own))
    has = False
    with contextlib.suppress(Claimed), claimed(tmp_path, "a b"), claimed(tmp_path, "a"):
        has = True
        with pytest.raises(Claimed), claimed(tmp_path, "a b"):
            pass
    assert has == works
    assert len(list(tmp_path.iterdir())) == (0 if works else len(before))


def test_one_that_is_placed_is_listed_once(tmp_path: Path) -> None:
    for _ in range(2):
        _run(tmp_path / "runs", "train", at=tmp_path / "mine")
    (only,) = all_runs(tmp_path / "runs")
    assert only.path.is_symlink()
    assert only.path.resolve() == tmp_path / "mine"
