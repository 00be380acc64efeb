"""Prepares the server: imports torch and preloaded modules, and decides whether forks are safe.

A module of --preload is refused if it is not an installed package, or if its import reads the rank
from the environment, initializes a device, leaves a thread running or changes sys.path. An import
cannot be undone in this process, so a refusal after it raises `Poisoned`, and the server execs
itself again.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import site
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elasticrun.forkserver import trust
from elasticrun.forkserver.child import Inherited
from elasticrun.forkserver.lazy_imports import Baseline, HiddenModules, mtime
from elasticrun.forkserver.program import hides_frames
from elasticrun.forkserver.renew import Walked, environment_watch
from elasticrun.host.system import processes
from elasticrun.wire.env import PYTHON_EXEC, RANK_VARIABLES
from elasticrun.wire.spawning import Configure
from elasticrun.wire.types import EntryKind


class Poisoned(Exception):
    """The import of `module` did something forbidden; `reason` completes a sentence about it."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(reason)
        self.module = module
        self.reason = reason


def installed_folders() -> list[str]:
    """Folders of installed packages: site-packages, and the user's own if enabled."""
    # sysconfig would import its data module, which must stay unimported in ranks unless torch
    # imports it
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [os.path.realpath(folder) for folder in dict.fromkeys(folders) if folder in sys.path]


class Preloader:
    """Imports modules on purpose, and records what each import loads."""

    def __init__(self, hidden: HiddenModules) -> None:
        self._hidden = hidden
        self.folders = installed_folders()

    def import_torch(self) -> None:
        """Import numpy if it is installed, because torch would import it; then torch. Raises
        Poisoned, and whatever the imports raise."""
        hooks = _hooks()
        try:
            self._import("numpy")
        except ModuleNotFoundError as error:
            if error.name != "numpy":
                raise
        self._import("torch")
        if changed := [name for name, hook in _hooks().items() if hook is not hooks[name]]:
            raise Poisoned("torch", f"its import sets {changed[0]}")
        if readers := self._rank_readers(set()):
            raise Poisoned("torch", readers)
        # One file for each package that torch imports; every upgrade rewrites it.
        brought = [name for root in self._hidden.roots for name in root.modules]
        tops = {name for name in brought if "." not in name}
        self._note_files(tops - sys.stdlib_module_names)
        self._note_files({"torch.version"} & sys.modules.keys())

    def import_modules(self, names: Iterable[str], refused: Sequence[str]) -> list[str]:
        """Import each module; return a sentence for each one left out. Raises Poisoned at the first
        one that cannot be undone. Modules in `refused`, and modules below them, are not tried
        again."""
        remarks = []
        for name in names:
            if name in sys.modules or any((name + ".").startswith(r + ".") for r in refused):
                continue
            if remark := self._not_installed(name) or self._try(name):
                remarks.append(f"{name} is not preloaded: {remark}")
        return remarks

    # ------------------------------------------------------------

    def _try(self, name: str) -> str:
        reads = set(self._hidden.environment.reads)
        hooks = _hooks()
        path = list(sys.path)
        before = set(sys.modules)
        try:
            self._import(name)
        except (Exception, SystemExit) as error:
            return f"its import failed ({type(error).__name__}: {error})"[:300]
        reason = self._rank_readers(reads)
        if not reason and sys.path != path:
            reason = "its import changed sys.path"
        if not reason and _hooks() != hooks:
            reason = "its import sets a hook of the interpreter"
        if not reason:
            reason = trust.trial()
        if reason:
            top = name.partition(".")[0]
            raise Poisoned(name if top in before else top, reason)
        self._note_files(set(sys.modules) - before)
        return ""

    def _import(self, name: str) -> None:
        try:
            with self._hidden.importing(name), environment_watch() as reads:
                importlib.import_module(name)
        except Walked as walked:
            raise Poisoned(name, str(walked)) from None
        known = self._hidden.environment.reads
        known |= {variable: file for variable, file in reads.items() if variable not in known}

    def _rank_readers(self, known: set[str]) -> str:
        reads = self._hidden.environment.reads
        found = sorted((reads.keys() - known) & RANK_VARIABLES)
        if not found:
            return ""
        return f"{reads[found[0]]} reads {found[0]} while it is imported"

    def _not_installed(self, name: str) -> str:
        top = name.partition(".")[0]
        try:
            spec = importlib.machinery.PathFinder.find_spec(top)
        except (ImportError, ValueError):
            spec = None
        if top in sys.builtin_module_names or top in sys.stdlib_module_names:
            return ""
        if spec is None or spec.origin is None:
            return "no installed package has this module" if spec is None else "it has no file"
        origin = os.path.realpath(spec.origin)
        if not any(origin.startswith(folder + os.sep) for folder in self.folders):
            return f"{origin} is not an installed package"
        return ""

    def _note_files(self, names: Iterable[str]) -> None:
        for name in names:
            path = getattr(sys.modules.get(name), "__file__", None)
            if isinstance(path, str) and (now := mtime(path)) >= 0:
                self._hidden.files.setdefault(path, now)


def _hooks() -> dict[str, object]:
    """The interpreter's hooks that scripts may set, by name."""
    names = ("excepthook", "displayhook", "unraisablehook", "breakpointhook")
    return {f"sys.{name}": getattr(sys, name) for name in names} | {
        "threading.excepthook": threading.excepthook
    }


@dataclass
class Prepared:
    """The result of the preparation. `mode` is fork or exec; `reason` says why it is exec although
    fork was requested."""

    inherited: Inherited
    hidden: HiddenModules
    preloader: Preloader
    python: str
    mode: str = "exec"
    reason: str = ""
    torch: str = ""
    import_seconds: float = 0.0
    can_fork_stores: bool = False
    remarks: list[str] = field(default_factory=list)


def prepare(
    configure: Configure, inherited: Inherited, refused: list[str], stock: Stock | None = None
) -> Prepared:
    """Import what ranks will share and check the result. Raises Poisoned if a preloaded module has
    spoiled this process; then exec again with that module in `refused`. `stock`: what a warm
    process has imported, if this process is a fork of one."""
    hidden = HiddenModules(inherited.baseline) if stock is None else stock.hidden
    preloader = Preloader(hidden) if stock is None else stock.preloader
    prepared = Prepared(
        inherited=inherited,
        hidden=hidden,
        preloader=preloader,
        python=os.environ.get(PYTHON_EXEC, ""),
    )
    if configure.launch == "exec":
        return prepared
    started = time.monotonic()
    prepared.reason = _get_ready(prepared, configure, refused)
    prepared.import_seconds = time.monotonic() - started
    if configure.entry.kind is EntryKind.COMMAND:
        prepared.reason = ""  # a command is never forked
    elif not prepared.reason:
        prepared.mode = "fork"
    return prepared


def _get_ready(prepared: Prepared, configure: Configure, refused: list[str]) -> str:
    """Import and check everything; return the reason for exec, or an empty string."""
    reason = trust.before_import(configure.entry, configure.numa, os.environ)
    if processes.thread_names():
        return reason or "a .pth file or sitecustomize has started a thread"
    backend = trust.untested_backend(os.environ)
    if backend:
        os.environ[trust.AUTOLOAD] = "0"
    alone = bool(reason or backend)
    failure = _imports(prepared, configure, refused, alone=alone)
    verdict = failure or trust.build_reason() or _about_torch(trust.trial())
    prepared.can_fork_stores = not verdict
    reason = reason or backend or verdict
    if not reason:
        prepared.hidden.seal()
        reason = trust.shadowed(configure.entry, prepared.hidden.top_names(), os.environ)
        reads = prepared.hidden.environment.reads
        reason = reason or trust.sets_too_late(configure.entry, reads.__contains__, os.environ)
    if not reason and not hides_frames():
        prepared.remarks.append("this interpreter shows a frame of ours below the script's")
    return reason


def _about_torch(verdict: str) -> str:
    return f"torch cannot be shared: {verdict}" if verdict else ""


def _imports(prepared: Prepared, configure: Configure, refused: list[str], *, alone: bool) -> str:
    """Import torch and, unless ranks will be exec'd (`alone`), the modules of --preload. Returns
    why torch cannot be shared, or an empty string. Raises Poisoned."""
    try:
        if not prepared.hidden.roots:  # else a warm process has imported it
            prepared.preloader.import_torch()
    except Poisoned as poison:
        return _about_torch(poison.reason)
    except (Exception, SystemExit) as error:
        return f"torch cannot be imported here ({type(error).__name__}: {error})"[:300]
    prepared.torch = str(getattr(sys.modules["torch"], "__version__", "unknown"))
    if not alone:
        prepared.remarks += prepared.preloader.import_modules(configure.preload, refused)
    return ""


@dataclass
class Stock:
    """What a warm process has imported, for its fork servers."""

    baseline: Baseline
    hidden: HiddenModules
    preloader: Preloader
    torch: str


def options(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each `--NAME=VALUE` in a command line written by `wire.spawning`."""
    given: dict[str, list[str]] = {}
    for word in words:
        name, _, value = word.strip().removeprefix("--").partition("=")
        given.setdefault(name, []).append(value)
    return given
