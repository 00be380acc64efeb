"""What docs/slurm.md tells people to type: tests run it as it stands there, but for the words that
a small machine has to have otherwise."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "slurm.md"
BLOCKS = re.findall(r"^```\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def script(begins: str, instead: dict[str, str]) -> str:
    """The block of the page that begins so."""
    (block,) = (block for block in BLOCKS if block.startswith(begins))
    return _with(block, instead)


def command(begins: str, instead: dict[str, str]) -> list[str]:
    """The words of the line that begins so."""
    lines = [line for block in BLOCKS for line in block.splitlines()]
    (line,) = (line for line in lines if line.startswith(begins))
    return shlex.split(_with(line, instead), comments=True)


def _with(text: str, instead: dict[str, str]) -> str:
    for word, other in instead.items():
        assert word in text, f"docs/slurm.md has no {word} there any more"
        text = text.replace(word, other)
    return text
