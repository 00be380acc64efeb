"""The line that the first machine prints, pasted on another one."""

from __future__ import annotations

import os
import shlex
import signal

import pytest

from elasticrun.testing.processes import is_master
from tests.compat.live import PUPPET, allreduce, finish
from tests.harness import COMMANDS, ELASTICRUN, World, ran

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
    assert "has used a join code and got the job's token" in first.until_text("used a join code")
    assert str(folder) in second.stderr
    secrets = [path for path in world.scratch.rglob("token") if path.is_file()]
    for launched in (first, second):
        assert all(path.read_text() not in launched.stderr for path in secrets)
    finish(pair, first, second)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "join needs HOST:PORT and a code"),
        (("127.0.0.1:1", "abc"), "that is not a join code"),
        (("a/b:1", "a" * 32), "is no endpoint: write host:port"),
        (("127.0.0.1:1", "a" * 32), "does not answer: "),
        (("127.0.0.1:1", "a" * 32, "train.py"), "only flags may follow the code"),
    ],
)
def test_what_cannot_be_is_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    done = ran("join", *words) if words else ran("join", "x")
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
