"""How the server gets ready: what it imports, and whether its forks can be trusted.

A module of --preload is refused when its import reads which rank it is, initialises a device,
leaves a thread or changes the import path; and when it is not an installed package. A refusal after
the import cannot be undone in this process: `Poisoned` says so, and the server begins anew.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Final

from elasticrun.forkserver import trust
from elasticrun.forkserver.child import MAX_LEARNED, Birth
from elasticrun.forkserver.lazy_imports import Stash, is_ours
from elasticrun.forkserver.program import hides_frames
from elasticrun.forkserver.renew import add_reads, environment_watch
from elasticrun.system import processes
from elasticrun.wire.env import PYTHON_EXEC, RANK_VARIABLES
from elasticrun.wire.spawning import Configure
from elasticrun.wire.types import EntryKind

if TYPE_CHECKING:
    from elasticrun.forkserver.warm.keeper import Stock


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


def _mtime(path: str) -> int:
    """When a file was written, in ns; -1: there is none."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return -1


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
        if readers := self._rank_readers(set()):
            raise Poisoned("torch", readers)
        # Of torch and what it brings: one file a package, which every upgrade writes anew.
        tops = {name for name in self._stash.roots[0].modules if "." not in name}
        self._note_files(tops - sys.stdlib_module_names)
        self._note_files({"torch.version"} & sys.modules.keys())

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
        return next((path for path, then in self.files.items() if _mtime(path) != then), "")

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
        with environment_watch() as reads:
            importlib.import_module(name)
        add_reads(self._stash.reads, reads)
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

    def _note_files(self, names: Iterable[str]) -> None:
        for name in names:
            path = getattr(sys.modules.get(name), "__file__", None)
            if isinstance(path, str) and (now := _mtime(path)) >= 0:
                self.files.setdefault(path, now)


class Lessons:
    """In the server: the names that ranks asked for, and which of them may be preloaded."""

    def __init__(self, known: Iterable[str], allowed_folders: Sequence[str]) -> None:
        """`known`: modules the server has already; `allowed_folders`: of installed packages."""
        self._known = set(known)
        self._folders = allowed_folders
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
        find = importlib.machinery.PathFinder.find_spec
        tops = {name.partition(".")[0] for name in self._names} - sys.stdlib_module_names
        specs = {top: find(top, self._folders) for top in tops}
        installed = {top for top, spec in specs.items() if spec is not None and spec.origin}
        names = tuple(n for n in self._names if n.partition(".")[0] in installed)
        if len(names) <= self._told:
            return ()
        self._told = len(names)
        return names


FOR_SNAPSHOTS = ("torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo")
"""What a Checkpointer imports of torch, and torch's optimizers when they are made: more than a
second of one core; every life of every rank of a script that names one would pay it."""

CHECKPOINTER = "elasticrun.checkpointing.checkpointer"
"""Some 50 ms more. Not all of TRAINING, whose import looks at the rank's environment."""

TRAINING = "elasticrun.training"
"""By this name `--preload` asks for it where the script's own text names no Checkpointer."""


@dataclass
class Prepared:
    """What came of it; `mode` is fork or exec, `reason` why it is exec where a fork was wanted."""

    birth: Birth
    stash: Stash
    preloader: Preloader
    lessons: Lessons
    learn: bool
    python: str
    mode: str = "exec"
    reason: str = ""
    torch: str = ""
    import_seconds: float = 0.0
    can_fork_stores: bool = False
    remarks: list[str] = field(default_factory=list)


def prepare(
    configure: Configure, birth: Birth, refused: list[str], stock: Stock | None = None
) -> Prepared:
    """Import what is to be shared and look at the result. Raises Poisoned where a preloaded
    module has spoiled this process; then it must be begun anew with that module in `refused`.
    `stock`: what a warm process has imported, of which this one is a fork."""
    stash = Stash(birth.baseline) if stock is None else stock.stash
    preloader = Preloader(stash, configure.learn) if stock is None else stock.preloader
    prepared = Prepared(
        birth=birth,
        stash=stash,
        preloader=preloader,
        lessons=Lessons(configure.preload, installed_folders()),
        learn=configure.learn,
        python=os.environ.get(PYTHON_EXEC, ""),
    )
    if configure.launch == "exec":
        return prepared
    started = time.monotonic()
    prepared.reason = _get_ready(prepared, configure, refused)
    prepared.import_seconds = time.monotonic() - started
    if configure.entry.kind is EntryKind.COMMAND:
        prepared.reason = ""  # nobody expected a command to be forked
    elif not prepared.reason:
        prepared.mode = "fork"
        prepared.lessons = Lessons({*configure.preload, *sys.modules}, installed_folders())
    return prepared


def _get_ready(prepared: Prepared, configure: Configure, refused: list[str]) -> str:
    """The reason for exec, or empty."""
    reason = trust.before_import(configure.entry, configure.numa, os.environ)
    if processes.thread_names():
        return reason or "a .pth file or sitecustomize has started a thread"
    backend = trust.untested_backend(os.environ)
    if backend:
        os.environ[trust.AUTOLOAD] = "0"
    alone = bool(reason or backend)
    run = aside if configure.aside and ONE_BY_ONE not in refused else lambda work: work()
    failure = run(lambda: _imports(prepared, configure, refused, alone=alone))
    prepared.preloader.look_at_all()
    verdict = failure or trust.build_reason() or _about_torch(trust.trial())
    prepared.can_fork_stores = not verdict
    reason = reason or backend or verdict
    if not reason:
        prepared.stash.seal()
        reason = trust.shadowed(configure.entry, prepared.stash.top_names(), os.environ)
    if not reason and not hides_frames():
        prepared.remarks.append("this interpreter shows a frame of ours below the script's")
    return reason


def aside(work: Callable[[], str]) -> str:
    """Import with cores that nobody else wants, in a thread that the kernel runs only then (what a
    whole process has given away it may not take back, and forks would inherit), at ImportPace."""
    found: list[str | BaseException] = []
    pace = ImportPace()

    def run() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: this thread
            sys.meta_path.insert(0, pace)
            found.append(work())
        except BaseException as error:
            found.append(error)
        finally:
            sys.meta_path.remove(pace)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    while processes.has_thread(thread.native_id or 0):  # its end is told before it is one
        os.sched_yield()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


class ImportPace(importlib.abc.MetaPathFinder):
    """Rests between imports where our cores have not one to spare.

    The kernel gives SCHED_IDLE nothing but gaps, and yet each gap that is used costs training: a
    step waits for its slowest rank. Two ranks on two cores were 7 % slower for the half minute of
    such imports (benchmarks/aside.py); with REST these take minutes, and no cost is seen."""

    SLICE: Final = 0.02
    """Seconds of CPU between two looks: some ten modules."""

    REST: Final = 60.0
    """Seconds of rest for each second of CPU."""

    SPARE: Final = 0.9
    """Cores that were idle, or ours, since the last look: one, less what every host does beside."""

    LONGEST: Final = 30.0
    """Seconds of the longest rest: after a library whose loading takes half a second."""

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0)
        self._look()

    def _look(self) -> None:
        self._at, self._used = time.monotonic(), time.process_time()
        self._idle = processes.idle_seconds(self._cores)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Finds nothing; a good moment to rest."""
        used = time.process_time() - self._used
        if used < self.SLICE:
            return
        idle = processes.idle_seconds(self._cores) - self._idle
        is_spare = idle + used >= self.SPARE * (time.monotonic() - self._at)
        self._look()
        if not is_spare:
            time.sleep(min(self.REST * used, self.LONGEST))


def _about_torch(verdict: str) -> str:
    return f"torch cannot be shared: {verdict}" if verdict else ""


def _imports(prepared: Prepared, configure: Configure, refused: list[str], *, alone: bool) -> str:
    """Import torch, and unless ranks will be exec'd, what --preload names."""
    try:
        if not prepared.stash.roots:  # else it was imported in a warm process
            prepared.preloader.import_torch()
    except Poisoned as poison:
        return _about_torch(poison.reason)
    except (Exception, SystemExit) as error:
        return f"torch cannot be imported here ({type(error).__name__}: {error})"[:300]
    prepared.torch = str(getattr(sys.modules["torch"], "__version__", "unknown"))
    if not alone:
        modules = dict.fromkeys(configure.preload)
        snapshots = TRAINING in modules or trust.takes_snapshots(configure.entry)
        if snapshots:
            modules = dict.fromkeys([*modules, *FOR_SNAPSHOTS])
            modules.pop(TRAINING, None)
        prepared.remarks += prepared.preloader.import_modules(modules, refused)
        if snapshots:
            prepared.preloader.import_own(CHECKPOINTER)
    return ""
