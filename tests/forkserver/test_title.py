"""A script gives its rank a title: seen from outside and from within as in a plain interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from elasticrun.wire.spawning import SendSignal
from elasticrun.wire.types import EntryKind, Entrypoint
from tests import needs
from tests.forkserver.driver import Driver, fifo, plain_environment, read_line, script
from tests.further import cases, further

needs.packages("setproctitle")
pytestmark = pytest.mark.slow

TITLED = """
import ctypes, json, os, signal, subprocess, sys
names = [word.partition("=")[0] for word in open("/proc/self/environ").read().split("\\0")[:-1]]
import setproctitle

get = ctypes.CDLL(None).getenv
get.restype = ctypes.c_char_p
first = setproctitle.getproctitle()
setproctitle.setproctitle("train: " + "x" * int(sys.argv[2]))
os.environ["ADDED"], os.environ["A_WORD"] = "later", "changed"
said = {
    "first title": first,
    "title": setproctitle.getproctitle(),
    "variables in C": [str(get(name)) for name in (b"A_WORD", b"ANOTHER", b"ADDED")],
    "in a child": subprocess.check_output(["sh", "-c", "echo $A_WORD $ANOTHER $ADDED"], text=True),
    "in order": list(os.environ) == [*names, "ADDED"],
}
import torch

said["sum"] = torch.ones(3).sum().item()
with open(sys.argv[1], "w") as out:
    print(json.dumps(said), file=out, flush=True)
signal.pause()
"""


@further("forkserver/test_ranks::test_tools_see_the_script")
@pytest.mark.parametrize("length", cases([4, 300], kept=[300]))
def test_a_title_is_seen_as_in_a_plain_interpreter(
    server: Driver, tmp_path: Path, length: int
) -> None:
    target = script(tmp_path / "titled.py", TITLED).target
    more = {"A_WORD": "seen", "ANOTHER": "kept"}
    with fifo(tmp_path / "said") as said:
        words = (str(said), str(length), "", "two words")
        key = server.start(Entrypoint(EntryKind.SCRIPT, target, words), env=more)
        forked = seen(said, server.spawned(key).pid)
        server.tell(SendSignal(key, 9))
        assert server.exited(key).code == -9
        command = [sys.executable, "-u", target, *words]
        with subprocess.Popen(command, env=plain_environment(**more)) as process:
            plain = seen(said, process.pid)
            process.kill()
    assert forked == plain
    assert plain["first title"] == " ".join(command)
    assert plain["title"] == "train: " + "x" * length
    assert plain["in order"] is True


def seen(said: Path, pid: int) -> dict[str, Any]:
    told = json.loads(read_line(said))
    process = psutil.Process(pid)
    return {**told, "cmdline": process.cmdline(), "name": process.name()}
