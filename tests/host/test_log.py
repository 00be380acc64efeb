"""The shape of our lines on stderr, by LOGLEVEL and by what stderr is."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

SCRIPT = """
import logging
from elasticrun.host import log as o
writer = o.set_up()
o.logger.info("detail")
o.logger.log(o.NOTICE, "node %s joined", "b")
o.set_prefix("elasticrun[a]")
o.logger.warning("careful")
o.log_last_word("over")
assert writer.flush(60)
"""
COLOUR = {"TERM": "xterm"}


def lines(*, terminal: bool = False, **env: str) -> list[str]:
    """What SCRIPT says on a pipe, or on a terminal."""
    kept = {k: v for k, v in os.environ.items() if k not in ("LOGLEVEL", "NO_COLOR", "TERM")}
    ours, theirs = pty.openpty() if terminal else os.pipe()
    done = subprocess.run([sys.executable, "-c", SCRIPT], stderr=theirs, env={**kept, **env})
    with open(ours, "rb", buffering=0) as found:
        text = found.read(65536).decode()
    os.close(theirs)
    assert done.returncode == 0, text
    return text.split("\r\n" if terminal else "\n")[:-1]


PLAIN = ["elasticrun: node b joined", "elasticrun[a]: careful", "elasticrun[a]: over"]


def test_lines_say_who_speaks_and_nothing_of_our_source() -> None:
    assert lines() == PLAIN
    assert lines(LOGLEVEL="INFO") == ["elasticrun: detail", *PLAIN]
    assert lines(LOGLEVEL="WARNING") == PLAIN[1:]
    assert lines(LOGLEVEL="CRITICAL") == PLAIN[2:], "why it ends is always told"


def test_debug_has_time_and_place() -> None:
    glog = r"[VIWEC]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ \S+:\d+\] .+"
    found = lines(LOGLEVEL="DEBUG")
    assert len(found) == 4
    assert all(re.fullmatch(glog, line) for line in found), found


@pytest.mark.parametrize(
    ("env", "coloured"),
    [
        (COLOUR, True),
        ({**COLOUR, "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_colour_on_a_terminal_only(env: dict[str, str], coloured: bool) -> None:
    found = lines(terminal=True, **env)
    assert [re.sub(r"\x1b\[\d+m", "", line) for line in found] == PLAIN
    assert any("\x1b" in line for line in found) is coloured
    assert lines(**COLOUR) == PLAIN
