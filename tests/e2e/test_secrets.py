"""The job's token: nobody who has not to know it finds it, and nobody gets in without it."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import psutil
import pytest

from elasticrun.config import EXIT_FAILED
from elasticrun.host import user_folder
from elasticrun.testing import processes
from elasticrun.wire.auth import TOKEN_WANTED, reader_token
from elasticrun.wire.rpc.channel import LinkError, get_status
from elasticrun.wire.types import Endpoint
from tests.aio import run
from tests.certificates import Authority
from tests.compat.live import PUPPET, agents, allreduce, finish, job, summing
from tests.further import cases, further
from tests.harness import COMMANDS, ELASTICRUN, LIMIT, Launched, World, await_true, free_port, ran

pytestmark = pytest.mark.slow

SECRET = "5e5a3e-open-sesame-0f1d2c"


def told(world: World) -> list[str]:
    """Where the secret can be read by somebody who looks: what processes were started with, and
    the files of the job (its consoles, its logs, the user's folder)."""
    found = []
    for process in world.survivors():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it has ended meanwhile
            for what in ("environ", "cmdline"):
                if SECRET.encode() in Path(f"/proc/{process.pid}/{what}").read_bytes():
                    found.append(f"{what} of {process.cmdline()}")
    for path in world.scratch.rglob("*"):
        if path.is_file() and path.name != "token" and SECRET.encode() in path.read_bytes():
            found.append(str(path))
    return found


def kinds(world: World) -> set[str]:
    """Which of our processes live, to be sure that all of them were looked at."""
    pids = [process.pid for process in world.survivors()]
    marks = {"master": processes.is_master, "server": processes.is_fork_server}
    return {kind for kind, fits in marks.items() if any(map(fits, pids))}


CALLER = """
import sys
from elasticrun.launcher import LaunchConfig, elastic_launch
config = LaunchConfig(1, 1, 2, run_id="x", rdzv_endpoint="127.0.0.1:{port}", rdzv_backend="c10d")
elastic_launch(config, sys.executable)("-u", {script!r})
"""
RUN = """
from elasticrun.run import main
main(["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}", "--nproc-per-node=2", {script!r}])
"""


@pytest.mark.parametrize(
    "how",
    cases(
        ["forked", "execed", "program", "elastic_launch", "run", "file"],
        kept=["forked"],
    ),
)
def test_the_token_is_nowhere_to_be_seen(world: World, how: str) -> None:
    port = free_port()
    env = {"ELASTICRUN_TOKEN": SECRET, "LOGLEVEL": "DEBUG", "ELASTICRUN_LAUNCH": "auto"}
    meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--nproc-per-node=2")
    command = [*COMMANDS[ELASTICRUN], *meet, "--redirects=3", f"--log-dir={world.scratch}/logs"]
    if how == "execed":
        command.append("--launch=exec")
    elif how == "program":
        command += ["--no-python", sys.executable]
    elif how == "file":
        (world.scratch / "token").write_text(SECRET + "\n")
        command.append(f"--token-file={world.scratch}/token")
        del env["ELASTICRUN_TOKEN"]
    command.append(PUPPET)
    for name, program in (("elastic_launch", CALLER), ("run", RUN)):
        if how == name:
            command = [sys.executable, "-c", program.format(port=port, script=PUPPET)]
    launched = world.command(command, env=env)
    peers = summing(world, 2)
    assert kinds(world) == {"master", "server"}
    assert told(world) == []
    page = run(get_status(Endpoint("127.0.0.1", port), LIMIT, token=reader_token(SECRET)))
    assert page.phase == "running"
    finish(peers, launched)
    assert told(world) == []


@further(
    "e2e/test_strangers::test_a_job_trains_on_under_attack",
    "jobs/test_status::test_of_a_job_with_a_token",
)
def test_without_the_token_a_node_ends_with_a_sentence_and_the_job_goes_on(world: World) -> None:
    port = free_port()
    jobs = agents(world, ELASTICRUN, 2, "2", port, env={"ELASTICRUN_TOKEN": SECRET})
    peers = world.hub.ranks(2)
    for wrong in ({}, {"ELASTICRUN_TOKEN": "not " + SECRET}):
        (late,) = agents(world, ELASTICRUN, 1, "2", port, env=wrong)
        assert late.wait() == EXIT_FAILED
        assert "ELASTICRUN_TOKEN" in late.stderr
        assert "Traceback" not in late.stderr
    assert allreduce(world, peers) == [2, 2]
    # the master's own thread writes it
    await_true(lambda: any("refused a" in launched.stderr for launched in jobs), "refusal")
    assert told(world) == []
    finish(peers, *jobs)
    assert len(world.hub.peers) == 2


def masters(launched: Launched) -> list[psutil.Process]:
    return [p for p in launched.below() if processes.is_master(p.pid)]


@pytest.mark.parametrize("static", cases([False, True], kept=[False]), ids=["standalone", "static"])
def test_a_job_of_one_node_has_a_token_of_its_own_and_listens_on_loopback(
    world: World, static: bool
) -> None:
    """Its own user reads the status without naming the token; nobody else does."""
    port = free_port()
    words = (f"--master-port={port}", "--nnodes=1") if static else ("--standalone",)
    launched = job(world, ELASTICRUN, *words)
    (peer,) = world.hub.ranks(1)
    (master,) = masters(launched)
    listening = [c for c in master.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {c.laddr.ip.removeprefix("::ffff:") for c in listening} == {"127.0.0.1"}
    home = world.scratch / "run"
    await_true(lambda: list(home.rglob("master-*.json")), "master's file")
    (folder,) = {path.parent for path in home.rglob("master-*.json")}
    (entry,) = user_folder.published(folder)
    assert folder.stat().st_mode & 0o077 == 0
    for endpoint in (entry.endpoint, Endpoint("127.0.0.1", port))[: 1 + static]:
        with pytest.raises(LinkError) as refused:
            run(get_status(endpoint, LIMIT))
        assert str(refused.value) == TOKEN_WANTED
    for words in ((), (str(entry.endpoint),)):
        asked = ran("status", "--json", *words, env=world.environment())
        assert asked.returncode == 0, asked.stderr
        pages = json.loads(asked.stdout)
        assert (pages if words else pages[0])["master"]["phase"] == "running"
    finish([peer], launched)


# ---------------------------------------------------------------- TLS


def tls_flags(world: World, *names: str) -> tuple[str, ...]:
    """Flags of a node whose certificate, by a CA of this world, bears these names."""
    folder = world.scratch / "tls"
    folder.mkdir(exist_ok=True)
    authority = Authority(folder)
    if not Path(authority.cert).exists():
        authority.create()
    files = authority.sign(f"node-{len(names)}", *names)
    return (f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-ca={files.ca}")


@pytest.mark.parametrize(
    "static", cases([False, True], kept=[False]), ids=["elastic", "behind-the-door"]
)
def test_a_job_over_tls(world: World, static: bool) -> None:
    """Two nodes with TLS and a token; one without TLS, and `status` with and without it."""
    port = free_port()
    flags = tls_flags(world, "IP:127.0.0.1")
    env = {"ELASTICRUN_TOKEN": SECRET}
    jobs = agents(world, ELASTICRUN, 2, "2", port, *flags, env=env, static=static)
    peers = summing(world, 2)
    (plain,) = agents(world, ELASTICRUN, 1, "2", port, env=env, first=1, static=static)
    assert plain.wait() == EXIT_FAILED
    assert "uses TLS and this node does not" in plain.stderr
    for words, said in ((flags, ""), ((), "uses TLS and this node does not")):
        ask = ("status", f"127.0.0.1:{port}", "--json", *words)
        asked = ran(*ask, env=world.environment(env))
        assert asked.returncode == bool(said)
        assert said in asked.stderr
    finish(peers, *jobs)
