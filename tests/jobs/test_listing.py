"""`elasticrun list`, `elasticrun prune`, and what is left of a job that has ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec import structs

from elasticrun.cli.main import main
from elasticrun.cli.settings import UsageError
from elasticrun.host import user_folder
from elasticrun.host.runs.index import make_run
from elasticrun.host.runs.layout import JobRecord, RunFolder, RunResult
from elasticrun.host.system.processes import ProcessId, boot_id, pid_namespace, start_time
from elasticrun.jobs.manage import listing, nodes
from elasticrun.jobs.rows import JobRow
from elasticrun.jobs.running import incidents, status
from elasticrun.jobs.running.listing import events
from elasticrun.jobs.running.master_lookup import NotAnswered, find_master
from tests import needs
from tests.harness import LIMIT
from tests.master.people import serving, told


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("ELASTICRUN_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def _run(root: Path, name: str, launch: int, result: RunResult | None = None) -> RunFolder:
    """Of a job that began 100 s times `launch` ago, whose launcher is gone."""
    folder = RunFolder(make_run(root, name, f"{launch:08x}"))
    job = JobRecord(
        name=name, began=time.time() - 100.0 * launch, host=os.uname().nodename, pid=os.getpid(),
        started=1, boot_id=boot_id(), pid_namespace=pid_namespace(),
        nodes="1:4", command=("elasticrun", "train.py"),
    )  # fmt: skip
    folder.write_job(job)
    if result is not None:
        folder.write_result(result)
    return folder


def _several(root: Path) -> None:
    now = time.time()
    ended = RunResult(state="succeeded", step=120, nodes=2, restarts=1, ended=now - 30.0)
    _run(root, "train", 1, ended)
    lost = _run(root, "train-large", 2)
    (lost.path / "progress.csv").write_text("time,round,step,loss\n1.0,1,41,0.5\n1.1,1,42,0.4\n")
    failed = _run(root, "eval", 3, RunResult(state="failed", reason="no restart", ended=1.0))
    (failed.path / "error.txt").write_text("rank 1 failed (ValueError: bad)\n")


def test_an_unreadable_home_is_not_no_jobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", "/proc/nope")
    for name in ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert listing.main([]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "cannot be read: " in told.err


def test_ended_and_lost_jobs_are_listed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listing.main([]) == 0
    assert capsys.readouterr().out.startswith(
        "you have no jobs on this host; `elasticrun train.py` starts"
    )
    _several(root)
    assert listing.main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "NAME         ID        STATE      NODES  STEP  RESTARTS  AGE  WHERE",
        "train        00000001  succeeded  2/4    120   1         1m   local",
        "train-large  00000002  lost       0/4    42    0         3m   local",
        "eval         00000003  failed     0/4    -     0         5m   local",
    ]
    assert listing.main(["-o", "json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert (first["name"], first["step"], first["max_nodes"]) == ("train", 120, 4)
    assert list(first) == list(JobRow.__struct_fields__)


def test_the_step_of_a_job_that_was_saved_is_the_one_in_storage(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(root, "train", 1, RunResult(state="saved", step=69, saved=67))
    _run(root, "night", 2, RunResult(state="saved", step=69, saved=57, suspended=True))
    _run(root, "eval", 3, RunResult(state="stopped", step=69, suspended=True))
    _run(root, "begun", 4, RunResult(state="interrupted", step=3))
    _run(root, "over", 6, RunResult(state="stopped", step=9, saved=8))
    gone = {"state": "continued", "continued_by": "0badcafe"}
    _run(root, "gone", 5, RunResult(**gone, step=9, saved=7))
    assert listing.main(["-o", "json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    found = {name: (row["state"], row["saved"], row["step"]) for name, row in rows.items()}
    assert found == {
        "train": ("saved", 67, 69),
        "night": ("suspended", 57, 69),
        "eval": ("suspended", -1, 69),
        "begun": ("interrupted", -1, 3),
        "over": ("stopped", 8, 9),
        "gone": ("continued", 7, 9),
    }
    assert listing.main([]) == 0
    told = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = {line[0].strip(): [cell.strip() for cell in line if cell][2:5:2] for line in told[1:]}
    assert cells == {
        "train": ["saved at step 67", "67"],
        "night": ["suspended at step 57", "57"],
        "eval": ["suspended", "69"],
        "begun": ["interrupted", "3"],
        "over": ["stopped at step 8", "8"],
        "gone": ["continued by 0badcafe", "7"],
    }
    assert status.main(["gone"], {}) == 0
    told_of_it = capsys.readouterr().out
    assert "continued by: run 0badcafe; see elasticrun status 0badcafe\n" in told_of_it
    assert "to resume" not in told_of_it


def test_the_newest_ended_ones_where_not_all_are_asked_for(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "MAX_ENDED", 1)
    _several(root)
    for words, count in (([], 1), (["-A"], 3)):
        assert listing.main(words) == 0
        assert len(capsys.readouterr().out.splitlines()) == 1 + count


async def test_one_that_runs_is_listed_by_what_its_master_says(root: Path) -> None:
    _several(root)
    mine = _run(root, "mine", 9)
    mine.write_job(structs.replace(mine.job() or JobRecord(name=""), where="slurm"))
    async with serving() as served:
        entry = user_folder.Published(
            "job", "127.0.0.1", served.endpoint.port, "", ProcessId.own(),
            run=str(mine.path), name="mine",
        )  # fmt: skip
        user_folder.publish(user_folder.user_folder(os.environ), entry)
        code, out, err = await told(sys.executable, "-m", "elasticrun", "list", **os.environ)
        assert (code, err) == (0, "")
        first = out.splitlines()[1]
        assert first.split()[:3] == ["mine", "00000009", "running"]
        assert first.endswith("slurm")
        assert out.count("\nmine ") == 1  # its master is here, although it was not started here
        code, out, err = await told(
            sys.executable, "-m", "elasticrun", "status", "mi", **os.environ
        )
        assert (code, err) == (0, "")
        assert "round 1" in out


def test_a_job_that_ends_while_its_master_is_asked(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:  # nobody listens there
        closed.bind(("127.0.0.1", 0))
        for name, result, code in (
            ("done", RunResult(state="succeeded", ended=1.0), 0),
            ("deaf", None, 1),
        ):
            run = _run(root, name, 1, result)
            if result is None:
                alive = start_time(os.getpid()) or 1
                job = structs.replace(run.job() or JobRecord(name=""), started=alive)
                run.write_job(job)
            entry = user_folder.Published(
                name, "127.0.0.1", closed.getsockname()[1], "",
                ProcessId.own(), run=str(run.path), name=name,
            )  # fmt: skip
            left = user_folder.publish(user_folder.user_folder(os.environ), entry)
            for verb in (
                listing.main,
                nodes.main,
                lambda words, name=name: status.main([name, *words], {}),
            ):
                assert verb(["-o", "json"]) == code, (name, verb)
                said = capsys.readouterr().err
                assert ("does not answer" in said, "no job" in said) == (code == 1, False)
            if code:
                (run.path / "events.jsonl").write_text(
                    '{"time": 1.0, "number": 1, "level": "info", "text": "round 1 begins"}\n'
                )
                assert status.main([name], {}) == 1
                told = capsys.readouterr()
                assert (
                    "does not answer (Connection refused); its ranks may keep training" in told.err
                )
                assert "state in its run folder: waiting" in told.out
                assert "last event: round 1 begins" in told.out
                assert events([name]) == 0
                told = capsys.readouterr()
                assert told.out.endswith("info     round 1 begins\n")
                assert "its ranks may keep training" in told.err
            left.unlink()


@pytest.mark.slow
def test_a_container_with_the_same_home_takes_nobodys_job(root: Path) -> None:
    """The processes of its host are unknown there, and not dead."""
    needs.namespaces("--pid", "--mount-proc")
    run = _run(root, "train", 1)
    alive = start_time(os.getpid()) or 1
    run.write_job(structs.replace(run.job() or JobRecord(name=""), started=alive))
    apart = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        entry = user_folder.Published(
            "job", "127.0.0.1", deaf.getsockname()[1], "", ProcessId.own(), run=str(run.path),
            name="train",
        )  # fmt: skip
        file = user_folder.publish(user_folder.user_folder(os.environ), entry)
        words = [*apart, sys.executable, "-m", "elasticrun", "list", "-o", "json"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert [(row["name"], row["state"]) for row in json.loads(done.stdout)] == [
        ("train", "waiting")
    ], done.stderr
    assert file.exists()
    assert run.result() is None


def test_what_is_left_of_one(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _several(root)
    assert status.main(["eva"], {}) == 0
    told = capsys.readouterr().out
    for line in ("outcome: no restart", "command: elasticrun train.py", "rank 1 failed (ValueErr"):
        assert f"\n{line}" in told
    assert status.main(["train-large"], {}) == 0
    assert "\nprogress: loss 0.4 at step 42\n" in capsys.readouterr().out
    with pytest.raises(NotAnswered, match=r"job eval has ended \(failed\): no restart; see "):
        find_master("eval")
    pid = os.getpid()
    why = f"its launcher, process {pid} of {os.uname().nodename}, has exited without a result"
    assert status.main(["train-large"], {}) == 0
    assert f"outcome: {why}; its last reported step is 42\n" in capsys.readouterr().out
    monkeypatch.chdir(root)
    (lost,) = root.glob("train-large-*")
    lost.rename("a path")
    for words in (["status"], ["events"], ["incidents"]):
        assert main([*words, "a path"]) == 0
    capsys.readouterr()
    Path("a path").rename(lost)
    assert incidents.main(["train-large"]) == 0
    assert f"no incident yet; the job is lost: {why}" in capsys.readouterr().out


def test_a_name_of_several_jobs_changes_none_of_them(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [_run(root, "train", n, RunResult(state="failed", reason=f"why {n}")) for n in (1, 2)]
    for words in (
        ["delete", "train"], ["suspend", "train"], ["resume", "train"], ["prune", "train"],
        ["scale", "train", "2"], ["stop", "train"], ["exec", "train", "--", "true"],
        ["delete", "train", "--on", "k8s"],
    ):  # fmt: skip
        assert main(words) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert "2 jobs are called train, and none of them runs: 00000001 (failed" in said.err, (
            words,
            said.err,
        )
        assert all(run.job() and run.result() for run in runs)
    assert main(["status", "train"]) == 0
    assert "outcome: why 1" in capsys.readouterr().out  # the newest
    assert main(["status", "00000002"]) == 0
    assert "outcome: why 2" in capsys.readouterr().out
    assert main(["delete", "00000002"]) == 0
    assert [run.job() is not None for run in runs] == [True, False]


def test_a_job_that_was_started_by_hand_is_resumed_by_its_own_command(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(root, "train", 1, RunResult(state="saved", exit_code=99, ended=1.0))
    job = run.job()
    assert job is not None
    run.write_job(structs.replace(job, workdir="/my code", command=("elasticrun", "a b.py")))
    assert main(["resume", "train"]) == 1
    said = capsys.readouterr().err
    assert "job train was not started by `elasticrun submit`" in said
    assert said.endswith("repeat its command: cd '/my code' && elasticrun 'a b.py'\n")


def test_prune(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _several(root)
    running = _run(root, "running", 5)
    alive = structs.replace(running.job() or JobRecord(name=""), started=start_time(os.getpid()))
    running.write_job(alive)
    with pytest.raises(UsageError, match="give --since 7d"):
        listing.prune([])
    with pytest.raises(UsageError, match="write 90s, 30m"):
        listing.prune(["--since", "7 days"])
    assert listing.prune(["running"]) == 1
    assert "job running is waiting: `elasticrun stop running` ends it" in capsys.readouterr().err
    assert listing.prune(["evil"]) == 1
    assert "did you mean eval?" in capsys.readouterr().err
    assert listing.prune(["--since", "7d"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "removed eval-00000003"
    assert listing.prune(["train", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": ["train-00000001"], "placed": []}
    placed = RunFolder(make_run(root, "mine", "0badcafe", root.parent / "mine"))
    placed.write_job(JobRecord(name="mine"))
    placed.write_result(RunResult(state="stopped", ended=1.0))
    assert listing.prune([str(placed.path)]) == 0
    assert f"{placed.path} is no longer listed, but stays" in capsys.readouterr().out
    left = sorted(path.name for path in root.iterdir())
    assert left == ["running-00000005", "train-large-00000002"]
