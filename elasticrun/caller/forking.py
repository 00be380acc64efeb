"""Forks of the caller, and what must not be destroyed in them.

The caller is a program of the user's, with objects of any kind. The end of some waits for a thread
of the caller (a gloo process group's does), and in a fork that thread is not there: the fork hangs,
or crashes. Two things end objects in a fork: the garbage collector, and Python's own fork, which
drops what other threads keep for themselves (DTensor keeps a cache in each thread that holds device
meshes, and they their process groups).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MODULE = "torch.distributed"
"""Objects of its types are not destroyed in a fork that a thread among several makes."""


class Sparing:
    """Around a fork: the collector rests from before it until `in_fork`, in the child, and what is
    not to be destroyed has a holder: here for as long as the fork takes, in the child to its end,
    since that never leaves the block."""

    def __init__(self) -> None:
        self._collects = True
        self._spared: list[object] = []

    @contextmanager
    def forking(self) -> Iterator[None]:
        """The caller forks in this block."""
        self._collects = gc.isenabled()
        gc.disable()
        try:
            if MODULE in sys.modules and len(sys._current_frames()) > 1:
                self._spared = _objects()
            yield
        finally:
            self._spared = []
            if self._collects:
                gc.enable()

    def in_fork(self) -> None:
        """In the child: collect again, but never what the caller has made."""
        gc.freeze()
        if self._collects:
            gc.enable()


def _objects() -> list[object]:
    """Looks at every object that the collector knows: some 20 ms where torch is imported."""
    known: dict[type, bool] = {}
    found = []
    for one in gc.get_objects():
        kind = type(one)
        ours = known.get(kind)
        if ours is None:
            ours = known[kind] = str(kind.__module__).startswith(MODULE)
        if ours:
            found.append(one)
    return found
