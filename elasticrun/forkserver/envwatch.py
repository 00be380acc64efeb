"""Which environment variables Python code reads while the fork server imports.

A rank that is forked afterwards has those values for good, so they are compared where its script
imports the module for the first time, and a module that asks which rank it is may not be preloaded.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

_LOOKUP_FILES = ("os.py", "_collections_abc.py")


class EnvironmentWatch:
    """Records reads of os.environ between `__enter__` and `__exit__`: name -> file that read it.

    A walk over the whole environment (tqdm looks for names that begin with TQDM_) is no interest
    in every name and is not recorded.
    """

    def __init__(self) -> None:
        self.reads: dict[str, str] = {}
        self._original: Any = None

    def __enter__(self) -> EnvironmentWatch:
        cls: Any = type(os.environ)
        self._original = original = cls.__getitem__
        reads = self.reads

        def watched(environ: Any, name: Any) -> Any:
            if isinstance(name, str) and name not in reads:
                reader = _reader(sys._getframe(1))
                if reader is not None:
                    reads[name] = reader
            return original(environ, name)

        cls.__getitem__ = watched
        return self

    def __exit__(self, *_: object) -> None:
        cls: Any = type(os.environ)
        cls.__getitem__ = self._original


def _reader(frame: FrameType | None) -> str | None:
    """The file that wanted to know, or None where a view of the whole environment asked."""
    while frame is not None:
        code = frame.f_code
        plain = code.co_filename.removesuffix(">").removeprefix("<frozen ")
        name = os.path.basename(plain)
        if name not in _LOOKUP_FILES and plain not in ("os", "_collections_abc"):
            return code.co_filename
        if code.co_name in ("__iter__", "copy"):
            return None
        frame = frame.f_back
    return None
