"""Command lines for modules of ours that run as processes of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

_ROOT: Final = str(Path(__file__).resolve().parent.parent.parent)

_START: Final = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def command(module: str, *words: object) -> list[str]:
    """Like `python -m module words...`, but found where this file was found, and never in the
    working folder, where a file named like one of our imports may lie."""
    return [sys.executable, "-P", "-u", "-c", _START, _ROOT, module, *map(str, words)]
