"""A job of this host from submit to delete, by the words that people type; what is refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pexpect
import pytest

from elasticrun.host.runs.index import make_run, runs_root
from elasticrun.host.runs.layout import JobRecord, LocalAgent, RunFolder, RunResult, lock_folder
from elasticrun.host.system.processes import ProcessId
from elasticrun.jobs import local
from elasticrun.jobs.backend import RequestFailed, Submission, make_token, write_submission
from tests import needs
from tests.further import cases, further
from tests.harness import ELASTICRUN, LIMIT, World, await_true, ran, ran_here, until_file
from tests.host.accelerators.standins import gpu, nvml
from tests.snapshots.conftest import ENDLESS, TRAIN, checkpoints, starts, told, until_printed

Done = subprocess.CompletedProcess[str]

ONLY_ASK = ("list", "status", "top")

LAST_CALL = ("--rdzv-conf", "last_call_timeout=1,heartbeat_timeout=60")
PRELOAD = ("--preload", "torch.distributed.checkpoint")
"""What a Checkpointer imports, in none of the many lives of the ranks."""


class Person:
    """Who types the verbs in one folder."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.environ = world.environment({"OMP_NUM_THREADS": "1"})

    def types(self, *words: str) -> str:
        """What a verb prints that ends well."""
        run = ran_here if words[0] in ONLY_ASK else ran
        done = run(*words, env=self.environ)
        assert (done.returncode, done.stderr) == (0, ""), (words, done.stdout, done.stderr)
        return done.stdout

    def hears(self, *words: str, run: Callable[..., Done] = ran) -> tuple[int, str]:
        """How a verb ends, and its sentence."""
        done = run(*words, env=self.environ)
        assert done.stderr.count("\n") == 1, done.stderr
        return done.returncode, done.stderr

    def row(self, name: str) -> dict[str, Any]:
        """What `list` says of a job."""
        rows = json.loads(self.types("list", "-o", "json"))
        return next(row for row in rows if row["name"] == name)

    def until(self, name: str, **values: object) -> None:
        """Wait until `list` shows these of a job."""
        await_true(
            lambda: values.items() <= self.row(name).items(), f"{name} {values}", limit=LIMIT
        )


@pytest.fixture
def person(world: World) -> Person:
    return Person(world)


def training(folder: Path) -> list[str]:
    """A training without an end: script and arguments."""
    (folder / "out").mkdir()
    words = [*ENDLESS, "--every", "5", "--print-at", "5"]
    return [str(TRAIN), *words, "--out", str(folder / "out"), "--ckpt", str(folder / "ckpt")]


def on_a_terminal(person: Person, words: Sequence[str]) -> str:
    """What a verb prints on a terminal that is closed as soon as it has ended."""
    typed = shlex.join([sys.executable, "-m", "elasticrun", *words])
    shell = pexpect.spawn(
        "bash", ["-c", f"{typed}; echo over $?; cat"], env=person.environ, encoding="utf-8",
        timeout=LIMIT,
    )  # fmt: skip
    shell.expect("over 0")
    said = str(shell.before)
    shell.close(force=True)
    return said


@pytest.mark.slow
def test_top_ends_with_its_job(person: Person) -> None:
    """Its master may be gone before it has told that the job is over."""
    script = person.world.scratch / "ends.py"
    gate = person.world.scratch / "gate"
    waits = f"while not os.path.exists({str(gate)!r}): time.sleep(0.05)"
    script.write_text(f"import os, time\nprint('begun', flush=True)\n{waits}\n")
    person.world.launch(ELASTICRUN, str(script)).until_text("begun", stream="stdout")
    top = pexpect.spawn(
        sys.executable, ["-m", "elasticrun", "top"], env=person.environ, encoding="utf-8",
        timeout=LIMIT,
    )  # fmt: skip
    top.expect("1 rank")
    quits = pexpect.spawn(
        sys.executable, ["-m", "elasticrun", "top"], env=person.environ, timeout=LIMIT
    )
    quits.expect("1 rank")
    quits.send("q")
    quits.expect(pexpect.EOF)
    quits.close()
    assert quits.exitstatus == 0
    gate.touch()
    top.expect("ended")
    top.expect(pexpect.EOF)
    top.close()
    assert top.exitstatus == 0
    assert "no answer" not in str(top.before)


@pytest.mark.slow
def test_a_job_from_submit_to_delete(person: Person) -> None:
    folder, out = person.world.scratch, person.world.scratch / "out"
    program = training(folder)
    words = ("submit", "--name", "tr", "--nodes", "1:2", *LAST_CALL, *PRELOAD, "--", *program)
    said = on_a_terminal(person, words)
    assert "job tr has started on this host, with 2 agents as its nodes" in said
    assert "elasticrun logs tr -f" in said
    until_printed(out, 0)  # the terminal has gone
    # the second node may be let in later, and its rank begins at a later step
    until_file(out / "rank-1.jsonl", lambda text: '"start"' in text)
    person.until("tr", state="running", nodes=2)
    assert "2 ranks on 2 nodes" in person.types("status", "t")
    page = json.loads(person.types("status", "tr", "-o", "json"))["master"]
    assert {node["node"]: node["group_rank"] for node in page["nodes"]} == {"node0": 0, "node1": 1}
    assert page["max_restarts"] == 3  # nobody watches it
    (host,) = json.loads(person.types("top", "nodes", "-o", "json"))
    assert (host["jobs"], host["ranks"]) == (["tr"], 2)
    code, why = person.hears("submit", "--name", "tr", "--", str(TRAIN))
    assert code == 1
    assert "a job tr exists already (running)" in why
    for node in ("node1", "1"):
        said = person.types("exec", "tr", "--node", node, "--", "pwd")
        assert said.strip() == str(Path.cwd())

    person.types("scale", "tr", "1", "--reason", "a guest")
    person.until("tr", nodes=1)
    assert "1 agent more started here" in person.types("scale", "3", "tr")
    person.until("tr", nodes=3)
    until_file(out / "rank-2.jsonl", lambda text: '"start"' in text)
    begins = told(out, 2)[0]["start"]
    await_true(lambda: person.row("tr")["step"] > begins + 10, "snapshots of three")

    reader = person.world.command(
        [sys.executable, "-m", "elasticrun", "logs", "tr", "-f"], env=person.environ
    )
    said = person.types("suspend", "tr")
    (step,) = re.findall(r"job tr is suspended at step (\d+);", said)
    assert int(step) == checkpoints(folder / "ckpt")[-1], "the step that was saved"
    reader.until_text("waiting for its next start")
    await_true(lambda: len(person.world.survivors()) == 1, "end of all but the one who reads")
    before = person.row("tr")
    assert before["state"] == "suspended"
    assert "is already suspended" in person.types("suspend", "tr")
    assert "at most 4 nodes when it resumes" in person.types("scale", "tr", "4")
    assert "at most 3 nodes when it resumes" in person.types("scale", "tr", "3")
    assert starts(out, 0)[0] == 0
    lives = len(starts(out, 0))
    assert "with 3 agents" in person.types("resume", "tr"), "as it was scaled"
    await_true(lambda: len(starts(out, 0)) > lives, "another life")
    assert starts(out, 0)[-1] > 0
    person.until("tr", state="running")
    assert person.row("tr")["age"] > before["age"]
    heads = [line for line in person.types("logs", "tr", "--all").splitlines() if "==" in line]
    assert sum("attempt_0," in head for head in heads) == 2  # of each start
    saved = checkpoints(folder / "ckpt")[-1]
    said = person.types("stop", "tr", "--wait")
    assert "is written to storage first" in said.splitlines()[0]
    (step,) = re.findall(r"the job has ended: stopped by \S+; step (\d+) is saved", said)
    assert reader.wait() == 0
    person.world.nothing_left()
    assert checkpoints(folder / "ckpt")[-1] == int(step) > saved  # it has saved first

    assert person.row("tr")["state"] == "stopped"
    said = person.types("status", "tr")
    assert "stopped by" in said
    assert "\nto resume: elasticrun resume tr\n" in said
    assert json.loads(person.types("status", "tr", "-o", "json"))["state"] == "stopped"
    person.types("logs", "tr", "--tail", "1")
    code, why = person.hears("suspend", "tr")
    assert (code, "job tr does not run: stopped" in why) == (1, True)
    run = person.row("tr")["run"]
    assert f"{run} is removed" in person.types("delete", "tr")
    assert person.types("list", "-o", "json").strip() == "[]"
    assert not Path(run).exists()


PRINTS = """
import os, signal
print("rank", os.environ["RANK"], "is here", flush=True)
signal.pause()
"""


@further("test_a_job_from_submit_to_delete", "jobs/test_logs::test_followed_until_the_end")
@pytest.mark.slow
def test_logs_of_a_job_by_name_while_it_runs_and_when_it_has_ended(person: Person) -> None:
    (person.world.scratch / "prints.py").write_text(PRINTS)
    script = str(person.world.scratch / "prints.py")
    words = ("submit", "-o", "json", "--nproc-per-node=2", "--launch=fork", "--", script)
    racing = [
        person.world.command([sys.executable, "-m", "elasticrun", *words], env=person.environ)
        for _ in range(3)
    ]
    ended = {one.wait(): one for one in racing}
    assert [one.wait() for one in racing].count(0) == 1  # the others are refused
    assert "job prints" in ended[1].stderr
    made = json.loads(ended[0].stdout)
    assert made["name"] == "prints"
    reader = person.world.command(
        [sys.executable, "-m", "elasticrun", "logs", "prints", "-f"], env=person.environ
    )
    for rank in (0, 1):
        reader.until_text(f"[{rank}] rank {rank} is here\n", stream="stdout")
    assert "is suspended, but no step was saved;" in person.types("suspend", "prints")
    assert reader.wait() == 0
    assert person.row("prints")["state"] == "suspended"
    assert "already (suspended)" in person.hears("submit", "--name", "prints", "--", script)[1]
    assert "job prints is stopped" in person.types("stop", "prints")
    assert person.row("prints")["state"] == "stopped"
    for words in (("logs",), ("logs", "pri")):
        assert ran(*words, env=person.environ).stderr == "== job prints (stopped) ==\n"
    (line,) = person.types("logs", "pri", "--rank=1", "-o", "json").splitlines()
    said = json.loads(line)
    assert (said["rank"], said["stream"], said["line"]) == (1, "stdout", "rank 1 is here")
    for node in ("0", "prints-master-0"):
        assert "rank 1 is here" in person.types("logs", "prints", "-i", node, "-t", "1")
    assert "there is no node elsewhere" in person.hears("logs", "prints", "--node=elsewhere")[1]
    assert "did you mean prints?" in person.hears("logs", "prnts")[1]
    assert (
        "no rank 2 has log files here; ranks with files: 0,1"
        in person.hears("logs", "p", "--rank=2")[1]
    )
    (console,) = Path(made["run_dir"]).glob("console.log")
    assert "rank 0 is here" not in console.read_text()
    person.types("delete", "prints", "--keep-files")
    assert Path(made["run_dir"]).exists()


@pytest.mark.slow
@further("test_a_job_from_submit_to_delete", "jobs/test_hosts")
def test_hosts_that_are_this_one_need_no_sshd(person: Person) -> None:
    work = person.world.scratch / "work"
    work.mkdir()
    (work / "prints.py").write_text(PRINTS)
    words = ("--hosts", "localhost", "--ssh", "false", "--name", "hh", "--working-dir", str(work))
    person.types("submit", *words, "--", "prints.py")
    person.until("hh", state="running")
    assert person.types("exec", "hh", "--", "pwd").strip() == str(work)
    person.types("suspend", "hh")
    gone = work.rename(work.with_name("gone"))
    assert "the job cannot be started" in person.hears("resume", "hh")[1]
    gone.rename(work)
    assert person.row("hh")["state"] == "suspended"  # as it was
    assert "job hh has started on localhost" in person.types("resume", "hh")
    person.types("delete", "hh")


@pytest.mark.slow
def test_a_launcher_that_cannot_begin_says_why(person: Person) -> None:
    needs.program("git", package="git")
    source, work = person.world.scratch / "source", person.world.scratch / "work"
    for folder in (source, work / "code" / "source"):
        for words in (
            ["init", "-q", str(folder)],
            ["-C", str(folder), "remote", "add", "origin", "https://example.org/other"],
            ["-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one",
             "--allow-empty"],
        ):  # fmt: skip
            subprocess.run(["git", *words], check=True)
    words = ["--git", source.as_uri(), "--working-dir", str(work), "--run-dir", str(work / "run")]
    for verb in (["submit", "--name", "tr", *words, "--", "t.py"], ["resume", "tr"]):
        assert "job tr cannot start: --git: " in person.hears(*verb)[1], verb
        row = person.row("tr")
        assert (row["state"], "--git: " in row["reason"]) == ("failed", True)
    copied = ["git", "-C", str(work / "code" / "source"), "remote", "set-url", "origin"]
    subprocess.run([*copied, str(source)], check=True)  # the same one, by its path
    assert "cannot start: there is no" in person.hears("resume", "tr")[1]
    person.types("delete", "tr")


def test_there_is_no_second_life_beside_a_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose launchers were killed; it goes by itself."""
    run = RunFolder(tmp_path)
    write_submission(run, Submission(name="tr", on="local", host=os.uname().nodename))
    run.write_job(JobRecord(name="tr"))
    lock = lock_folder(run.path)
    monkeypatch.setattr(local, "END_LIMIT", 0.0)
    for does in (local.LocalJobs({}).resume, local.LocalJobs({}).terminate):
        with pytest.raises(RequestFailed, match="a master of job tr still runs in"):
            does(run)
    os.close(lock)
    local.LocalJobs({}).terminate(run)


def test_a_suspend_records_no_end_beside_a_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents have ended, and their master has not yet written what was saved."""
    monkeypatch.setattr(local, "END_LIMIT", 0.0)
    run = RunFolder(tmp_path)
    with subprocess.Popen(["sleep", "1000"]) as sleeps:
        agent = LocalAgent("node0", ProcessId.of(sleeps.pid))
        host = os.uname().nodename
        write_submission(run, Submission(name="tr", on="local", host=host, agents=(agent,)))
        run.write_job(JobRecord(name="tr"))
        lock = lock_folder(run.path)
        with pytest.raises(RequestFailed, match="a master of job tr still runs in"):
            local.LocalJobs({}).suspend(run)
    assert run.result() is None
    os.close(lock)


def test_a_secret_that_others_may_read_is_none(tmp_path: Path) -> None:
    path = make_token(RunFolder(tmp_path))
    assert make_token(RunFolder(tmp_path)) == path
    path.chmod(0o640)
    with pytest.raises(OSError, match="token is accessible to others: remove it"):
        make_token(RunFolder(tmp_path))


SHOWS = """
import os, signal
print("has", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("lives", cases([1, 2], kept=[1]))
def test_nodes_on_one_host_share_out_its_gpus(person: Person, lives: int) -> None:
    """And do so again when the job is resumed."""
    script = person.world.scratch / "shows.py"
    script.write_text(SHOWS)
    found = nvml(person.world.scratch, *(gpu(number) for number in range(5)))
    person.environ |= {name: found[name] for name in ("PYTHONPATH", "STANDIN_NVML")}
    person.environ["CUDA_VISIBLE_DEVICES"] = "4,1,0"
    words = ("submit", "--name", "four", "--nodes", "4", "--", str(script))
    assert "nodes on one host share its GPUs, and it has 3" in person.hears(*words)[1]
    person.types("submit", "--name", "two", "--nodes", "2", *LAST_CALL, "--", str(script))
    for life in range(lives):
        if life:
            person.types("suspend", "two")
            person.types("resume", "two")
        person.until("two", state="running", nodes=2)
        await_true(lambda: person.types("logs", "two").count("has") == 2, "two ranks")
        seen = {line[4:] for line in person.types("logs", "two").splitlines()}
        assert seen == {"has 4,0", "has 1"}
    assert "none is free for another node" in person.hears("scale", "two", "3")[1]
    person.types("delete", "two")


def test_a_suspended_job_of_one_node_says_what_makes_it_elastic(person: Person) -> None:
    run = RunFolder(make_run(runs_root(person.environ), "ns", "0badcafe"))
    write_submission(run, Submission(name="ns", on="local", host=os.uname().nodename))
    run.write_job(JobRecord(name="ns", host=os.uname().nodename))
    run.write_result(RunResult(state="stopped", reason="suspended", suspended=True))
    code, said = person.hears("scale", "ns", "2")
    assert (code, said.strip()) == (
        1,
        "elasticrun scale: job ns was submitted for exactly one node, so no other can join; "
        "submit it with --nodes 1:2 to make it elastic",
    )
    assert "use at most 1 node when it resumes" in person.types("scale", "ns", "1")
    run.write_result(RunResult(state="succeeded", reason="every rank exited with 0"))
    assert "job ns has ended (succeeded)" in person.hears("scale", "ns", "2")[1]


def test_suspend_says_where_a_script_without_a_checkpointer_goes_on(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with subprocess.Popen(["sleep", "1000"]) as agent:
        one = LocalAgent("node0", ProcessId.of(agent.pid))
        known = Submission(name="ns", on="local", host=os.uname().nodename, agents=(one,))
        write_submission(run, known)
        run.write_job(JobRecord(name="ns", host=os.uname().nodename))
        run.write_result(RunResult(state="failed", exit_code=1))
        said = local.LocalJobs({}).suspend(run)
    assert said == (
        "job ns is suspended, but no step was saved; continue with `elasticrun resume ns`, from an "
        "earlier checkpoint, or from step 0 without a Checkpointer"
    )


def test_what_has_succeeded_is_said_for_programs_too(person: Person) -> None:
    run = RunFolder(person.world.scratch / "mine")
    run.path.mkdir()
    run.write_job(JobRecord(name="tr"))
    run.write_result(RunResult(state="succeeded", step=7))
    said = person.types("submit", "-o", "json", "--run-dir", str(run.path), "--", str(TRAIN))
    made = json.loads(said)
    assert (made["run_dir"], made["on"]) == (str(run.path), "local")
    assert "has already succeeded at step 7" in made["done"]


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["submit"], 2, "put the script after --"),
        (["submit", "train.py"], 2, "after --"),
        (["submit", "--", "--nproc-per-node=2", "a.py"], 2, "--nproc-per-node=2 comes after --"),
        (["submit", "--wrong", "--", "train.py"], 2, "--wrong is no flag of this verb"),
        (["submit", "--on", "moon", "--", "train.py"], 2, "local, ssh, slurm, k8s"),
        (["submit", "--nmae=x", "--", "train.py"], 2, "did you mean --name?"),
        (
            ["submit", "--time=5", "--", "train.py"],
            2,
            "--time is for --on slurm, not for --on local",
        ),
        (["submit", "--wokers=x", "--", "train.py"], 2, "did you mean --workers?"),
        (["submit", "--nodes", "3:2", "--", "train.py"], 2, "--nodes=3:2: the smallest"),
        (["submit", "--nnodes=two", "--", "train.py"], 2, "--nnodes=two is neither"),
        (["submit", "--name", "a b", "--", "train.py"], 2, "a job's name may only contain letters"),
        (["submit", "--name=-x", "--", "train.py"], 2, "no - at the start"),
        (["sumbit", "--", "train.py"], 2, "did you mean submit?"),
        (["submit", "--", "missing.py"], 2, "there is no script missing.py"),
        (["submit", "--rdzv-endpoint", "a:1", "--", "train.py"], 2, "already sets this"),
        (["submit", "--env", "ELASTICRUN_TOKEN=x", "--", "t.py"], 2, "put the secret into"),
        (["submit", "--on=slurm", "--array", "0-3", "--", "t.py"], 2, "submit creates one job"),
        (["suspend"], 2, "JOB is missing"),
        (["resume", "tr"], 1, "no job tr has a run folder"),
        (["exec", "tr"], 2, "put the command after --"),
        (["exec", "tr", "--", "true"], 1, "no job tr"),
        (["scale", "tr", "x"], 2, "is not a number of nodes"),
        (["delete", "tr", "-o", "yaml"], 2, "--output=yaml: use one of text, json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_is_one_sentence_and_starts_nothing(
    person: Person, words: list[str], code: int, part: str
) -> None:
    (person.world.scratch / "train.py").touch()
    said = person.hears(*words, run=ran_here)
    assert (said[0], part in said[1]) == (code, True), said
    assert not (person.world.scratch / "runs").exists()
