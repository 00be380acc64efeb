"""The line that the first machine prints, pasted on another one."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from elasticrun.config import Tls
from elasticrun.testing.processes import is_master
from elasticrun.wire.auth import JOIN_CODE_LIFE, join_code
from tests import needs
from tests.certificates import Authority
from tests.compat.live import PUPPET, allreduce, finish
from tests.further import further
from tests.harness import COMMANDS, ELASTICRUN, SCRIPTS, World, ran, status_of

pytestmark = pytest.mark.slow

HEAD = "run this on it within 60 minutes:\n"


def test_a_pasted_line_makes_this_machine_a_node(world: World) -> None:
    folder = world.scratch / "code"
    folder.mkdir()
    (folder / "train.py").symlink_to(PUPPET)
    first = world.command([*COMMANDS[ELASTICRUN], "--nnodes=1:2", "train.py"], cwd=folder)
    world.hub.ranks(1, world_size=1)
    said = first.until_text(" join ")
    line = said.split(HEAD)[1].splitlines()[0]
    assert len(line) < 80  # a terminal of that width does not break it
    verb, *words = shlex.split(line)
    assert verb == "elasticrun"
    assert shlex.join(words) in line  # nothing in it needs quotes

    for process in first.below():
        if is_master(process.pid):  # the next one knows the code too
            os.kill(process.pid, signal.SIGKILL)
    second = world.command([*COMMANDS[ELASTICRUN], *words], cwd=world.scratch)
    pair = world.hub.ranks(2, world_size=2)
    assert allreduce(world, sorted(pair, key=lambda p: p.rank)) == [2, 2]
    assert "used a join code and received the job's token" in first.until_text("used a join code")
    assert str(folder) in second.stderr
    (row,) = json.loads(ran("list", "-o", "json", env=world.environment()).stdout)
    assert f"joining job {row['name']} in " in second.stderr
    assert row["id"] == row["name"] == f"train-{row['run_id']}"
    assert status_of(env=world.environment()).splitlines()[1].startswith(row["name"])
    secrets = [path for path in world.scratch.rglob("token") if path.is_file()]
    for launched in (first, second):
        assert all(path.read_text() not in launched.stderr for path in secrets)
    finish(pair, first, second)


@further(
    "test_a_pasted_line_makes_this_machine_a_node",
    "agent/test_checkout::test_two_agents_of_a_host_run_one_checkout",
)
def test_a_machine_joins_a_job_whose_code_is_in_git(world: World) -> None:
    """It fetches the code for itself, where the command was typed if that folder is there."""
    needs.program("git", package="git")
    origin, typed = world.scratch / "train", world.scratch / "typed"
    for folder in (origin, typed):
        folder.mkdir()
    code = f"import runpy, sys; sys.path.insert(0, {str(SCRIPTS)!r}); runpy.run_path({PUPPET!r}, "
    (origin / "train.py").write_text(code + "run_name='__main__')")
    who = ("-c", "user.name=x", "-c", "user.email=x@x")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "x")):
        subprocess.run(["git", *who, *words], cwd=origin, check=True)
    flags = ("--nnodes=1:2", f"--git={origin}", "train.py")
    first = world.command([*COMMANDS[ELASTICRUN], *flags], cwd=typed)
    world.hub.ranks(1, world_size=1)
    _, *words = shlex.split(first.until_text(" join ").split(HEAD)[1].splitlines()[0])
    second = world.command([*COMMANDS[ELASTICRUN], *words], cwd=world.scratch)
    pair = world.hub.ranks(2, world_size=2)
    for launched in (first, second):
        assert f", in {typed}/code/train\n" in launched.stderr
    finish(pair, first, second)


@further(
    "test_a_pasted_line_makes_this_machine_a_node",
    "e2e/test_secrets::test_the_token_is_nowhere_to_be_seen",
)
def test_files_of_the_first_machine_are_not_asked_for(world: World) -> None:
    """The token comes with the answer; the code is in no command line after the start."""
    ours, others = world.scratch / "ours", world.scratch / "others"
    ours.write_text("a" * 64)
    others.write_text("b" * 64)
    flags = ("--nnodes=1:2", f"--token-file={ours}", str(PUPPET))
    first = world.command([*COMMANDS[ELASTICRUN], *flags], cwd=world.scratch)
    world.hub.ranks(1, world_size=1)
    _, _, at, code = shlex.split(first.until_text(" join ").split(HEAD)[1].splitlines()[0])
    ours.unlink()
    environ = {"ELASTICRUN_TOKEN_FILE": str(others)}
    command = [*COMMANDS[ELASTICRUN], "join", at, code]
    second = world.command(command, cwd=world.scratch, env=environ)
    pair = world.hub.ranks(2, world_size=2)
    shown = Path(f"/proc/{second.pid}/cmdline").read_text()
    assert f"join\0{at}\0-\0" in shown
    finish(pair, first, second)


@further("e2e/test_secrets::test_a_job_over_tls", "test_a_pasted_line_makes_this_machine_a_node")
def test_each_machine_has_its_own_certificate(world: World) -> None:
    """Without one, it is told that it needs one."""
    authority = Authority(world.scratch).create()
    ours, theirs = (authority.sign(name, "IP:127.0.0.1") for name in ("one", "two"))

    def flags(files: Tls) -> list[str]:
        return [f"--tls-{name}={getattr(files, name)}" for name in ("cert", "key", "ca")]

    command = [*COMMANDS[ELASTICRUN], "--nnodes=1:2", "--local-addr=127.0.0.1", *flags(ours)]
    first = world.command([*command, str(PUPPET)])
    world.hub.ranks(1, world_size=1)
    _, *words = shlex.split(first.until_text(" join ").split(HEAD)[1].splitlines()[0])
    assert "the master uses TLS and this node does not" in ran(*words).stderr
    joined = [*COMMANDS[ELASTICRUN], *words, "--local-addr=127.0.0.1", *flags(theirs)]
    second = world.command(joined)
    pair = world.hub.ranks(2, world_size=2)
    assert ours.cert not in second.stderr
    finish(pair, first, second)


FRESH = str(join_code("a token", time.time()))
OLD = str(join_code("a token", time.time() - 3 * JOIN_CODE_LIFE))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "join needs HOST:PORT and a code"),
        (("127.0.0.1:1", "abc"), "that is not a join code"),
        (("127.0.0.1:1", "-"), "that is not a join code"),  # an empty standard input
        (("a/b:1", FRESH), "is not an endpoint: write host:port"),
        (("127.0.0.1:1", FRESH), "does not answer: "),
        (("127.0.0.1:1", OLD), "this join code expired long ago according to this machine's clock"),
        (("127.0.0.1:1", FRESH, "train.py"), "only flags may follow the code"),
    ],
    ids=["nothing", "no code", "no input", "not an endpoint", "no answer", "too old", "a script"],
)
def test_what_cannot_be_is_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    done = ran("join", *words) if words else ran("join", "x")
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
