"""Imports torch and what --preload names, and refuses what must not be shared by ranks.

A module is refused when its import reads which rank it is, initialises a device, leaves a thread
or changes the import path; and when it is not an installed package. A refusal after the import
cannot be undone in this process: `Poisoned` says so, and the server begins anew without it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from typing import Final

from elasticrun.forkserver import trust
from elasticrun.forkserver.envwatch import EnvironmentWatch
from elasticrun.forkserver.lazy import Stash, is_ours
from elasticrun.wire.env import RANK_VARIABLES

ONE_BY_ONE: Final = "*"
"""In the place of a module that is refused: nobody knows which one it is."""


class Poisoned(Exception):
    """The import of `module` did what it must not; `reason` completes a sentence about it."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(reason)
        self.module = module
        self.reason = reason


def installed_folders() -> list[str]:
    """Where packages are installed: site-packages, and the user's own if it is in use."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    folders += site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [os.path.realpath(folder) for folder in dict.fromkeys(folders) if folder in sys.path]


class Preloader:
    """Imports on purpose; what came with each import is noted in the stash."""

    def __init__(self, stash: Stash, learned: bool) -> None:
        """`learned`: names come from what a rank looked for, not from a user alone."""
        self._learned = learned
        self._stash = stash
        self._folders = installed_folders()
        self.files: dict[str, int] = {}
        """mtime in ns of every file that a change of makes this process stale."""
        self.tried = True
        """Whether a trial fork has been made since the last import."""

    def import_torch(self) -> None:
        """Raises whatever the import raises."""
        self._import("torch")
        readers = self._rank_readers(set())
        if readers:
            raise Poisoned("torch", readers)
        self._note_packages()

    def import_modules(self, names: Iterable[str], refused: Sequence[str]) -> list[str]:
        """Import each; the sentences about those left out. Raises Poisoned at the first that
        cannot be taken back. `refused` ones, and modules below them, are not tried again.

        What a module does to the whole process (threads, devices) is looked at once, in the end;
        one by one where ONE_BY_ONE is among the refused, since something did that."""
        remarks = []
        before = len(sys.modules)
        one_by_one = ONE_BY_ONE in refused
        for name in names:
            if name in sys.modules or any((name + ".").startswith(r + ".") for r in refused):
                continue
            remark = self._not_installed(name) or self._try(name, trial=one_by_one)
            if remark:
                remarks.append(f"{name} is not preloaded: {remark}")
        if len(sys.modules) > before and not one_by_one:  # `look_at_all` is to come
            self.tried = False
        return remarks

    def look_at_all(self) -> None:
        """Raise Poisoned if what was imported since the last trial has spoiled this process."""
        if not self.tried:
            self.tried = True
            if verdict := trust.trial():
                raise Poisoned(ONE_BY_ONE, verdict)

    def import_own(self, name: str) -> None:
        """A module of our own package, anew with all that it brings of it. Where that fails, ranks
        import it themselves."""
        kept = {each: sys.modules.pop(each) for each in [*sys.modules] if is_ours(each)}
        try:
            self._import(name)
            self._stash.own = {each: sys.modules[each] for each in sys.modules if is_ours(each)}
        except Exception:  # the rank's own import says it where it is seen
            self._stash.own = {}
        finally:
            for each in [each for each in sys.modules if is_ours(each)]:
                del sys.modules[each]
            sys.modules.update(kept)

    def stale(self) -> str:
        """The first file that has changed since it was imported, or empty."""
        for path, before in self.files.items():
            try:
                now = os.stat(path).st_mtime_ns
            except OSError:
                now = -1
            if now != before:
                return path
        return ""

    # ------------------------------------------------------------

    def _try(self, name: str, *, trial: bool) -> str:
        reads = set(self._stash.reads)
        path = list(sys.path)
        before = set(sys.modules)
        try:
            self._import(name)
        except (Exception, SystemExit) as error:
            if isinstance(error, ImportError) and self._learned:
                return ""  # an optional module that was not found by the rank either
            return f"its import failed ({type(error).__name__}: {error})"[:300]
        reason = self._rank_readers(reads)
        if not reason and sys.path != path:
            reason = "its import changed sys.path"
        if not reason and trial and len(sys.modules) > len(before):
            reason = trust.trial()
        if reason:
            top = name.partition(".")[0]
            raise Poisoned(name if top in before else top, reason)
        self._note_files(set(sys.modules) - before)
        return ""

    def _import(self, name: str) -> None:
        before = set(sys.modules)
        with EnvironmentWatch() as watch:
            importlib.import_module(name)
        for variable, file in watch.reads.items():
            self._stash.reads.setdefault(variable, file)
        self._stash.add_root(name, before)

    def _rank_readers(self, known: set[str]) -> str:
        found = sorted((self._stash.reads.keys() - known) & RANK_VARIABLES)
        if not found:
            return ""
        return f"{self._stash.reads[found[0]]} reads {found[0]} while it is imported"

    def _not_installed(self, name: str) -> str:
        top = name.partition(".")[0]
        try:
            spec = importlib.machinery.PathFinder.find_spec(top)
        except (ImportError, ValueError):
            spec = None
        if top in sys.builtin_module_names or top in sys.stdlib_module_names:
            return ""
        if spec is None or spec.origin is None:
            return "there is no such module" if spec is None else "it has no file"
        origin = os.path.realpath(spec.origin)
        if not any(origin.startswith(folder + os.sep) for folder in self._folders):
            return f"{origin} is not an installed package"
        return ""

    def _note_packages(self) -> None:
        """Of torch and what it brings: one file a package, which every upgrade writes anew."""
        tops = {name for name in self._stash.roots[0].modules if "." not in name}
        self._note_files(tops - sys.stdlib_module_names)
        self._note_files({"torch.version"} & sys.modules.keys())

    def _note_files(self, names: Iterable[str]) -> None:
        for name in names:
            path = getattr(sys.modules.get(name), "__file__", None)
            if isinstance(path, str) and path not in self.files:
                try:
                    self.files[path] = os.stat(path).st_mtime_ns
                except OSError:
                    continue
