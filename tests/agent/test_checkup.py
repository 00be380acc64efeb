"""The checkup of an agent: told in a line, in nobody's way, and with --precheck the end."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from pathlib import Path

import pytest

from elasticrun.agent import checkup as own
from elasticrun.agent.checkup import Checkup, subject
from elasticrun.config import EXIT_BAD_NODE, Identity, Place
from elasticrun.host.doctor import checkup
from elasticrun.host.doctor.checkup import CheckFamily
from elasticrun.host.doctor.verdict import failed, ok, warning
from elasticrun.master import server
from elasticrun.wire.auth import reader_token
from elasticrun.wire.types import Endpoint, Finding
from tests.agent.configs import STANDALONE, launched, node_context
from tests.further import further
from tests.harness import ELASTICRUN, PATIENT, SCRIPTS, Launched, World, free_port
from tests.master.people import LIMIT, serving

SCRIPT = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('it ran')"
TOKEN = "what the nodes of the job know"
TRUSTED = Identity("the-job", token=TOKEN)
FEW = 'ulimit -Sn 100; exec "$@"'


def with_few_files(world: World, *words: str) -> Launched:
    """A job under a limit of 100 open files."""
    command = ("sh", "-c", FEW, "sh", sys.executable, "-m", "elasticrun", *words)
    return world.command(command, env=PATIENT)


def test_a_failure_is_told_and_ends_nothing(world: World) -> None:
    """The rank stays until it is told: at the end of a job nobody waits for its checkup."""
    job = with_few_files(world, str(SCRIPTS / "puppet.py"))
    (rank,) = world.hub.ranks(1)
    job.until_text("ulimit -n 1024; the agent continues: --precheck=1 would end it")
    rank.order("exit")
    assert job.wait() == 0, job.stderr
    (line,) = [line for line in job.stderr.splitlines() if "open files" in line]
    assert (
        "this machine is unfit: open files: ulimit -n is 100, which is too few for any rank" in line
    )
    assert line.endswith("; ulimit -n 1024; the agent continues: --precheck=1 would end it")


@pytest.mark.parametrize("nnodes", [1, 2])
def test_with_precheck_no_rank_is_started(world: World, nnodes: int) -> None:
    """Before the node joins: of two nodes the other one is not even waited for."""
    words = [f"--nnodes={nnodes}", "--precheck=1"]
    if nnodes > 1:
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
    script, mark = world.scratch / "script.py", world.scratch / "mark"
    script.write_text(SCRIPT)
    job = with_few_files(world, *words, str(script), str(mark))
    assert (job.wait(), mark.exists()) == (EXIT_BAD_NODE, False), job.stderr
    assert "--precheck found this machine unfit: open files: ulimit -n is 100" in job.stderr
    assert "Traceback" not in job.stderr


@further("test_what_is_told", "test_a_failure_is_told_and_ends_nothing")
def test_a_machine_that_is_well_says_nothing(world: World) -> None:
    script, mark = world.scratch / "script.py", world.scratch / "mark"
    script.write_text(SCRIPT)
    job = world.launch(ELASTICRUN, str(script), str(mark))
    assert job.wait() == 0, job.stderr
    seen = [line for line in job.stderr.splitlines() if "this machine" in line]
    # What this very host may lack, and what a pause of it has made slow.
    known = ("kernel log", "disk", "shared memory", "host name", "reverse name")
    known += ("no answer within",)
    assert not [line for line in seen if not any(word in line for word in known)], job.stderr
    assert mark.read_text() == "it ran"


# ---------------------------------------------------------------- beside the start


def found(monkeypatch, *findings: Finding) -> None:
    """Have the machine show these findings."""
    monkeypatch.setattr(
        checkup, "checks", lambda _: [CheckFamily("planted", lambda: findings, LIMIT)]
    )


@pytest.mark.parametrize(
    ("level", "then"), [(0, "; the agent continues: --precheck=1 would end it"), (1, ""), (2, "")]
)
async def test_what_is_told(level: int, then: str, monkeypatch, caplog) -> None:
    found(monkeypatch, ok("a", "well"), warning("b", "so so", "mend"), failed("c", "bad", "leave"))

    mine = Checkup(node_context(launched(precheck=level)))
    with caplog.at_level(logging.INFO, "elasticrun"):
        mine.start()
        await mine._findings
        unfit = await mine.why_unfit()
    assert caplog.messages == [
        "this machine: b: so so; mend",
        f"this machine is unfit: c: bad; leave{then}",
    ]
    assert unfit == ("" if then else "--precheck found this machine unfit: c: bad; leave")


@pytest.mark.parametrize(("level", "unfit"), [(0, False), (1, True), (2, True)])
async def test_only_precheck_ends_an_agent(monkeypatch, level: int, unfit: bool) -> None:
    found(monkeypatch, failed("c", "bad", "leave"), failed("d", "worse", ""))

    mine = Checkup(node_context(launched(precheck=level)))
    mine.start()
    said = await mine.why_unfit()
    mine.close()  # the loop goes on in the next test
    assert said.endswith("c: bad; leave (and 1 more)") is unfit
    assert bool(said) is unfit


async def test_nobody_waits_for_a_check_that_hangs(monkeypatch) -> None:
    """Without --precheck; and the agent's end does not either."""
    go = threading.Event()
    monkeypatch.setattr(
        checkup, "checks", lambda _: [CheckFamily("hangs", lambda: [go.wait(LIMIT)])]
    )
    mine = Checkup(node_context())
    mine.start()
    await asyncio.sleep(0)
    assert await mine.why_unfit() == ""
    mine.close()
    assert not go.is_set()
    go.set()


def test_what_an_agent_wants_of_its_machine(tmp_path: Path) -> None:
    several = Place("elastic", "head", 29400)
    wanted = subject(launched({"max_nodes": 100}), several)
    assert (wanted.nproc, wanted.ranks, wanted.several) == (2, 200, True)
    assert "log" not in [folder.role for folder in wanted.folders]  # /dev/null
    here = Place("elastic", "localhost", 29400)
    assert not subject(launched({"max_nodes": 2}), here).several
    assert not subject(launched(), STANDALONE).several


# ---------------------------------------------------------------- from the master's side


@pytest.fixture
def at_once(monkeypatch) -> Place:
    """A master is asked as soon as it has on_welcome the agent; where it is."""
    monkeypatch.setattr(own, "ASK_AFTER", 0.0)
    monkeypatch.setattr(own, "ANSWER_LIMIT", LIMIT)
    return Place("elastic", "localhost", 29400)


async def test_the_master_is_asked_for_its_view(monkeypatch) -> None:
    monkeypatch.setattr(server, "DIAL_LIMIT", LIMIT)
    monkeypatch.setattr(own, "ANSWER_LIMIT", LIMIT)
    async with serving(token=TOKEN) as served:
        answers, dialled = await own.ask(served.endpoint, reader_token(TOKEN), None)
    assert dialled == "127.0.0.1"
    assert [answer.reached.ok for answer in answers] == [True, True]
    assert len({answer.port for answer in answers}) == 2
    checks = [finding.check for finding in checkup.reachability(answers, dialled)]
    assert checks == ["clock", "ports", "packet size"]


@pytest.mark.parametrize("several", [True, False])
async def test_an_agent_of_several_asks_a_while_after_its_welcome(
    several: bool, at_once: Place, monkeypatch
) -> None:
    """One of a single node has nobody to hear of its ports."""
    told: list[list[Finding]] = []
    monkeypatch.setattr(own, "log_findings", lambda findings, _: told.append(list(findings)))
    async with serving(token=TOKEN) as served:
        spec = {"max_nodes": 2 if several else 1}
        mine = Checkup(node_context(launched(spec), place=at_once, identity=TRUSTED))
        mine.on_welcome(served.endpoint)
        assert (mine._asking is not None) is several
        if mine._asking is not None:
            await asyncio.wait_for(mine._asking, LIMIT)
            assert [finding.check for finding in told[0]] == ["clock", "ports", "packet size"]


@pytest.mark.parametrize("level", [0, 1])
async def test_its_finding_ends_nothing(level: int, at_once: Place, monkeypatch, caplog) -> None:
    """With --precheck neither, and the line promises nothing else."""
    monkeypatch.setattr(checkup, "reachability", lambda *_: [failed("c", "bad", "leave")])
    launch = launched({"max_nodes": 2}, precheck=level)
    with caplog.at_level(logging.WARNING, "elasticrun"):
        async with serving(token=TOKEN) as served:
            mine = Checkup(node_context(launch, place=at_once, identity=TRUSTED))
            mine.on_welcome(served.endpoint)
            await asyncio.wait_for(mine._asking, LIMIT)
    assert "this machine is unfit: c: bad; leave; the agent continues" in caplog.messages


async def test_a_silent_master_is_no_finding(at_once: Place, caplog, monkeypatch) -> None:
    monkeypatch.setattr(own, "ANSWER_LIMIT", 6.0)
    with caplog.at_level(logging.INFO, "elasticrun"):
        mine = Checkup(node_context(launched({"max_nodes": 2}), place=at_once))
        mine.on_welcome(Endpoint("127.0.0.1", free_port()))
        await asyncio.wait_for(mine._asking, LIMIT)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "the master did not check this node's ports" in record.getMessage()
