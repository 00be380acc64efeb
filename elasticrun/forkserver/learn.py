"""Which modules a rank asks for, told to the server while it runs."""

from __future__ import annotations

import importlib.machinery
import sys
import time
from collections.abc import Iterable, Sequence

from elasticrun.forkserver.page import IMPORTING, MODULE, Page

POKE_INTERVAL = 1.0
"""Seconds between two pokes for module names; a burst of imports is one piece of news."""

MAX_LEARNED = 3000
"""Most modules told; a frame holds more, but no script has been seen to need half of them."""


class Watcher:
    """In a rank: notes every module that it looks for (`lazy_imports.Stash.watch`)."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._seen: set[str] = set()
        self._looked_for: list[str] = []
        self._poked = 0.0

    def __call__(self, name: str) -> None:
        """`name` is looked for."""
        if name not in self._seen and len(self._seen) < MAX_LEARNED:
            self._seen.add(name)
            self._tell_found()
            self._looked_for.append(name)

    def _tell_found(self) -> None:
        """Tell the names that have become modules since; optional ones that are not installed
        never do. The very last import of a script is not told: nothing is looked for after it."""
        for found in [name for name in self._looked_for if name in sys.modules]:
            self._page.write(MODULE, found, poke=False)
        self._looked_for.clear()
        now = time.monotonic()
        if now - self._poked >= POKE_INTERVAL:
            self._poked = now
            self._page.write(IMPORTING, "")


class Lessons:
    """In the server: the names that ranks asked for, and which of them may be preloaded."""

    def __init__(self, known: Iterable[str], allowed_folders: Sequence[str]) -> None:
        """`known`: modules the server has already; `allowed_folders`: of installed packages."""
        self._known = set(known)
        self._folders = tuple(allowed_folders)
        self._names: dict[str, None] = {}
        self._told = 0

    def add(self, name: str) -> bool:
        """Whether that was news."""
        if name in self._known or name in self._names or len(self._names) >= MAX_LEARNED:
            return False
        self._names[name] = None
        return True

    def told(self) -> tuple[str, ...]:
        """The modules of installed packages among the names, in the order of their imports; empty
        if there are no new ones since the last time."""
        tops = {name.partition(".")[0] for name in self._names}
        installed = {top for top in tops if self._is_installed(top)}
        names = tuple(n for n in self._names if n.partition(".")[0] in installed)
        if len(names) <= self._told:
            return ()
        self._told = len(names)
        return names

    def _is_installed(self, top: str) -> bool:
        if top in sys.stdlib_module_names:
            return False
        spec = importlib.machinery.PathFinder.find_spec(top, list(self._folders))
        return spec is not None and spec.origin is not None
