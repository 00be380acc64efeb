"""Handles debuggers that follow child processes: pydevd, used by debugpy, VS Code and PyCharm.

pydevd patches the starting of processes, so that each Python child attaches to the debugger before
it runs. That is wanted for ranks. It is not wanted for our helpers, which would wait for a client
that does not know them.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any


def follows() -> bool:
    """Whether a debugger attaches to Python processes started by this one."""
    patched: Any = getattr(subprocess, "_fork_exec", None)
    return getattr(patched, "__module__", "") == "_pydev_bundle.pydev_monkey"


def escaped() -> AbstractContextManager[None]:
    """A block in which processes started by this thread are not debugged."""
    skip: Any = getattr(_monkey(), "skip_subprocess_arg_patch", None)
    return skip() if skip is not None else contextlib.nullcontext()


def debugged(command: Sequence[str]) -> list[str]:
    """The command line that debugs a program which another process of ours starts for us. Programs
    other than Python, and all programs without a following debugger, are unchanged."""
    patch: Any = getattr(_monkey(), "patch_args", None)
    if patch is None or not follows():
        return list(command)
    return [str(word) for word in patch(list(command))]


def _monkey() -> Any:
    return sys.modules.get("_pydev_bundle.pydev_monkey")
