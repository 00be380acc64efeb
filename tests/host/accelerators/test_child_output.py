"""Questions to throw-away children: the answer, or why there is none, and nothing left behind."""

from __future__ import annotations

import os
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from elasticrun.host.accelerators.child_output import MAX_ANSWER, NoAnswer, json_of, output_of
from tests.harness import LIMIT


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_last_line_is_the_answer() -> None:
    code = "print('a library says hello'); print('{\"a\": [1]}')"
    assert json_of(python(code), os.environ, LIMIT) == {"a": [1]}


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print('hello')", "it printed no answer"),
        ("print('[]')", "it printed no answer"),
        ("", "it printed no answer"),
        ("raise SystemExit('the driver is asleep')", "the driver is asleep"),
        ("raise ImportError('no such thing')", "ImportError: no such thing"),
    ],
)
def test_no_answer_has_a_reason(code: str, why: str) -> None:
    with pytest.raises(NoAnswer) as caught:
        json_of(python(code), os.environ, LIMIT)
    assert str(caught.value) == why


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(NoAnswer, match="no-such-tool cannot be started: No such file"):
        output_of(["no-such-tool"], os.environ, LIMIT)


def test_an_answer_is_bounded() -> None:
    """What a tool in trouble prints is not even kept until it ends."""
    endless = python("for _ in range(256): print('x' * 2**18)")
    tracemalloc.start()
    try:
        assert len(output_of(endless, os.environ, LIMIT)) == MAX_ANSWER
        assert tracemalloc.get_traced_memory()[1] < 16 * MAX_ANSWER
    finally:
        tracemalloc.stop()


def test_a_child_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """The grandchild writes into a fifo and keeps it open: its EOF is the proof."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    shell = ["/bin/sh", "-c", f"(echo up; exec sleep 1000) > {fifo} & wait"]
    for limit in (1.0, 10.0, 60.0):  # where the machine pauses, 1 s is too short for a word
        read = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        began = time.monotonic()
        with pytest.raises(NoAnswer, match=f"no answer within {limit:g} s"):
            output_of(shell, os.environ, limit)
        assert time.monotonic() - began < limit + 60.0
        os.set_blocking(read, True)
        with open(read) as file:
            if (text := file.read()) == "up\n":
                break
    assert text == "up\n"
