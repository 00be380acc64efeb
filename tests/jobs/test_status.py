"""`elasticrun status`: the page for people, and a sentence where there is none."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from elasticrun.cli.verbs import columns, masters
from elasticrun.host import user_folder
from elasticrun.host.runs import index
from elasticrun.host.runs.layout import JobRecord, RunFolder, RunResult
from elasticrun.host.system.processes import ProcessId, start_time
from elasticrun.jobs.running import status as verb
from elasticrun.wire import auth
from elasticrun.wire.auth import MASTER_WRONG, TOKEN_WANTED, reader_token
from elasticrun.wire.messages import ExcludedNode
from elasticrun.wire.types import Endpoint
from tests import aio
from tests.certificates import Authority
from tests.harness import free_port
from tests.master.people import LIMIT, Recorder, Served, serving, status as page, told


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("ELASTICRUN_RUNS", str(tmp_path / "no-runs"))
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path / "elasticrun"


async def _status(*words: str, **variables: str) -> tuple[int, str, str]:
    """The verb in a process of its own, which has time: the master is this process, that stands
    still now and then."""
    code = (
        "import sys; from elasticrun.jobs.running import status; "
        f"status.ANSWER_LIMIT = {LIMIT}; sys.exit(status.main(sys.argv[1:]))"
    )
    return await told(sys.executable, "-c", code, *words, **{**os.environ, **variables})


def _entry(served: Served, pid: int | None = None) -> user_folder.Published:
    process = ProcessId.of(pid or os.getpid())
    return user_folder.Published("job", "127.0.0.1", served.endpoint.port, "", process)


async def test_the_table_has_nodes_round_ranks_restarts_and_reasons(home: Path) -> None:
    async with serving() as served:
        code, out, err = await _status(str(served.endpoint))
        assert (code, err) == (0, "")
        for word in (
            "JOB  STATE    NODES  STEP  STEP AGE  RESTARTS  AGE",
            "job  running  1/2    -     -         1/3",
            "round 1",
            "2 of 3 left",
            "waits: reason",
            "last failure: boom",
            "n0",
            "alive",
            "0-1",
            "7 8",
            "because [so]",
        ):
            assert word in out, out


async def test_the_table_has_the_health_of_nodes_and_who_is_excluded(home: Path) -> None:
    healthy = structs.replace(page().nodes[0], health="10 ms per matmul")
    bad = ExcludedNode("n9", "host9", "failed", "n9 failed the network check", 5.0, 3595.0)
    slow = ExcludedNode("n8", "", "slow", "n8 is slow", 5.0, 20.0)
    async with serving(Recorder()) as served:
        _, out, _ = await _status(str(served.endpoint))
        assert "health" not in out
        assert "excluded" not in out
        served.brain.page = page(
            nodes=(healthy,), excluded=(bad, slow), check="network check of 3 nodes: n9 failed"
        )
        _, out, _ = await _status(str(served.endpoint))
        shown = " ".join(out.split())
        assert "health" in shown
        assert "10 ms per matmul" in shown
        assert "network check of 3 nodes: n9 failed" in out
        assert "excluded: n9 on host9 (failed, for 3595 s more): n9 failed the network check" in out
        assert "excluded: n8 on an unknown host (slow, for 20 s more): n8 is slow" in out


@pytest.mark.parametrize("host", ["gpu-0123.rack-17.cluster.example", "pod-0"])
def test_it_fits_80_columns_and_breaks_no_name(host: str) -> None:
    node = structs.replace(
        page().nodes[0], node=host, host=host, reason="", pids=tuple(range(1234560, 1234568))
    )
    lines = verb.nodes_table(page(nodes=(node, structs.replace(node, reason="at the door"))), 80)
    assert max(map(len, lines)) <= 80
    assert all(host in line for line in lines[1:])
    assert lines[-1] == f"{host}: at the door"
    assert "1234567" in "".join(verb.nodes_table(page(nodes=(node,)), 200))


def test_a_fact_breaks_between_words_and_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ["last failure: no key in /mnt/shared/pre-training/config.yaml of rank 1", ""]
    assert columns.wrapped_on_terminal(lines) == lines
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert columns.wrapped_on_terminal(lines) == [
        "last failure: no key in",
        "  /mnt/shared/pre-training/config.yaml",
        "  of rank 1",
        "",
    ]


def test_a_static_job_is_named_by_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    verb._show([("10.0.0.5:29500", page(job_id="none"))])
    assert "\nof 10.0.0.5:29500  running" in capsys.readouterr().out


def test_a_single_job_is_shown_whole_and_of_several_why_they_wait(
    capsys: pytest.CaptureFixture[str],
) -> None:
    verb._show([("h:1", page())])
    alone = capsys.readouterr().out
    assert "waits: reason" in alone
    assert "7 8" in alone
    verb._show([("h:1", page()), ("h:2", page(job_id="other", reason=""))])
    several = capsys.readouterr().out
    assert "7 8" not in several
    assert "\njob: waits: reason; details: elasticrun status job\n" in several
    assert "\nother: details: elasticrun status other\n" in several
    hung = page(reason="", phase="running", verdict="rank 1 is idle", hang="strong")
    verb._show([("h:1", page(last_failure="ValueError: \x1b[31mred"))])
    assert "\x1b" not in capsys.readouterr().out
    verb._show([("h:1", hung)])
    alone = capsys.readouterr().out
    assert alone.splitlines()[1].split()[:2] == ["job", "hangs"]
    assert "\nheld up: rank 1 is idle\n" in alone
    verb._show([("h:1", hung), ("h:2", page())])
    assert "\njob: held up: rank 1 is idle; details" in capsys.readouterr().out


def test_the_list_fits_80_columns_and_breaks_no_name() -> None:
    long = "a-name-that-leaves-no-room-for-anything-beside-it"
    shown = structs.replace(
        page(job_id=long), step=1_234_567, step_age=3.0, age=200_000.0, restart_count=2
    )
    rows = [verb.job_cells(shown, "h:1"), verb.job_cells(page(job_id="b"), "h:2")]
    assert verb.job_cells(page(phase="gathering"), "h:1")[1] == "waiting"  # as `list` has it
    lines = columns.lines(verb.TITLES, rows, 80)
    assert max(map(len, lines)) <= 80
    assert lines[1] == long
    assert lines[2].split() == ["running", "1/2", "1234567", "3s", "2/3", "2d07h"]
    assert lines[3].startswith("b    running")


@pytest.mark.parametrize(
    ("state", "does"), [("alive", "running"), ("suspect", "running"), ("dead", "-"), ("left", "-")]
)
def test_nobody_knows_what_a_lost_node_does(state: str, does: str) -> None:
    node = structs.replace(page().nodes[0], state=state, activity="running")
    assert verb._row(node)[2:4] == (state, does)


async def test_json_is_one_record_whether_the_job_runs_or_has_ended(home: Path) -> None:
    runs = home.parent / "runs"
    run = RunFolder(index.make_run(runs, "demo", "0badcafe"))
    run.write_job(JobRecord(name="demo"))
    run.write_result(RunResult(state="failed", exit_code=1, reason="no restart"))
    code, out, _ = await _status("demo", "--json", ELASTICRUN_RUNS=str(runs))
    ended = json.loads(out)
    assert (code, ended["state"], ended["exit_code"], ended["master"]) == (0, "failed", 1, None)
    async with serving() as served:
        code, out, _ = await _status(str(served.endpoint), "--json")
    shown = json.loads(out)
    assert (code, shown["state"], shown["exit_code"]) == (0, "running", None)
    assert shown["master"]["nodes"][0]["pids"] == [7, 8]
    assert shown.keys() == ended.keys()


async def test_without_an_endpoint_the_user_folder_is_asked(home: Path) -> None:
    async with serving(Recorder()) as served:
        folder = user_folder.user_folder(os.environ)
        left = replace(_entry(served), status_url="http://127.0.0.1:9/", operator="its key")
        user_folder.publish(folder, left)
        stale = user_folder.publish(folder, _entry(served, 2**22 - 1))
        (folder / "master-odd.json").write_text("{}")
        code, out, err = await _status()
        assert (code, err) == (0, "")
        assert "round 1" in out
        link = out.splitlines()[-1].removeprefix("page: http://127.0.0.1:9/?key=")
        assert auth.key_expiry("its key", link) > time.time()
        assert not stale.exists()
        (kept,) = folder.glob("master-*")
        assert kept.name.startswith(f"master-{os.getpid()}-{start_time(os.getpid())}-")


TOKEN = "what the nodes of the job know"


@pytest.mark.slow
async def test_of_a_job_with_a_token(home: Path, tmp_path: Path) -> None:
    """The token by variable or file; the sentence without it; and what the master has left for its
    own user, with and without naming the endpoint."""
    (tmp_path / "token").write_text(TOKEN)
    async with serving(token=TOKEN) as served:
        where = str(served.endpoint)
        for words, variables in (
            ((where,), {"ELASTICRUN_TOKEN": TOKEN}),
            ((where, f"--token-file={tmp_path}/token"), {}),
        ):
            code, out, err = await _status(*words, **variables)
            assert (code, err) == (0, "")
            assert "round 1" in out
        for given, said in (("", TOKEN_WANTED), ("another", MASTER_WRONG)):
            code, out, err = await _status(where, ELASTICRUN_TOKEN=given)
            assert (code, out) == (1, "")
            assert said in err
            assert err.count("\n") == 1
            assert TOKEN not in err
        left = replace(_entry(served), reader=reader_token(TOKEN))
        path = user_folder.publish(user_folder.user_folder(os.environ), left)
        assert path.stat().st_mode & 0o077 == 0
        assert TOKEN not in path.read_text()
        for words in ((), (where,)):
            code, out, err = await _status(*words)
            assert (code, err) == (0, "")
            assert "round 1" in out


@pytest.mark.slow
async def test_over_tls(home: Path, tmp_path: Path) -> None:
    files = Authority(tmp_path).create().sign("node", "IP:127.0.0.1")
    flags = (f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-ca={files.ca}")
    async with serving(tls=auth.read_pem(files)) as served:
        where = str(served.endpoint)
        code, out, err = await _status(where, *flags)
        assert (code, err) == (0, "")
        assert "round 1" in out
        for words, said in (
            ((), "uses TLS and this node does not"),
            ((flags[2],), "closes the connection after the TLS handshake"),
            ((*flags[:2], f"--tls-ca={files.key}"), "holds no certificate"),
        ):
            code, out, err = await _status(where, *words)
            assert (code, out) == (1, "")
            assert said in err
            assert err.count("\n") == 1


@pytest.mark.slow
def test_nobody_there_is_one_sentence(home: Path) -> None:
    for dead in (f"127.0.0.1:{free_port()}", ".", "no/folder"):
        code, out, err = aio.run(_status(dead))
        assert (code, out) == (1, "")
        assert dead in err
        assert err.count("\n") == 1
    code, _, err = aio.run(_status())
    assert code == 1
    assert "you have no jobs on this host; `elasticrun train.py` starts one" in err
    runs = home.parent / "runs"
    RunFolder(index.make_run(runs, "demo", "0badcafe")).write_job(JobRecord(name="demo"))
    code, _, err = aio.run(_status(ELASTICRUN_RUNS=str(runs)))
    assert code == 1
    assert "no job of yours runs on this host; `elasticrun list` shows those that have ended" in err


@pytest.mark.slow
def test_a_mistyped_name_is_told_from_an_address(home: Path) -> None:
    run = RunFolder(index.make_run(home.parent / "runs", "demo", "0badcafe"))
    run.write_job(JobRecord(name="demo"))
    code, out, err = aio.run(_status("dmo", ELASTICRUN_RUNS=str(home.parent / "runs")))
    assert (code, out) == (1, "")
    assert "there is no job dmo here; did you mean demo? (for a master elsewhere, give its" in err


def test_a_process_of_the_same_pid_is_not_the_master(home: Path) -> None:
    folder = user_folder.user_folder(os.environ)
    entry = user_folder.Published("job", "127.0.0.1", 1, "", replace(ProcessId.own(), started=1))
    user_folder.publish(folder, entry)
    assert user_folder.published(folder) == []


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("h:1", "h", 1),
        ("h", "h", masters.DEFAULT_PORT),
        ("[::1]:5", "::1", 5),
        ("[::1]", "::1", masters.DEFAULT_PORT),
    ],
)
def test_endpoints(text: str, host: str, port: int) -> None:
    assert masters.parse_endpoint(text) == Endpoint(host, port)


@pytest.mark.parametrize("text", ["", ":1", "h:x", "h:0", "h:70000", "h:-1", "a/b"])
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(masters.NoStatus, match="host:port"):
        masters.parse_endpoint(text)
