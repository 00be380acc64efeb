"""Processes that ranks leave running: what a script starts last (its upload) may finish."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.further import cases, further
from tests.harness import COLD, ELASTICRUN, World, await_exit

pytestmark = pytest.mark.slow

SCRIPT = """
import os, subprocess, sys
place, ends = sys.argv[1], int(sys.argv[2])
command = f"exec 3<{place}/go; read word <&3; echo uploaded > {place}/done"
nothing = subprocess.DEVNULL
child = subprocess.Popen(
    ["sh", "-c", command], stdin=nothing, stdout=nothing, stderr=nothing,
    start_new_session="own-session" in sys.argv,
)
print("child", child.pid, flush=True)
sys.exit(ends)
"""


@pytest.fixture
def script(world: World) -> Path:
    """A script that leaves a process behind, which waits for a word in a pipe `go`."""
    os.mkfifo(world.scratch / "go")
    path = world.scratch / "train.py"
    path.write_text(SCRIPT)
    return path


def _child(said: str) -> int:
    return int(said.partition("child ")[2].split()[0])


@pytest.mark.parametrize("how", cases([(), ("own-session",)], kept=[()]))
def test_what_a_script_starts_last_may_finish(
    world: World, script: Path, how: tuple[str, ...]
) -> None:
    launched = world.launch(
        ELASTICRUN, "--standalone", str(script), str(world.scratch), "0", *how, env=COLD
    )
    said = launched.until_text("that ranks have left running: ")
    assert "waiting up to 30 s (--child-exit-timeout) for 1 process" in said
    assert f": {_child(launched.stdout)} (sh -c exec 3<" in said
    (world.scratch / "go").write_text("now\n")
    assert launched.wait() == 0
    assert (world.scratch / "done").read_text() == "uploaded\n"
    assert "terminating 1 process" not in launched.stderr


def test_it_is_ended_and_named_when_its_time_is_over(world: World, script: Path) -> None:
    words = ("--standalone", "--child-exit-timeout=1.5", str(script), str(world.scratch), "0")
    launched = world.launch(ELASTICRUN, *words)
    assert launched.wait() == 0
    child = _child(launched.stdout)
    assert f"terminating 1 process that ranks have left running: {child} (sh -c" in launched.stderr
    assert "1.5 s after the ranks exited (--child-exit-timeout)" in launched.stderr
    assert await_exit([child]) == set()


@further("test_it_is_ended_and_named_when_its_time_is_over")
def test_a_ctrl_c_ends_it_at_once_and_names_it(world: World, script: Path) -> None:
    launched = world.launch(ELASTICRUN, "--standalone", str(script), str(world.scratch), "0")
    launched.until_text("that ranks have left running: ")
    launched.signal(signal.SIGINT)
    assert launched.wait() == 0
    child = _child(launched.stdout)
    assert f"killing 1 process that ranks have left running: {child} (sh -c" in launched.stderr
    assert await_exit([child]) == set()


@further(
    "e2e/test_lives::test_descendants_of_a_dead_rank",
    "test_it_is_ended_and_named_when_its_time_is_over",
)
def test_after_a_failure_it_is_ended_at_once(world: World, script: Path) -> None:
    launched = world.launch(ELASTICRUN, "--standalone", str(script), str(world.scratch), "3")
    assert launched.wait() == 1
    assert "left running" not in launched.stderr
    assert await_exit([_child(launched.stdout)]) == set()
