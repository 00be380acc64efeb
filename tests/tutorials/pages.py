"""A tutorial as a list of blocks: files to write, and commands to type with the output to expect.

    ```python title="train.py"   a file
    ```console                   `$ ` begins a command, `> ` its next line, `^C` is the key; all
                                 other lines are expected output, those of one process in this
                                 order. A number stands for any number or id, `...` for any text.
                                 Other output may be between.

Comments in the lines before a block mark it: `<!-- terminal: 2 -->` (default 1), `<!-- ends with: 1
-->` (the exit code of its commands; default 0), `<!-- not run: REASON -->`. `<!-- files of: PAGE
-->` writes the files of another page.
Other blocks, such as output of another day, have another language or none, and are not run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = re.compile(
    r"(?P<marks>(?:^<!-- [^\n]* -->\n)*)^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<text>.*?)^```$",
    re.M | re.S,
)
FILES_OF = re.compile(r"^<!-- files of: (.+) -->$", re.M)
MARK = re.compile(r"<!-- (terminal|ends with|not run): (.*) -->")
NUMBER = re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8}\b|(?<=-)(?=[a-f]*\d)[0-9a-f]{4}\b|\d+(?:\.\d+)?")
"""A number, or the id of a job."""
CTRL_C = "^C"


@dataclass
class Typed:
    """A command, or Ctrl-C, and the lines that are to appear after it."""

    words: str
    expected: list[str] = field(default_factory=list)


@dataclass
class Block:
    """A file (`path` is its name), or commands; the first may be "" (only output is expected)."""

    path: str
    text: str
    terminal: str
    code: int
    commands: list[Typed]


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page that are to be followed, in order."""
    page_text = page.read_text(encoding="utf-8")
    found = [
        block
        for other in FILES_OF.findall(page_text)
        for block in blocks_of(page.parent / other)
        if block.path
    ]
    for match in BLOCK.finditer(page_text):
        marks = dict(MARK.findall(match["marks"]))
        if "not run" in marks or not (match["title"] or match["language"] == "console"):
            continue
        commands = [] if match["title"] else commands_of(match["text"])
        found.append(
            Block(
                match["title"] or "",
                match["text"],
                marks.get("terminal", "1"),
                int(marks.get("ends with", "0")),
                commands,
            )
        )
    return found


def commands_of(text: str) -> list[Typed]:
    """The commands of a console block. Lines before the first one are output of an earlier one."""
    typed: list[Typed] = []
    for line in text.splitlines():
        if line.startswith("$ ") or line == CTRL_C:
            typed.append(Typed(line.removeprefix("$ ")))
        elif line.startswith("> "):
            typed[-1].words += f"\n{line.removeprefix('> ')}"
        elif line.strip() and line != "...":
            if not typed:
                typed.append(Typed(""))
            typed[-1].expected.append(line)
    return typed


def pattern_of(line: str) -> re.Pattern[str]:
    """What an expected line matches."""
    texts = ("".join(_numbered(part)) for part in line.strip().split("..."))
    return re.compile(r"\s*".join([""]) + ".*".join(texts))


def _numbered(text: str) -> list[str]:
    """The text as a pattern: any number in the place of each, any space in that of spaces."""
    literal = [re.sub(r"(\\ )+", r"\\s+", re.escape(part)) for part in NUMBER.split(text)]
    return [literal[0], *(rf"[0-9a-f]+(?:\.\d+)?{part}" for part in literal[1:])]
