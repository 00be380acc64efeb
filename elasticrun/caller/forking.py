"""Forks of the caller, and its garbage.

The caller is a program of the user's, with objects of any kind. One that has become garbage, and
whose end waits for a thread (a gloo process group's does), is collected in the caller without harm;
in a fork of it that thread is not there, and the collector would wait for ever.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class Collecting:
    """The collector around a fork: it rests from before it until `in_fork`, in the child."""

    def __init__(self) -> None:
        self._was_on = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Collect nothing in this block, in which the caller forks; nor does the child, until
        `in_fork`."""
        self._was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if self._was_on:
                gc.enable()

    def in_fork(self) -> None:
        """Collect again, in the child, but never what the caller has made."""
        gc.freeze()
        if self._was_on:
            gc.enable()
