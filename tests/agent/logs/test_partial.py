"""Lines that do not end: prompts and progress bars, on a terminal and in a pipe."""

from __future__ import annotations

import os
import pty
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticrun.agent.logs import fold
from elasticrun.agent.logs.output import LogPlan, RankOutput
from elasticrun.host.log import OpenLine, StderrWriter
from tests.agent.logs.test_logs import make_envs
from tests.harness import LIMIT

K = "\x1b[K"


class Job:
    """What ranks write into their files, and what is seen of it on the one console for both
    streams."""

    def __init__(self, folder: Path, ends: tuple[int, int], ranks: int) -> None:
        self.reader, self.writer = ends
        self.seen = ""
        plan = LogPlan(log_dir=str(folder), tee_all=3)
        self.output = RankOutput(
            plan, "job", "default", ranks, stdout_fd=self.writer, stderr_fd=self.writer
        )
        self.logs = self.output.open_attempt(0, make_envs(ranks))

    def says(self, rank: int, text: str, *, stderr: bool = False) -> None:
        """A rank writes this."""
        logs = self.logs[rank]
        with open(logs.stderr if stderr else logs.stdout, "ab") as file:
            file.write(text.encode())

    def until(self, text: str, limit: float = LIMIT) -> str:
        """Wait for this at the end of what is seen."""
        end = time.monotonic() + limit
        while not self.seen.endswith(text):
            rest = end - time.monotonic()
            assert rest > 0, self.seen
            if select.select([self.reader], [], [], rest)[0]:
                self.seen += os.read(self.reader, 65536).decode().replace("\r\n", "\n")
        return self.seen


Make = Callable[..., Job]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("TERM", "xterm")
    made: list[Job] = []

    def make(how: str, ranks: int = 1) -> Job:
        made.append(Job(tmp_path, pty.openpty() if how == "terminal" else os.pipe(), ranks))
        return made[-1]

    yield make
    for one in made:
        one.output.close(LIMIT)
        os.close(one.reader)
        os.close(one.writer)


@pytest.mark.parametrize("how", ["terminal", "pipe"])
def test_a_prompt_is_shown_and_its_line_goes_on(job: Make, how: str) -> None:
    one = job(how)
    began = time.monotonic()
    one.says(0, "before\nname: ")
    one.until("[default0]:before\n[default0]:name: ")
    assert time.monotonic() - began < 30.0  # half a second on an idle machine
    one.says(0, "Ada\nafter\n")
    one.until("[default0]:name: Ada\n[default0]:after\n")


@pytest.mark.parametrize("how", ["terminal", "pipe"])
def test_other_ranks_do_not_write_into_a_prompt(job: Make, how: str) -> None:
    one = job(how, 2)
    first, second = ("[4] ", "[5] ") if how == "terminal" else ("[default0]:", "[default1]:")
    one.says(0, "name: ")
    one.until(f"{first}name: ")
    one.says(1, "hello\n", stderr=True)  # another stream of the same console
    one.until(f"{first}name: \n{second}hello\n")
    one.says(0, "Ada\n")
    one.until(f"{second}hello\n{first}name: Ada\n")


@pytest.mark.parametrize("how", ["terminal", "pipe"])
def test_each_prompt_has_its_rank(job: Make, how: str) -> None:
    one = job(how, 2)
    first, second = ("[4] ", "[5] ") if how == "terminal" else ("[default0]:", "[default1]:")
    one.says(0, "(Pdb) ")
    one.until(f"{first}(Pdb) ")
    one.says(1, "(Pdb) ")
    one.until(f"{first}(Pdb) \n{second}(Pdb) ")
    one.says(0, "7\n(Pdb) ")
    one.until(f"{second}(Pdb) \n{first}(Pdb) 7\n{first}(Pdb) ")


def test_a_line_that_was_cut_off_and_is_complete_is_not_shown_twice(job: Make) -> None:
    one = job("pipe", 2)
    one.says(0, "loading")
    one.until("[default0]:loading")
    one.says(1, "hello\n")
    one.until("[default0]:loading\n[default1]:hello\n")
    one.says(0, "\nnext\n")
    one.until("[default1]:hello\n[default0]:next\n")


def test_a_bar_moves_on_a_terminal_and_is_lines_in_a_pipe(job: Make) -> None:
    for how, expected in (
        ("terminal", f"[default0]: 1/3\r[default0]: 2/3{K}\r[default0]: 3/3{K}\nend\n"),
        ("pipe", "[default0]: 1/3\n[default0]: 2/3\n[default0]: 3/3\nend\n"),
    ):
        one = job(how)
        for state in (" 1/3", " 2/3", " 3/3"):
            one.says(0, f"\r{state}", stderr=True)
            one.until(state if how == "pipe" or "1" in state else state + K)
        one.says(0, "\n", stderr=True)
        one.until("\n")
        os.write(one.writer, b"end\n")
        assert one.until("end\n") == expected


def test_folded_bars_share_one_line(job: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "BAR_WINDOW", 1.5)  # so long all three may take to say it
    one = job("terminal", 3)
    for state in (1, 2, 3):
        for rank in range(3):
            one.says(rank, f"\r{state}/3 |##|", stderr=True)
        one.until(f"[4-6] {state}/3 |##|" + (K if state > 1 else ""))
    for rank in range(3):
        one.says(rank, "\n", stderr=True)
    assert one.until(f"3/3 |##|{K}\n").count("\n") == 1


def test_what_the_launcher_says_begins_on_a_line_of_its_own(job: Make) -> None:
    one = job("pipe")
    one.says(0, "name: ")
    one.until("name: ")
    StderrWriter(one.writer).write("elasticrun: a word\n")
    one.until("[default0]:name: \nelasticrun: a word\n")
    one.output.close(LIMIT)
    assert one.until("word\n") == "[default0]:name: \nelasticrun: a word\n"


def test_a_line_longer_than_the_terminal_is_not_written_over() -> None:
    line = OpenLine()
    assert line.bytes_to_write(1, b"x" * 100, ends=False, columns=80) == b"x" * 100
    assert line.bytes_to_write(1, b"y", ends=False, columns=80) == b"\ny"
    assert line.bytes_to_write(1, b"z\n", columns=80) == b"\rz\x1b[K\n"
