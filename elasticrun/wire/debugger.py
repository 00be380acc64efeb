"""Handles debuggers that follow child processes: pydevd, used by debugpy, VS Code and PyCharm.

pydevd patches process creation, so that each Python child attaches to the debugger before it runs.
That is wanted for ranks. It is not wanted for our helpers, which would wait for a client that does
not know them.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any


def is_following() -> bool:
    """Whether a debugger attaches to the Python processes that this process starts."""
    patched: Any = getattr(subprocess, "_fork_exec", None)
    return getattr(patched, "__module__", "") == "_pydev_bundle.pydev_monkey"


def without_debugger() -> AbstractContextManager[None]:
    """A context in which processes that this thread starts are not debugged."""
    skip: Any = getattr(_monkey(), "skip_subprocess_arg_patch", None)
    return skip() if skip is not None else contextlib.nullcontext()


def with_debugger(command: Sequence[str]) -> list[str]:
    """The command line with which another process of ours must start this program so that it is
    debugged. Without a debugger, and for programs other than Python, it is unchanged."""
    patch: Any = getattr(_monkey(), "patch_args", None)
    if patch is None or not is_following():
        return list(command)
    return [str(word) for word in patch(list(command))]


def _monkey() -> Any:
    return sys.modules.get("_pydev_bundle.pydev_monkey")
