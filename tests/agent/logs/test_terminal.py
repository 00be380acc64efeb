"""elasticrun on a pseudo-terminal, and on a pipe: what people see, and what programs read."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticrun.agent.logs import tail
from tests.further import cases, further
from tests.harness import ELASTICRUN, LIMIT, SCRIPTS, World

TRACEBACK = re.compile(
    r'(?m)^\[3\] Traceback \(most recent call last\):\n\[3\]   File ".*", line \d+, in main\n'
    r"(\[3\]   .*\n)+\[3\] ValueError: .*'three'\n"
)


UNHURRIED = """
import sys
from elasticrun.agent.logs import fold, tail
from elasticrun.__main__ import main

fold.WINDOW, tail.SHOW_AFTER = (float(sys.argv.pop(1)) for _ in range(2))
sys.exit(main())
"""
"""elasticrun that waits so many seconds for ranks that are about to say the same, and for the end
of a line."""


class Seen:
    """What comes out at the other end, until the last writer has gone."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self.text = ""

    def until(self, enough: Callable[[str], object]) -> str:
        """Read until that is so; without it, to the end."""
        timer = threading.Timer(LIMIT, os._exit, (99,))
        timer.start()
        try:
            while not enough(self.text):
                with contextlib.suppress(OSError):  # EIO: a terminal that nobody has any more
                    data = os.read(self._reader, 65536)
                    self.text += data.decode().replace("\r\n", "\n")
                    if data:
                        continue
                break
        finally:
            timer.cancel()
        return self.text


@pytest.fixture(params=["terminal", "pipe"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    reader, writer = pty.openpty() if request.param == "terminal" else os.pipe()
    yield reader, writer
    os.close(reader)


def chorus(world: World, writer: int, *flags: str, show_after: float = tail.SHOW_AFTER) -> None:
    """Four ranks."""
    words = ("--nproc-per-node=4", "--tee=3", "--log-dir=logs", *flags)
    command = (sys.executable, "-c", UNHURRIED, str(LIMIT), str(show_after), *words)
    world.command((*command, str(SCRIPTS / "chorus.py")), stdout=writer)
    os.close(writer)


def files(world: World) -> dict[int, str]:
    """What the ranks have written, as it is in their files."""
    found = sorted((world.scratch / "logs").glob("*/attempt_0/*/stdout.log"))
    return {int(path.parent.name): Path(path).read_bytes().decode() for path in found}


@pytest.mark.parametrize("ends", ["terminal"], indirect=True)
def test_a_terminal_is_folded(world: World, ends: tuple[int, int]) -> None:
    reader, writer = ends
    chorus(world, writer, show_after=LIMIT)  # the beginning of a line would end its folding
    seen = Seen(reader)
    seen.until(lambda text: "step 100" in text)
    (world.scratch / "more").touch()
    early = seen.until(lambda text: "\n[2] nfs: server not responding\n" in text)
    seen.until(TRACEBACK.search)
    (world.scratch / "go").touch()
    text = seen.until(lambda _: False)
    assert world.jobs[0].wait() == 0
    assert re.search(r"(?m)^\[0-3\] step 100 of 500: loss ~2\.3\d$", early), text
    assert TRACEBACK.search(text), text
    assert re.search(r"(?m)^\[[0-3,-]+\] 3/3 \|###\| 9 it/s$", text), text
    assert "1/3" not in text
    assert re.search(r"(?m)^\[0-3\] no end ~\d at all$", text), text
    assert all(x.count("\r") == 3 and x.count("\n") >= 2 for x in files(world).values())


@further("test_a_terminal_is_folded", "agent/logs/test_logs")
@pytest.mark.parametrize(
    ("ends", "flag"),
    cases(
        [("terminal", "--no-fold"), ("pipe", "")], kept=[("terminal", "--no-fold")], several=True
    ),
    indirect=["ends"],
)
def test_unfolded_to_the_byte(world: World, ends: tuple[int, int], flag: str) -> None:
    reader, writer = ends
    chorus(world, writer, *filter(None, [flag]))
    for word in ("more", "go"):
        (world.scratch / word).touch()
    text = Seen(reader).until(lambda _: False)
    assert world.jobs[0].wait() == 0
    bars = r"|\r"
    if flag:  # a terminal, on which a bar is one line
        bars, text = "", text.replace("\x1b[K", "")
    lines = [line.rpartition("\r")[2] for line in text.split("\n")[:-1]]
    expected = {
        i: [line.rstrip("\r").rpartition("\r")[2] for line in re.split(rf"\r\n|\n{bars}", written)]
        for i, written in files(world).items()
    }
    for rank, written in expected.items():
        before = f"[default{rank}]:"
        shown = [line for line in lines if line.startswith(before)]
        assert shown == [before + line for line in written], text
    assert len(lines) == sum(map(len, expected.values()))


ALIKE = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("here-" + os.environ["RANK"], "x").close()
while not all(os.path.exists(f"here-{rank}") for rank in range(2)):
    pass
import nowhere
"""
"""No rank is stopped because the other one has failed already."""


@pytest.mark.parametrize("ends", ["terminal"], indirect=True)
def test_one_error_of_all_ranks_is_told_once(world: World, ends: tuple[int, int]) -> None:
    """By the ranks, in the summary, and in the sentence with which the job ends."""
    reader, writer = ends
    script = world.scratch / "train.py"
    script.write_text(ALIKE)
    words = ("--nproc-per-node=2", "--tee=3", "--log-dir=logs", str(script))
    world.launch(ELASTICRUN, *words, stdout=writer, stderr=writer)
    os.close(writer)
    text = Seen(reader).until(lambda _: False)
    assert world.jobs[0].wait() == 1
    assert text.count("No module named 'nowhere'") == 3, text
    assert text.count("Traceback (most recent call last)") == 2, text
    assert re.search(r"(?m)^\[[01]\] the same traceback as rank [01]$", text), text
    assert re.search(r"(?m)^  rank [01]: same exception as the root cause$", text), text
