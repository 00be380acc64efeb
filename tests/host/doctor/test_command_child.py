"""The child that runs a health command: its answer, its limits, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from elasticrun.host.accelerators.child_output import json_of
from elasticrun.host.doctor import command_child
from tests.harness import LIMIT, await_exit


def ran(text: str, limit: float = LIMIT) -> dict[str, Any]:
    return json_of(command_child.command(limit, text), os.environ, 2 * LIMIT, lifeline=True)


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("true", 0, ""),
        ("echo; echo GPU 3 is lost; echo more; exit 1", 1, "GPU 3 is lost"),
        ("echo first >&2; echo last >&2; exit 3", 3, "last"),
        ("echo noise >&2; echo verdict; exit 1", 1, "verdict"),
        ("kill -9 $$", -9, ""),
        ("printf 'a\\tb\\033[31mc'", 0, "a b [31mc"),
    ],
)
def test_code_and_line(text: str, code: int, line: str) -> None:
    assert ran(text) == {"code": code, "line": line, "left": []}


def test_what_the_shell_cannot_run() -> None:
    found = ran("no-such-health-check")
    assert found["code"] == 127
    assert "not found" in found["line"]


def test_output_is_bounded_and_does_not_block() -> None:
    found = ran("yes 'a long line of output' | head -c 3000000; yes | head -c 3000000 >&2; exit 4")
    assert (found["code"], found["line"]) == (4, "a long line of output")
    assert len(ran("head -c 100000 /dev/zero | tr '\\0' x")["line"]) == command_child.MAX_LINE


STAYS = "setsid sleep 1000 & echo $! >> {0}; sleep 1000 & echo $! >> {0}; "


def pids_in(place: Path) -> list[int]:
    return [int(word) for word in place.read_text().split()]


def test_a_command_over_its_limit_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """One child is in the command's session, one in its own."""
    place = tmp_path / "pids"
    assert ran(STAYS.format(place) + "echo still; wait", limit=2.0)["code"] is None
    assert len(pids_in(place)) == 2
    assert not await_exit(pids_in(place))


def test_what_a_command_leaves_behind_is_killed(tmp_path: Path) -> None:
    """Nothing is waited for, although the leftovers keep the pipe open."""
    place = tmp_path / "pids"
    assert ran(STAYS.format(place) + "echo done")["code"] == 0
    assert len(pids_in(place)) == 2
    assert not await_exit(pids_in(place))


def test_it_ends_with_its_owner(tmp_path: Path) -> None:
    """The owner is gone when the pipe at standard input ends. The fifo is open once all run."""
    place, fifo = tmp_path / "pids", tmp_path / "fifo"
    os.mkfifo(fifo)
    text = STAYS.format(place) + f"echo $$ >> {place}; echo > {fifo}; wait"
    child = subprocess.Popen(
        command_child.command(LIMIT, text), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child, fifo.open() as opened:
        opened.read()
        child.stdin.close()
        assert child.stdout.read() == b""  # nobody waits for an answer
        assert child.wait(LIMIT) == 0
    assert len(pids_in(place)) == 3
    assert not await_exit(pids_in(place))


def test_killed_it_takes_the_command_with_it(tmp_path: Path) -> None:
    """By a parent-death signal; what the command has started is the agent's, which is a
    subreaper."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    words = command_child.command(LIMIT, f"exec 3>{fifo}; echo $$ >&3; read x")
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child, fifo.open() as opened:
        pid = json.loads(opened.readline())
        child.kill()
        assert opened.read() == ""
    assert not await_exit([pid])
