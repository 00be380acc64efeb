"""What a person asks of a job that runs: on a real job, and in tables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec import structs

from elasticrun.cli.main import main
from elasticrun.core.events import JobOver
from elasticrun.core.sight.picture import EventRow, Picture, RankRow, StackRow
from elasticrun.host import user_folder
from elasticrun.host.runs import index
from elasticrun.host.runs.layout import JobRecord, RunFolder, RunResult
from elasticrun.host.system.processes import ProcessId
from elasticrun.jobs import connection
from elasticrun.jobs.rows import DoneRow, as_json, live_row, page_of
from elasticrun.jobs.running import listing, master_lookup, top
from elasticrun.master.outward.record import result_of
from elasticrun.wire import auth
from elasticrun.wire.types import Endpoint
from tests.counting import times
from tests.harness import LIMIT, ran_here
from tests.master.people import status
from tests.master.pictures import hung

ROOT = Path(__file__).parents[2]

REDUCES = """
import time
import torch
import torch.distributed as dist
from elasticrun.testing import step

dist.init_process_group("gloo")
for number in range(1_000_000):
    dist.all_reduce(torch.ones(8))
    step(number)
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_real_job_is_looked_at_and_operated(elastic_job: Any, tmp_path: Path) -> None:
    script = tmp_path / "reduces.py"
    script.write_text(REDUCES)
    job = elastic_job(script, nnodes="1:2", nodes=2, nproc_per_node=2, options=(times(),))
    job.wait_for_world(4)
    run = job._scratch / "host" / "run"
    own = {"XDG_RUNTIME_DIR": str(run), "ELASTICRUN_RUNS": str(run.parent / "runs")}

    def verb(*words: str, **variables: str) -> tuple[int, str, str]:
        done = ran_here(*words, env={**os.environ, **own, "COLUMNS": "80", **variables})
        return done.returncode, done.stdout, done.stderr

    # who does not run the job, and has no token, is told nothing and does nothing
    (tmp_path / "else").mkdir(mode=0o700)
    endpoint = str(user_folder.published(run / "elasticrun")[0].endpoint)
    for words in (("stop", endpoint), ("stacks", endpoint)):
        code, out, err = verb(*words, XDG_RUNTIME_DIR=str(tmp_path / "else"))
        assert (code, out) == (1, "")
        assert auth.OPERATOR_WANTED in err

    code, out, err = verb("top", "--once")
    assert (code, err) == (0, "")
    assert "running, round" in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, err = verb("top", "-o", "json")
    assert fits("top", out)["status"]["world_size"] == 4
    fits("status", verb("status", "--json")[1])
    code, out, err = verb("stacks")
    assert ("reduces.py:" in out) is (code == 0), (out, err)
    code, out, err = verb("stacks", "--rank", "9")
    assert (code, out) == (1, "")
    assert err.endswith("no stack of rank 9 was obtained: the job has 4 ranks, from 0 on\n")
    assert verb("exclude", "node-9", endpoint)[2].startswith("elasticrun exclude: the job has no")

    for number, world_size in ((1, 2), (2, 4)):  # the node that is over stays as a spare
        code, out, err = verb("scale", str(number), "--reason", "a guest")
        assert (code, err) == (0, ""), err
        assert out.startswith(f"the job now uses at most {number} node")
        job.wait_for(world_size=world_size)
    names = [node.name for node in job.nodes]
    code, out, err = verb("exclude", names[1], "--reason", "its fan is broken")
    assert (code, err) == (0, ""), err
    assert f"node {names[1]} is excluded for 3600 s" in out
    job.wait_for(world_size=2)
    code, out, err = verb("include", names[1])
    assert (code, out, err) == (0, f"node {names[1]} may join again\n", "")
    before = job.status().round
    assert verb("restart", "--reason", "a new driver")[0] == 0
    job.wait_for(lambda page: page.round != before and page.phase == "running")

    code, out, err = verb("events", "-o", "json")
    said = [row["text"] for row in fits("events", out)]
    assert fits("incidents", verb("incidents", "-o", "json")[1])
    assert any("scaled to 1 node by" in text and "a guest" in text for text in said), said
    assert any(
        "it is excluded: asked by" in text and "its fan is broken" in text for text in said
    ), said
    assert any("is included again by" in text for text in said), said
    assert any("restarted by" in text and "a new driver" in text for text in said), said
    follows = [sys.executable, "-m", "elasticrun", "events", "-f"]
    with subprocess.Popen(follows, env={**os.environ, **own}, stdout=subprocess.PIPE) as events:
        assert events.stdout is not None
        assert events.stdout.readline()
        code, out, err = verb("stop", "--wait", "--reason", "enough", "-o", "json")
        assert code == 0, err
        out = fits("done", out)["done"]
        assert "the job ends: stopped by" in out
        last = events.stdout.read().decode().splitlines()[-1]
        assert f" has ended (stopped): stopped by {connection.user_at_host()}: enough" in last, last
        assert events.wait(LIMIT) == 0
    assert job.result().exit_codes[0] == 1
    assert f"stopped by {connection.user_at_host()}: enough" in job.output(0)
    code, out, err = verb("top")
    assert (code, err.count("\n")) == (1, 1)


# ---------------------------------------------------------------- what programs are told

SCHEMA = json.loads((ROOT / "docs/schema.json").read_text())


def fits(output: str, said: str) -> Any:
    """What a verb has printed, which is as the schema has it."""
    schema = {"$ref": f"#/$defs/{output}", "$defs": SCHEMA["$defs"]}
    found = json.loads(said)
    jsonschema.Draft202012Validator(schema).validate(found)
    return found


def test_the_schema_is_that_of_what_is_printed() -> None:
    script = [sys.executable, ROOT / "scripts/gen_schema.py", "--check"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    whole = hung()
    for output, value in {
        "top": whole,
        "stacks": {"stacks": whole.stacks, "stacks_missing": ""},
        "event": whole.events[0],
        "incident": whole.incidents[0],
        "status": page_of(live_row(whole.status, Endpoint("h", 1), ""), master=whole.status),
        "done": DoneRow(name="train", done="it ends"),
        "result": result_of(JobOver(1, "it failed"), whole),
    }.items():
        found = fits(output, as_json(value))
        with pytest.raises(jsonschema.ValidationError):
            fits(output, json.dumps(dict.fromkeys(found)))


# ---------------------------------------------------------------- which job


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("ELASTICRUN_RUNS", str(tmp_path / "runs"))
    return user_folder.user_folder(os.environ)


def _publish(folder: Path, job: str, port: int, pid: int, **own: str) -> None:
    process = ProcessId.of(pid)
    user_folder.publish(folder, user_folder.Published(job, "10.0.0.1", port, "", process, **own))


def test_a_job_is_named_by_a_beginning_an_id_or_an_endpoint(here: Path) -> None:
    with pytest.raises(connection.NotAnswered, match="no job of yours runs on this host"):
        master_lookup.find_master("")
    _publish(here, "train-17", 1001, os.getpid(), operator="for one", reader="to read")
    assert master_lookup.find_master("").operator == "for one"
    _publish(here, "train-18", 1002, os.getppid(), operator="for two")
    assert master_lookup.find_master("train-18") == connection.JobMaster(
        Endpoint("10.0.0.1", 1002), "", "for two"
    )
    assert master_lookup.find_master("train-17").reader == "to read"
    assert master_lookup.find_master("10.0.0.1:1001").operator == "for one"
    other = master_lookup.find_master("elsewhere:29400", "token")
    assert (other.reader, other.operator) == (
        auth.reader_token("token"),
        auth.operator_token("token"),
    )
    for job, why in (
        ("", "several jobs match: train-17, train-18"),
        ("train-1", "several jobs match"),
        ("trian-17", "did you mean train-17"),
        ("zzz", "there is no job zzz here"),
    ):
        with pytest.raises(connection.NotAnswered, match=why):
            master_lookup.find_master(job)
    assert master_lookup.find_master("train-17").operator == "for one"
    run = RunFolder(index.make_run(here.parent / "runs", "train-1", "0badcafe"))
    run.write_job(JobRecord(name="train-1", pid=1, started=1, host=os.uname().nodename))
    with pytest.raises(
        connection.NotAnswered, match=r"job train-1 has ended \(lost\): its launcher, pro"
    ):
        master_lookup.find_master("train-1")  # whose name it is


def test_a_whole_name_wins_over_a_beginning_whether_it_runs_or_has_ended(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = here.parent / "runs"
    monkeypatch.setenv("ELASTICRUN_RUNS", str(root))
    for number, name in enumerate(("train", "train-large", "train-small")):
        run = RunFolder(index.make_run(root, name, f"0000000{number}"))
        run.write_job(JobRecord(name=name, id=f"id-{name}", where="local", began=float(number)))
        if name == "train-large":
            _publish(here, f"id-{name}", 1001, os.getpid(), run=str(run.path), name=name)
        else:
            run.write_result(RunResult(state="succeeded", reason="every rank exited with 0"))
    for words in (["stop", "train"], ["restart", "train"], ["scale", "train", "2"]):
        assert main(words) == 1
        assert "job train has ended (succeeded): every rank" in capsys.readouterr().err
    for verb in ("status", "events", "incidents", "top"):
        main([verb, "train"])
        said = capsys.readouterr()
        assert "1001" not in said.out + said.err, (verb, said)  # nobody has asked train-large
    with pytest.raises(SystemExit, match="2"):
        main(["exclude", "train-large", "gpu7"])
    assert "comes first: elasticrun exclude gpu7 train-large (see" in capsys.readouterr().err
    assert (
        master_lookup.find_master("train-l").endpoint.port
        == master_lookup.find_master("id-train-large").endpoint.port
    )
    for verb in ("stop", "status"):
        assert main([verb, "tra"]) == 1
        assert "several jobs match tra: train, train-large, train-" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["stop", "--what"], ["exclude"], ["scale", "0"], ["events", "-o", "xml"]]
)
def test_what_is_mistyped_ends_with_2(words: list[str], here: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2


# ---------------------------------------------------------------- tables


def _row(rank: int, state: str = "waiting", **more: Any) -> RankRow:
    values = {"waits_for": "42", "step": 4110, "step_seconds": 1.25, "cpu": 0.5, "rss": 8000}
    return RankRow(rank, f"node-with-a-long-name-{rank // 8}", state, **{**values, **more})


def test_a_thousand_ranks_are_a_few_lines_and_the_odd_one_comes_first() -> None:
    ranks = [_row(rank) for rank in range(1024) if rank != 42]
    odd = _row(42, "odd", waits_for="", place="train.py:88 load_shard", quiet=71.0)
    lines = top.page(Picture(status(), ranks=(*ranks, odd)), 80)
    assert max(map(len, lines)) <= 80
    table = lines[lines.index("") + 1 :]
    assert len(table) == 3
    assert table[0].startswith("RANK")
    assert table[1].startswith("42 ")
    assert "1m" in table[1]
    assert "0-41,43-1023" in table[2]
    assert "train.py:88 load_shard" in table[1]  # where it is stays, whatever else has no room
    wide = top.table([_row(0), odd], 200)
    assert "train.py:88 load_shard" in wide[2]
    assert "node-with-a-long-name-5" in wide[2]
    thousand = top.page(Picture(status(), ranks=(*ranks, odd)), 200)
    assert "128 nodes" in thousand[-1]


def test_stacks_are_groups_of_ranks() -> None:
    groups = (
        StackRow("42", 1, "", "data.py:40 __next__\ntrain.py:88 load_shard"),
        StackRow("0-41,43-63", 63, "loader 3", "train.py:131 step"),
    )
    picture = Picture(status(), stacks=groups, stacks_missing="rank 7 is stopped")
    assert listing.stack_lines(picture, groups) == [
        *("rank 42", "  data.py:40 __next__", "  train.py:88 load_shard", ""),
        *("ranks 0-41,43-63, loader 3 (63 ranks)", "  train.py:131 step", ""),
        "missing: rank 7 is stopped",
    ]
    assert [listing.has_rank(group, 50) for group in groups] == [False, True]


def test_events_of_masters_before_this_one_come_first() -> None:
    """A new master counts from 1, and the run folder has what the ones before it have said."""
    old = [EventRow(number, 90.0 - number, "", f"old {number}", "info") for number in (1, 2, 3)]
    new = [EventRow(number, 10.0 - number, "", f"new {number}", "info") for number in (1, 2, 3)]
    assert listing.older_events([*old, *new], new) == old
    assert listing.older_events([*old, *new], new[1:]) == [*old, new[0]]
    assert listing.older_events(old, new) == old, "the disk is slow"
    alike = [EventRow(row.number, row.age, "", old[0].text, "info") for row in new]
    assert listing.older_events([*old, *alike], alike) == old, (
        "a master may say what one before it did"
    )
    later = [EventRow(row.number, row.age + 0.5, "", "cut short", "info") for row in new]
    assert listing.older_events([*old, *later], new) == old, (
        "the number and the time count, not the text"
    )
    outside = EventRow(0, 11.0, "", "the previous job master was killed", "warning")
    assert listing.older_events([*old, outside, *later], new) == [*old, outside]
    assert listing.older_events(old, []) == old
    assert listing.older_events([], new) == []


def test_events_go_on_where_they_were_also_with_a_new_master() -> None:
    rows = [EventRow(number, 10.0, "", f"line\n{number}", "info") for number in (1, 2, 3)]
    assert listing.new_events(rows, 0) == rows
    assert listing.new_events(rows, 2) == rows[2:]
    assert listing.new_events(rows, 3) == []
    assert listing.new_events(rows, 900) == rows
    assert listing.event_lines(rows[:1], 1e9 + 10.0)[0].endswith("  info     line 1")
    day = listing.event_lines([structs.replace(rows[0], age=2 * 86400.0)], 1e9)[0]
    assert re.match(r"2001-09-0\d \d\d:\d\d:\d\d  info", day)
    red = EventRow(4, 10.0, "", "ValueError: \x1b[31mred", "error")
    assert "\x1b" not in listing.event_lines([red], 1e9)[0]
