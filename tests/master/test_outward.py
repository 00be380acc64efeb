"""What goes out of the master: files of incidents, events for another program."""

from __future__ import annotations

import csv
import http.server
import json
import os
import re
import socket
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import pytest

from elasticrun import __version__
from elasticrun.config import Identity, MasterConfig, MasterPlan, RunPlan
from elasticrun.core.events import FoundSlow, JobOver, Note
from elasticrun.core.job.views import nothing_yet
from elasticrun.core.reasons import (
    AllLeft,
    ByOperator,
    Completed,
    Reason,
    Said,
    Saved,
    code,
    text,
)
from elasticrun.core.rounds.failures import what_happened
from elasticrun.core.sight.picture import (
    Goodput,
    IncidentRow,
    LedgerRow,
    PhaseRow,
    Picture,
    StackRow,
    VerdictRow,
)
from elasticrun.host.log import NOTICE
from elasticrun.host.runs.index import make_run
from elasticrun.host.runs.layout import JobRecord, RunFolder, RunResult
from elasticrun.host.runs.opening import OpenRun
from elasticrun.host.system import processes
from elasticrun.host.system.sandbox import NoThread
from elasticrun.master.outward import appended, notify, tensorboard
from elasticrun.master.outward.appended import Appended, ProgressFile, ProgressRow
from elasticrun.master.outward.notify import Notifier
from elasticrun.master.outward.outward import Outward
from elasticrun.master.outward.record import git_commit, result_of
from elasticrun.master.outward.report import NOTHING, error_page, page, table, verdict
from elasticrun.master.outward.run_files import RunFiles, read
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName
from tests import needs
from tests.master.people import LIMIT

ROW = IncidentRow(
    number=7,
    cause="rank_failed",
    sentence="rank 3 on node b failed (ValueError: bad)",
    followed="ranks 0-2: lost its connection to another rank",
    decision="restart 1: rank 3 on node b: ValueError: bad; 2 left",
    age=4000.0,
    round=2,
    node="b",
    rank=3,
    over=True,
    excluded=("b",),
    phases=(PhaseRow("stop", 0.5), PhaseRow("warm", 1.25)),
    steps_lost=12,
    slot_seconds=7.0,
    cost=12.5,
    restarted=0.5,
    first_step=1.75,
    last_lines="step 9\n\x1b[31mValueError: bad\n```",
    stacks=(StackRow("3", 1, "", "train.py:88 load_shard"),),
)


def _opened(folder: Path) -> OpenRun:
    folder.mkdir(parents=True, exist_ok=True)
    return OpenRun(RunFolder(folder), JobRecord(name="train", workdir=str(folder)))


def test_a_record_is_a_page_for_people_and_a_file_for_programs(tmp_path: Path) -> None:
    files = RunFiles(lambda: _opened(tmp_path / "run"), "")
    assert not files.folder, "nothing is made where nothing happens"
    files.filed(msgspec.structs.replace(ROW, over=False))
    files.filed(ROW)
    end = JobOver(1, "no restart is left")
    goodput = Goodput("goodput", 0.5, 0.6, 14.0, (LedgerRow("step", "", 7.0),), "goodput 50.0 %")
    known = {"job_id": "run", "restart_count": 3, "last_failure": "rank 3: bad", "age": 60.0}
    status = msgspec.structs.replace(nothing_yet(None), **known)
    files.over(result_of(end, Picture(status, incidents=(ROW,), goodput=goodput)))
    files.noted(Note("round 1 begins", "warning", number=1))
    files.formed("h:1")
    files.close(LIMIT)
    run = RunFolder(tmp_path / "run")
    names = ["error.txt", "events.jsonl", "incidents", "job.json", "result.json"]
    assert sorted(path.name for path in run.path.iterdir()) == names
    folder = run.path / "incidents"
    assert sorted(path.name for path in folder.iterdir()) == ["0007.json", "0007.md"]
    event = json.loads((run.path / "events.jsonl").read_text())
    assert event.pop("time") == pytest.approx(time.time(), abs=60.0)
    assert event == {"number": 1, "level": "warning", "text": "round 1 begins"}
    job = run.job()
    assert job is not None
    assert (job.endpoint, job.formed > 0, job.versions["elasticrun"]) == ("h:1", True, __version__)
    text = (run.path / "result.json").read_text()
    assert text.endswith("\n}\n")  # for reading
    found = json.loads(text)
    assert found["ended"] - found["started"] == pytest.approx(60.0)
    for name, value in {
        "job": "run",
        "state": "failed",
        "exit_code": 1,
        "reason": "no restart is left",
        "failure": "rank 3: bad",
        "restarts": 3,
        "goodput": json.loads(msgspec.json.encode(goodput)),
    }.items():
        assert found[name] == value
    (short,) = found["incidents"]
    assert (short["number"], short["seconds"], short["cost"]) == (7, 1.75, 12.5)
    assert (short["restarted"], short["first_step"]) == (0.5, 1.75)
    assert read(folder, 0.0) == [ROW]
    (later,) = read(folder, (folder / "0007.json").stat().st_mtime + 60.0)
    assert later.age == pytest.approx(ROW.age + 60.0)
    text = (folder / "0007.md").read_text()
    assert text == page(ROW)
    assert text.startswith("# Incident 7: rank 3 on node b failed (ValueError: bad)\n")
    for part in (
        "A rank failed, in round 2.",
        "- **Then**: ranks 0-2: lost its connection",
        "- **Decision**: restart 1",
        "- **Excluded**: b",
        "- **Way back**: restarted in 0.50 s, first step after 1.75 s",
        "| warm | 1.25 | until the first collective or step |",
        "| **all** | **1.75** | |",
        "**Cost**: 0.00194 slot-hours (7.0 slot-seconds), cost 12.50, and 12 steps",
        "rank 3:\n\n    train.py:88 load_shard",
        "## Last lines of rank 3\n\n    step 9\n    \ufffd[31mValueError: bad\n    ```",
    ):
        assert part in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("exit_code", "reason", "state"),
    [
        (0, Completed(), "succeeded"),
        (99, Saved(AllLeft(2), 67), "saved"),
        (1, AllLeft(2), "interrupted"),  # by SIGINT, and nothing was saved
        (1, AllLeft(), "failed"),  # a node may leave because it is unfit
        (1, Saved(ByOperator("stopped", "ada", ""), 67), "stopped"),
        (93, Said("a rank failed"), "failed"),
    ],
    ids=str,
)
def test_the_state_of_a_job_at_its_end(exit_code: int, reason: Reason, state: str) -> None:
    end = JobOver(exit_code, text(reason), code=code(reason))
    assert result_of(end, Picture(nothing_yet(None))).state == state


async def test_the_first_step_of_a_job_shows_which_run_it_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later master's first step shows nothing: the job may have begun at step 0."""
    monkeypatch.setenv("ELASTICRUN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("elasticrun.master.outward.outward.RESULT_LIMIT", LIMIT)
    same = {"program": ("script", "train.py"), "workdir": str(tmp_path)}
    old = RunFolder(make_run(tmp_path / "runs", "train", "00000001"))
    old.write_job(JobRecord(name="train", began=1.0, **same))
    old.write_result(RunResult(state="saved", step=69, saved=67, ended=2.0))
    run = RunPlan(name="train", **same)
    config = MasterConfig(Identity("job"), "", 0, None, MasterPlan(run=run))
    for is_successor, state in ((True, "saved"), (False, "continued")):
        outward = Outward(config)
        assert await outward.open(is_successor=is_successor) == ""
        for step in (68, 69):
            outward.stepped(1, step)
        outward.close()
        result = old.result()
        assert result is not None
        assert result.state == state
    assert outward.run_folder.endswith(f"train-{result.continued_by}")


def test_people_are_told_in_a_line_of_each_once_the_ranks_run_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(NOTICE, "elasticrun")
    files = RunFiles(lambda: _opened(tmp_path / "run-1"), f"{tmp_path}/logs", logs=True)
    ended = "the job ends with code 1: no restart is left"
    for row in (
        msgspec.structs.replace(ROW, number=6, over=False, restarted=-1.0, first_step=-1.0),
        msgspec.structs.replace(ROW, over=False, first_step=-1.0),
        ROW,
        msgspec.structs.replace(ROW, number=8, decision=f"{ROW.decision}; {ended}", ended=True),
        msgspec.structs.replace(ROW, number=9, cause="preempted", ended=True),  # as it was told to
    ):
        files.filed(row)
    files.close(LIMIT)
    assert (tmp_path / "run-1" / "incidents" / "0007.md").is_file(), "a link to those of the logs"
    first = "rank 3 on node b failed (ValueError: bad)"
    assert [record.message for record in caplog.records] == [
        f"incident 7: {first}: logs/incidents/run-1/0007.md",
        f"incident 8 ended the job: logs/incidents/run-1/{8:04}.md",
    ]


def test_a_disk_that_refuses_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "incidents").write_text("a file")
    files = RunFiles(lambda: _opened(tmp_path), "")
    files.filed(ROW)
    files.filed(ROW)
    files.close(LIMIT)
    assert len(caplog.records) == 1
    assert "cannot write to the run folder" in caplog.text


def test_what_failed_first_is_a_page_by_itself() -> None:
    row = msgspec.structs.replace(ROW, exitcode=-11, step=412, kind="signal")
    text = error_page(row, 0.0)
    assert text.startswith("rank 3 on node b failed (ValueError: bad)\n\nwhen:       1970-01-01 ")
    for line in ("ended with: signal SIGSEGV", "last step:  412", "verdict:    script"):
        assert f"\n{line}\n" in text
    assert "\n    step 9\n    \ufffd[31mValueError: bad\n" in text
    assert error_page(msgspec.structs.replace(row, cause="scaled"), 0.0) == ""
    for kind, who, whose in (
        ("mismatch", "ranks:      0,3", "script"),
        ("stopped", "rank:       3", "unknown: SIGSTOP has stopped it"),
    ):
        ranks = who.split()[-1]
        found = VerdictRow("certain", kind, "it hangs", 30.0, ranks, "", "", folder="logs/hang-1")
        hung = msgspec.structs.replace(row, cause="hang", kind="hung", verdict=found)
        text = error_page(hung, 0.0)
        assert "ended with" not in text
        for line in (who, f"verdict:    {whose}", "stacks:     logs/hang-1 on node b"):
            assert f"\n{line}" in text
        assert "- **Stacks and counters at its end**: logs/hang-1 on node b\n" in page(hung)


@pytest.mark.parametrize(
    ("kind", "exitcode", "what", "whose"),
    [
        ("script", 1, "ValueError: bad luck", "script"),
        ("script", 1, "OSError: [Errno 113] No route to host", "network"),
        ("script", 1, "CUDA error: uncorrectable ECC error", "hardware"),
        (
            "signal",
            -9,
            "killed by SIGKILL",
            "unknown: a signal from outside the job; the kernel has",
        ),
        ("signal", -15, "killed by SIGTERM", "unknown: a signal from outside the job"),
        ("stuck", 0, "would not die", "hardware"),
        ("oom", -9, "killed by SIGKILL: the kernel was out of memory", "script"),
        ("peer-lost", 1, "", "network"),
        ("peer-lost", 1, "ranks 4,5", "script"),
    ],
)
def test_whose_doing_it_was(kind: str, exitcode: int, what: str, whose: str) -> None:
    before = "4,5" if what == "ranks 4,5" else ""
    failed = m.Failure("h", 6, 0, 1, exitcode, 0, m.FailureKind(kind), what, "", "", before)
    sentence = f"rank 6 failed ({what_happened(failed)})"
    row = msgspec.structs.replace(
        ROW, kind=kind, exitcode=exitcode, sentence=sentence, ended_before=before
    )
    assert verdict(row).startswith(whose)
    lost = msgspec.structs.replace(row, cause="node_lost", kind="")
    assert verdict(lost).startswith("unknown: a lost machine, a network failure")


def test_a_file_that_lines_are_added_to_does_not_grow_without_end(tmp_path: Path) -> None:
    file = Appended(tmp_path / "events.jsonl", 1000)
    for number in range(200):
        file.add(b"%08d\n" % number)
    lines = (tmp_path / "events.jsonl").read_text().split()
    assert lines[-1] == "00000199"
    assert 50 < len(lines) < 112
    assert [int(line) for line in lines] == list(range(200 - len(lines), 200))


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_columns_of_progress_grow(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    file = ProgressFile(path)
    assert file.add([ProgressRow(1.0, 1, 0, {})]) == ""
    assert file.add([ProgressRow(2.0, 1, 1, {"loss": "0.5"})]) == ""
    with path.open("a") as torn:
        torn.write("3.0,1,2,0.")  # by a master that was killed in mid-row
    file = ProgressFile(path)
    file.add([ProgressRow(3.0, 2, 2, {"a, b": "nan"}), ProgressRow(4.0, 2, 3, {"loss": "0.25"})])
    assert [tuple(row.values()) for row in _rows(path)] == [
        ("1.000", "1", "0", "", ""),
        ("2.000", "1", "1", "0.5", ""),
        ("3.0", "1", "2", "0.", ""),
        ("3.000", "2", "2", "", "nan"),
        ("4.000", "2", "3", "0.25", ""),
    ]
    assert list(_rows(path)[0]) == ["time", "round", "step", "loss", "a, b"]
    assert RunFolder(tmp_path).last_step() == 3
    many = {f"m{number}": "1" for number in range(40)}
    assert file.add([ProgressRow(5.0, 2, 4, many)]) == "m30"
    assert len(_rows(path)[-1]) == 3 + 32


def test_a_long_progress_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appended, "MAX_PROGRESS_BYTES", 2000)
    file = ProgressFile(tmp_path / "progress.csv")
    for step in range(400):
        file.add([ProgressRow(1.0, 1, step, {"loss": "0.5"})])
    steps = [int(row["step"]) for row in _rows(tmp_path / "progress.csv")]
    assert steps == sorted(steps)
    assert (steps[-1], len(steps) < 130) == (399, True)
    assert min(steps) < 60, "the beginning of the curve is there yet"


def test_a_step_is_a_row_where_rank_0_says_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = RunFiles(lambda: _opened(tmp_path), "")
    files.stepped(0, 9)
    files.stepped(1, 10)  # before rank 0 of this round could say anything
    rows = (m.MetricRow(11, 5.0, ("0.5", "=cmd()")), m.MetricRow(12, 0.0, ("nan", "1")))
    files.metrics(m.Metrics(RoundName(1, 1, "x"), ("loss", "lr"), rows, 7))
    files.stepped(1, 12)
    files.stepped(2, 13)
    files.close(LIMIT)
    told = [tuple(row.values())[1:] for row in _rows(tmp_path / "progress.csv")]
    assert told == [("0", "9", "", ""), ("1", "11", "0.5", ""), ("1", "12", "nan", "1")]
    assert "progress.csv is incomplete" in caplog.text


def test_a_tensorboard_that_gets_no_thread_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise NoThread(RuntimeError("can't start new thread"))

    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(tensorboard, "start_thread", refuse)
    before = processes.below(os.getpid())
    made = tensorboard.TensorBoard(str(tmp_path), "127.0.0.1", lambda url: None)
    assert "--tensorboard: cannot start TensorBoard: no thread can be started here" in caplog.text
    assert not processes.below(os.getpid()) - before
    made.close(0.0)


def test_the_commit_is_known_where_there_is_git(tmp_path: Path) -> None:
    needs.program("git", package="git")
    assert git_commit(str(tmp_path)) == ""
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "below").mkdir()
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "train.py").write_text("1")
    subprocess.run([*git, "add", "train.py"], check=True)
    found = git_commit(str(tmp_path / "below"))
    assert re.fullmatch(r"[0-9a-f]{40}\+", found), "with a change"
    subprocess.run([*git, "commit", "-q", "-m", "second"], check=True)
    assert re.fullmatch(r"[0-9a-f]{40}", git_commit(str(tmp_path / "below")))


def test_the_table_fits_into_the_terminal_and_says_what_holds_the_job_up() -> None:
    long = msgspec.structs.replace(ROW, number=8, over=False, sentence="x" * 200)
    lines = table([ROW, long], 80).splitlines()
    assert (
        lines[1]
        == "   7  67 min rank_failed    0.50 s     1.75 s       12  rank 3 on node b failed…"
    )
    assert "(open) xxx" in lines[2]
    assert max(map(len, lines)) == 80
    assert table([long]).splitlines()[1].endswith("x" * 200), "a pipe is given all of it"
    assert table([]) == NOTHING
    assert table([], now="held up now") == "no incident yet; held up now\n"
    assert table([ROW], now="held up now").endswith("\nheld up now\n")


def test_a_command_reads_each_event_and_is_tried_again(tmp_path: Path) -> None:
    command = f"cat >> {tmp_path}/told; [ -e {tmp_path}/again ] || {{ > {tmp_path}/again; false; }}"
    told = Notifier(command, "run17")
    told.put("incident", incident=msgspec.to_builtins(ROW))
    told._queue.put(None)
    told._thread.join(LIMIT)
    first, second = (tmp_path / "told").read_text().splitlines()
    assert first == second, "it had failed the first time"
    event = json.loads(first)
    assert (event["event"], event["job"], event["incident"]["number"]) == ("incident", "run17", 7)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("echo no such pager >&2; exit 3", "ended with 3: no such pager"),
        ("sleep 60", "longer than"),
    ],
)
def test_a_command_that_fails_is_told_once(
    command: str, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "LIMIT", 0.2 if why == "longer than" else LIMIT)
    monkeypatch.setattr(notify, "PAUSE", 0.0)
    told = Notifier(command, "run17")
    told.put("end", exit_code=1, reason="no restart is left")
    told.put("end", exit_code=1, reason="no restart is left")
    told._queue.put(None)
    told._thread.join(LIMIT)
    assert [why in record.message for record in caplog.records] == [True]


def test_a_verdict_is_told_to_a_command(tmp_path: Path) -> None:
    plan = MasterPlan(on_event=f"cat >> {tmp_path}/told", run=RunPlan(name="run17"))
    out = Outward(MasterConfig(Identity("id-17"), "", 0, None, plan))
    verdict = VerdictRow(
        "strong", "idle", "rank 3 is idle", 61.0, "3", "", "it is not restarted automatically"
    )
    for over in (False, True):
        out.judged(verdict, over)
    out.slow(FoundSlow("b", "node b is slow"))
    assert out._notifier is not None
    out._notifier._queue.put(None)
    out._notifier._thread.join(LIMIT)
    lines = (tmp_path / "told").read_text().replace("}{", "}\n{").splitlines()
    events = [json.loads(line) for line in lines]
    *hangs, slow = events
    assert [(one["event"], one["over"]) for one in hangs] == [("hang", False), ("hang", True)]
    told = {key: slow[key] for key in ("event", "node", "job", "name")}
    assert told == {"event": "slow", "node": "b", "job": "id-17", "name": "run17"}
    assert events[0]["verdict"] == json.loads(msgspec.json.encode(verdict))


def test_a_url_is_posted_to() -> None:
    came: list[bytes] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        told = Notifier(f"http://127.0.0.1:{server.server_port}/hook", "run17")
        told.put("end", exit_code=0, reason="every rank exited with 0")
        told.close(LIMIT)
        server.shutdown()
    assert json.loads(came[0])["reason"] == "every rank exited with 0"


def test_what_is_no_answer_of_http_is_told_and_the_next_event_goes_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "PAUSE", 0.0)
    came = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2 * notify.TRIES):
                peer, _ = server.accept()
                with peer:
                    came.append(peer.recv(1))
                    peer.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        told = Notifier(f"http://127.0.0.1:{server.getsockname()[1]}/hook", "run17")
        for _ in range(2):
            told.put("end", exit_code=0, reason="")
        thread.join(LIMIT)
    assert len(came) == 2 * notify.TRIES
    assert [record.levelname for record in caplog.records] == ["WARNING"]
