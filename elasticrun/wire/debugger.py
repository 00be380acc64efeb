"""A debugger in this process that follows into the processes it starts: pydevd, which debugpy, VS
Code and PyCharm use. It patches how processes are started, so that each Python among them attaches
itself to the debugger before it runs. Ranks are to do so. Our helpers are not: they would wait for
a client that knows nothing of them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any


def follows() -> bool:
    """Whether a debugger attaches to the Python processes that this one starts."""
    patched: Any = getattr(subprocess, "_fork_exec", None)
    return getattr(patched, "__module__", "") == "_pydev_bundle.pydev_monkey"


def escaped() -> AbstractContextManager[None]:
    """Within it, what this thread starts is not debugged."""
    skip: Any = getattr(_monkey(), "skip_subprocess_arg_patch", None)
    return skip() if skip is not None else contextlib.nullcontext()


def debugged(command: Sequence[str]) -> list[str]:
    """The command line by which a program is debugged that a process of ours starts for us, not we
    ourselves. Other programs than Python, and all where no debugger follows, stay as they are."""
    patch: Any = getattr(_monkey(), "patch_args", None)
    if patch is None or not follows():
        return list(command)
    return [str(word) for word in patch(list(command))]


def _monkey() -> Any:
    return sys.modules.get("_pydev_bundle.pydev_monkey")
