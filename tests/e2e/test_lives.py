"""What the next life is made from: the files as they are now, and what the last one taught."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.compat.live import PUPPET, allreduce, finish
from tests.harness import COLD, ELASTICRUN, PATIENT, SCRIPTS, World, await_exit, until_file

pytestmark = pytest.mark.slow

SPEAKER = f"""
import sys
sys.path.append({str(SCRIPTS)!r})
import beside
from stage import Stage

stage = Stage(script="old", module=beside.TEXT)
for order in stage.orders():
    sys.exit(order["code"])
"""


def test_a_bug_mended_between_two_lives(world: World) -> None:
    """The script and a module beside it are read anew in every life."""
    script, module = world.scratch / "train.py", world.scratch / "beside.py"
    script.write_text(SPEAKER)
    module.write_text("TEXT = 'old'\n")
    launched = world.launch(ELASTICRUN, "--max-restarts=1", str(script), env=PATIENT)
    (first,) = world.hub.ranks(1, restart=0)
    assert (first.script, first.module) == ("old", "old")
    script.write_text(SPEAKER.replace('"old"', '"mended"'))
    module.write_text("TEXT = 'mended'\n")
    first.order("exit", code=1)
    (second,) = world.hub.ranks(1, restart=1)
    assert second.ppid == first.ppid  # forked by the same server
    assert (second.script, second.module) == ("mended", "mended")
    second.order("exit", code=0)
    assert launched.wait() == 0


@pytest.mark.parametrize("preload", ["", pytest.param("learn", marks=pytest.mark.soak)])
def test_the_second_life_has_what_the_first_one_imported(world: World, preload: str) -> None:
    """The next ranks come from a second server that has it, and which was made ready with cores
    that nobody else wants, or at once; the first server ends when it has no rank left."""
    script = world.scratch / "train.py"
    script.write_text(
        f"import sys\nsys.path.append({str(SCRIPTS)!r})\nimport psutil\n"
        "from puppet import Puppet\nPuppet().run()\n"
    )
    launched = world.launch(
        *(ELASTICRUN, "--nproc-per-node=2", "--max-restarts=2"),
        *("--restart-backoff=0", str(script)),
        env={"LOGLEVEL": "INFO", "ELASTICRUN_PRELOAD": preload, **COLD, **PATIENT},
    )
    first = world.hub.ranks(2, restart=0)
    assert not has_psutil(first[0].ppid)
    until_file(
        world.scratch / "console-0.err",
        lambda text: text.count("ranks will be started by fork") == 2,
    )
    first[1].order("die")
    again = world.hub.ranks(2, restart=1)
    assert again[0].ppid == again[1].ppid != first[0].ppid
    assert has_psutil(again[0].ppid)
    # nothing of that is left in what ranks inherit
    assert os.sched_getscheduler(again[0].pid) == os.SCHED_OTHER
    assert allreduce(world, again) == [2, 2]
    again[1].order("die")  # this round's store was made ready by the first server, the next is not
    last = world.hub.ranks(2, restart=2)
    assert not await_exit([first[0].ppid])
    assert {p.ppid for p in last} == {again[0].ppid}
    assert allreduce(world, last) == [2, 2]
    finish(last, launched)


def has_psutil(pid: int) -> bool:
    """Whether a process has loaded psutil."""
    return "_psutil_linux" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize(
    ("words", "session"),
    [
        pytest.param((PUPPET,), False, id="forked", marks=pytest.mark.soak),
        pytest.param((PUPPET,), True, id="forked, a session"),
        pytest.param(("--launch=exec", PUPPET), True, id="execed", marks=pytest.mark.soak),
        pytest.param(
            ("--no-python", "sh", "-c", '"$0" "$1"; true', sys.executable, PUPPET), True, id="shell"
        ),
    ],
)
def test_no_orphan_of_an_agent_that_is_killed(
    world: World, words: tuple[str, ...], session: bool
) -> None:
    """What ranks have started goes as well; behind a shell the orphan is the trainer itself."""
    launched = world.launch(ELASTICRUN, "--nproc-per-node=2", *words)
    pids = []
    for peer in world.hub.ranks(2):
        peer.order("child", session=session)
        pids += [peer.pid, world.hub.word(peer, "done")["pid"]]
    launched.process.kill()
    launched.wait()
    assert not await_exit(pids)
    world.nothing_left()
