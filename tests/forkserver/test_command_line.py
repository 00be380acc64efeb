"""`ps`, `pkill -f` and psutil see the script that a rank runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elasticrun.testing import processes
from elasticrun.wire.types import Entry, EntryKind
from tests.forkserver.driver import LIMIT, Driver, fifo, read_line, script

pytestmark = pytest.mark.slow

WAIT = "import sys, time\nopen(sys.argv[1], 'w').write('on\\n')\nwhile True:\n    time.sleep(60)\n"


def arguments_at(pid: int) -> int:
    """The address of a process' command line: field 48 of proc(5)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[45])


@pytest.mark.parametrize("length", [10, 5000], ids=["in place", "longer than the old one"])
def test_tools_see_the_script(server: Driver, tmp_path: Path, length: int) -> None:
    entry = script(tmp_path / "train_me.py", WAIT)
    word = "x" * length
    with fifo(tmp_path / "said") as said:
        entry = Entry(EntryKind.SCRIPT, entry.target, (str(said), "--name", word))
        key = server.start(entry, env={"A_WORD": "seen"})
        read_line(said)
        pid = server.spawned(key).pid
        process = psutil.Process(pid)
        assert process.cmdline() == [sys.executable, "-u", entry.target, str(said), "--name", word]
        assert process.name().startswith("python")
        assert process.environ()["A_WORD"] == "seen"
        if length == 10:  # where a program's own setproctitle writes, for all the server's title
            assert arguments_at(pid) == arguments_at(server.process.pid)
        assert processes.command(server.process.pid) == "elasticrun: fork server"
        pattern = f"{tmp_path.name}.*train_me.py.*--name {word[:10]}"
        found = subprocess.run(["pkill", "-KILL", "-f", pattern], timeout=LIMIT, check=False)
        assert found.returncode == 0
        assert server.exited(key).code == -9


FALLBACK = """
import sys
from elasticrun.system import title
title._PR_SET_MM_MAP = 99  # an old kernel
words = [w.encode() for w in sys.argv[2:]]
assert not title.set_command_line(words, [b"A=1"])
print(open("/proc/self/cmdline").read())
"""


@pytest.mark.parametrize("words", [["python", "-u", "a.py"], ["python", "x" * 4000]])
def test_an_old_kernel_shows_a_title(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FALLBACK, " " * 200, *words[:1], *words[1:]],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    title = done.stdout.strip("\0\n")
    assert " ".join(words).startswith(title)
    assert title.startswith("python")
    assert len(title) >= min(len(" ".join(words)), 200)


TITLE = """
import sys
from elasticrun.system import title
before = open("/proc/self/environ", "rb").read()
title._PR_SET_MM_MAP = int(sys.argv[1]) or title._PR_SET_MM_MAP
title.set_title(b"elasticrun: store")
assert open("/proc/self/environ", "rb").read() == before
print(open("/proc/self/cmdline").read())
"""


@pytest.mark.parametrize("number", ["0", "99"], ids=["as it is", "an old kernel"])
def test_what_was_forked_for_us_has_a_title(number: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TITLE, number, "--fd=4"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip("\0\n") == "elasticrun: store"
