"""Terminals in which a test types, as a person does: an interactive bash on a pseudo-terminal."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pexpect

from tests.harness import LIMIT
from tests.tutorials.pages import CTRL_C, blocks_of, pattern_of

PROMPT = re.compile("\x1e(\\d+)\x1e")
"""What this bash prints in the place of a prompt: the exit code of the last command."""

WRITER = re.compile(r"elasticrun(?: \w+)?: ")
"""How lines of the agent (`elasticrun: `) and of the master begin; all others are of commands and
ranks."""

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """One terminal, and all that it has shown."""

    def __init__(
        self, name: str, folder: Path, environ: Mapping[str, str], prefix: Sequence[str] = ()
    ) -> None:
        """`prefix`: the words before a command that runs it on another host of a lab."""
        self.name = name
        words = [*prefix, "/bin/bash", "--noprofile", "--norc", "--noediting", "-i"]
        self._shell = pexpect.spawn(
            words[0],
            words[1:],
            cwd=str(folder),
            env={
                **environ,
                "PS1": "",
                "PS2": "",
                "PROMPT_COMMAND": 'printf "\\036%s\\036" $?',
                "HISTFILE": "/dev/null",
                "TERM": "dumb",
            },
            echo=False,
            encoding="utf-8",
            codec_errors="replace",
            dimensions=(50, 200),
        )
        self._text = ""
        self._read: dict[str, int] = {}  # by writer: its expected lines are found up to here
        self._floor = 0  # up to here they are of earlier commands
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()
        self._typed = 0
        self._await_prompt(1)

    def _collect(self) -> None:
        while True:
            try:
                text = self._shell.read_nonblocking(65536, None)
            except (pexpect.EOF, OSError, ValueError):
                return
            with self._changed:
                self._text += text
                self._changed.notify_all()

    def shown(self) -> str:
        """Its text, without what moves the cursor or sets colors."""
        return CONTROL.sub("", PROMPT.sub("\n", self._text))

    def _codes(self) -> list[int]:
        return [int(code) for code in PROMPT.findall(self._text)]

    def _until(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, LIMIT), what()

    def _await_prompt(self, number: int) -> None:
        self._until(
            lambda: len(self._codes()) >= number,
            lambda: f"terminal {self.name}: a command did not end; shown:\n{self.shown()[-4000:]}",
        )

    def type(self, words: str) -> None:
        """Type a command, or press a key."""
        self._floor = max([self._floor, *self._read.values()])
        self._read.clear()
        if words == CTRL_C:
            self._shell.sendintr()
            return
        self._typed += 1
        self._shell.sendline(f"{{ {words}\n}}" if "\n" in words else words)

    def expect(self, lines: list[str]) -> None:
        """Wait until these lines have appeared, after those expected before. Several processes
        write here: only lines of the same one have an order."""
        for line in lines:
            pattern = pattern_of(line)
            named = WRITER.match(line)
            writer = named[0] if named else ""
            after = self._read.get(writer, self._floor)
            self._until(
                partial(self._has, pattern, after),
                lambda line=line, after=after: (  # type: ignore[misc]
                    f"terminal {self.name} has not shown: {line}\nit has shown:\n"
                    f"{self.shown()[after:][:3000]}\n[...]\n{self.shown()[after:][-3000:]}"
                ),
            )
            found = pattern.search(self.shown(), after)
            assert found is not None
            self._read[writer] = found.end()

    def _has(self, pattern: re.Pattern[str], after: int) -> bool:
        return pattern.search(self.shown(), after) is not None

    def finish(self, code: int) -> None:
        """Wait until the last command has ended, and check its exit code."""
        self._await_prompt(self._typed + 1)
        ended = self._codes()[self._typed]
        assert ended == code, f"exit code {ended}; shown:\n{self.shown()[-6000:]}"

    def typed_line(self, start: str) -> str:
        """The newest line that it has shown that begins so, after spaces."""
        return [line for line in self.shown().split("\n") if line.strip().startswith(start)][-1]

    def close(self) -> None:
        """Close the terminal, as a person closes its window."""
        end = time.monotonic() + LIMIT
        self._shell.close(force=True)
        self._reader.join(max(0.0, end - time.monotonic()))


def home(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a person whose commands are those of this Python."""
    path = os.path.dirname(sys.executable)
    return {
        **environ,
        "HOME": str(folder),
        "PATH": f"{path}:{environ.get('PATH', os.defpath)}",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
    }


JOIN = "elasticrun join "


def joined(words: str, first: Terminal) -> str:
    """With the line that the first terminal has printed, where the page has HOST:PORT CODE."""
    return first.typed_line(JOIN) if words == f"{JOIN}HOST:PORT CODE" else words


def follow(
    page: Path, folder: Path, environ: Mapping[str, str], prefix: Sequence[str] = ()
) -> None:
    """Write the files of the page into this folder, then do what it says, in its order."""
    terminals: dict[str, Terminal] = {}
    codes: dict[str, int] = {}
    blocks = blocks_of(page)
    for block in blocks:
        if block.path:
            (folder / block.path).write_text(block.text, encoding="utf-8")
    try:
        for block in blocks:
            if block.terminal not in terminals:
                terminals[block.terminal] = Terminal(block.terminal, folder, environ, prefix)
            terminal = terminals[block.terminal]
            for typed in block.commands:
                if typed.words:
                    if block.terminal in codes and typed.words != CTRL_C:
                        terminal.finish(codes[block.terminal])
                    terminal.type(joined(typed.words, terminals["1"]))
                codes[block.terminal] = block.code
                terminal.expect(typed.expected)
                if not typed.expected:
                    terminal.finish(block.code)
        for name, terminal in terminals.items():
            terminal.finish(codes[name])
    finally:
        for name, terminal in terminals.items():
            print(f"--- terminal {name}:\n{terminal.shown()[-4000:]}")  # for a failing test
            terminal.close()
