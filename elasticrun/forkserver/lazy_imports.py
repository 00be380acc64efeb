"""Hides modules that the server has imported until the script imports them itself.

`os.environ["OMP_PROC_BIND"] = "true"` above `import torch` is the most common first line of
training scripts, so a forked rank must also have a moment at which the script first imports torch.
In the child, sys.modules contains only the modules of a plain interpreter. A finder at the front of
sys.meta_path restores the rest on import: one module of the standard library with its dependencies;
numpy with everything that its import loads; torch with everything that is left. Other side effects
of an import (`Effects`) are restored with it, and none later.

A module is restored only if the script's own import system would find the same file. If the import
of numpy or torch would now differ from the server's, `HiddenModules.why_differs` gives the reason
and the rank execs itself (`child.py`).
"""

from __future__ import annotations

import _thread
import atexit
import builtins
import codecs
import contextlib
import ctypes
import encodings
import importlib.abc
import importlib.machinery
import opcode
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

from elasticrun.forkserver.renew import Environment, prepare_end

OURS = __name__.partition(".")[0]
"""Our own package. Ranks get none of the server's modules from it."""

GUARDED: Final = ("numpy", "torch")
"""Packages that cannot be imported twice in one process."""

_IMPORT, _LOAD_CONST = opcode.opmap["IMPORT_NAME"], opcode.opmap["LOAD_CONST"]
_EXTENDED, _SMALL_INT = opcode.opmap["EXTENDED_ARG"], opcode.opmap.get("LOAD_SMALL_INT", -1)

_OPTIMIZED: Final = 1
"""Flag of the code objects of functions; class and module bodies do not have it."""

_MAIN_ALIAS: Final = "__mp_main__"
"""Another name of the main module. The import of multiprocessing adds it, and so does that of
multiprocess, its copy that Hugging Face's datasets use."""

STAYS = ("threading", "_weakrefset")
"""Modules that stay in sys.modules: the interpreter looks up there which threads it must wait
for."""

_OWN_CALLS: Final = ("showwarning", "formatwarning", "excepthook", "_logRecordFactory")
"""Functions that scripts may replace: they are looked up at each call."""


class Exits:
    """Holds back functions that imports register with atexit until a rank makes that import. The
    interpreter calls them in reverse order of registration."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, Any, Any, Any]] = []
        self.register = atexit.register

    def keep_back(self) -> None:
        """Hold back registrations in this process from now on."""
        atexit.register = self._keep

    def release(self) -> None:
        """In a rank: let atexit register as usual."""
        atexit.register = self.register

    def register_held(self, names: Iterable[str]) -> None:
        """Register what these modules had registered, in the same order."""
        known = set(names)
        for name, function, words, more in self._kept:
            if name in known and not _mark_registered(function):
                self.register(function, *words, **more)

    def _keep(self, function: Any, /, *words: Any, **more: Any) -> Any:
        if atexit.register != self._keep:  # the caller holds a reference to this function
            return self.register(function, *words, **more)
        frame = sys._getframe(1)
        while frame.f_code.co_name != "<module>" and frame.f_back is not None:
            frame = frame.f_back
        name = str(frame.f_globals.get("__name__", ""))
        self._kept.append((name, function, words, more))
        return function


class Baseline:
    """The state of a plain interpreter when a script starts; `modules` are the names in sys.modules
    at the server's first instruction."""

    def __init__(self, modules: Iterable[str]) -> None:
        self.modules = frozenset(modules)
        self.path = list(sys.path)
        self.meta_path = list(sys.meta_path)
        self.path_hooks = list(sys.path_hooks)
        self.environ = dict(os.environb)
        self.filters = list(warnings.filters)
        self.affinity = os.sched_getaffinity(0)
        self.excepthook = sys.excepthook
        self.finalizes = bool(getattr(_finalize(), "_registered_with_atexit", False))
        self.exits = Exits()


def is_ours(name: str) -> bool:
    """Whether a module belongs to our own package."""
    return name.partition(".")[0] == OURS


def _unit(name: str) -> str:
    """The unit that is restored together: a package with all its submodules, but a single module of
    the standard library, because nobody imports all of `importlib` to get a part of it."""
    top = name.partition(".")[0]
    return name if top in sys.stdlib_module_names or top == OURS else top


def _is_blank(module: Any) -> bool:
    """Whether a module has no file and no content, like `cython_runtime`, which every Cython
    extension creates unless another one has."""
    return getattr(module, "__spec__", None) is None and all(n[:2] == "__" for n in vars(module))


def _is_c(value: Any) -> bool:
    """Whether a class or function belongs to a C module underlying a module of the standard
    library."""
    return str(value.__module__).startswith("_")


def _loggers() -> dict[str, Any]:
    logging: Any = sys.modules.get("logging")
    return {} if logging is None else logging.root.manager.loggerDict


def _finalize() -> Any:
    """The class `weakref.finalize`, which has its own registry and registers one function with
    atexit; None if weakref is not imported."""
    return getattr(sys.modules.get("weakref"), "finalize", None)


def _mark_registered(function: Any) -> bool:
    """Mark the function of `weakref.finalize` as registered with atexit; returns whether it already
    was. False for any other function."""
    finalize = _finalize()
    if finalize is None or function != finalize._exitfunc:
        return False
    before: bool = finalize._registered_with_atexit
    finalize._registered_with_atexit = True
    return before


def _knows_tempdir() -> bool:
    return getattr(sys.modules.get("tempfile"), "tempdir", None) is not None


@dataclass
class Effects:
    """What an import changes in the process besides sys.modules and its own modules."""

    filters: list[Any] = field(default_factory=list)
    meta_path: list[Any] = field(default_factory=list)
    path_hooks: list[Any] = field(default_factory=list)
    of_sys: dict[str, Any] = field(default_factory=dict)
    loggers: dict[str, Any] = field(default_factory=dict)
    environ: dict[bytes, bytes] = field(default_factory=dict)
    affinity: set[int] = field(default_factory=set)
    tempdir: bool = False
    """Whether tempfile has looked up the folder for temporary files."""
    finalizers: dict[Any, Any] = field(default_factory=dict)
    """New entries in the registry of `weakref.finalize`."""

    @classmethod
    def now(cls) -> Effects:
        """The current state."""
        return cls(
            list(warnings.filters), list(sys.meta_path), list(sys.path_hooks), dict(vars(sys)),
            dict(_loggers()), dict(os.environb), os.sched_getaffinity(0), _knows_tempdir(),
            dict(getattr(_finalize(), "_registry", {})),
        )  # fmt: skip

    def since(self, before: Effects) -> Effects:
        """What has been added since `before`."""
        return Effects(
            [each for each in self.filters if each not in before.filters],
            [each for each in self.meta_path if each not in before.meta_path],
            [each for each in self.path_hooks if each not in before.path_hooks],
            {n: v for n, v in self.of_sys.items() if n not in before.of_sys},
            {n: v for n, v in self.loggers.items() if before.loggers.get(n) is not v},
            {n: v for n, v in self.environ.items() if n not in before.environ},
            self.affinity if self.affinity != before.affinity else set(),
            self.tempdir and not before.tempdir,
            {each: i for each, i in self.finalizers.items() if each not in before.finalizers},
        )

    def undo(self) -> None:
        """Undo the effects in the server. `HiddenModules.hide` and the child reset the others."""
        for name in self.of_sys:
            vars(sys).pop(name, None)
        for name, logger in self.loggers.items():
            if _loggers().get(name) is logger:
                del _loggers()[name]
        for each in self.finalizers:
            _finalize()._registry.pop(each, None)

    def apply(self, mask: set[int]) -> None:
        """Apply the effects in a rank. `mask`: the cores of a rank that is not bound."""
        _set_filters([*(f for f in self.filters if f not in warnings.filters), *warnings.filters])
        sys.meta_path += [each for each in self.meta_path if each not in sys.meta_path]
        sys.path_hooks += [each for each in self.path_hooks if each not in sys.path_hooks]
        vars(sys).update(self.of_sys)
        for name, value in self.environ.items():
            os.environb.setdefault(name, value)
        if self.affinity and os.sched_getaffinity(0) == mask:
            os.sched_setaffinity(0, self.affinity)  # libgomp binds the thread that loads it
        if self.loggers:
            self._make_loggers()
        if self.tempdir and (tempfile := sys.modules.get("tempfile")):
            tempfile.gettempdir()
        if self.finalizers and (finalize := _finalize()):
            for each, info in self.finalizers.items():
                info.index = next(finalize._index_iter)  # they run in order of creation
                finalize._registry[each] = info
            finalize._dirty = True

    def _make_loggers(self) -> None:
        """Create loggers in the same order and way as `logging.getLogger`."""
        logging: Any = sys.modules["logging"]
        manager = logging.root.manager
        for name, logger in self.loggers.items():
            if not isinstance(logger, logging.Logger):  # made by the loggers below it
                continue
            there = manager.loggerDict.get(name)
            manager.loggerDict[name] = logger
            if isinstance(there, logging.PlaceHolder):
                manager._fixupChildren(there, logger)
            manager._fixupParents(logger)
            logger._cache.clear()


def mtime(path: str) -> int:
    """Modification time of a file in ns; -1 if it does not exist."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return -1


class Root(NamedTuple):
    """A module that the server imported on purpose, with all modules that its import loaded."""

    name: str
    modules: frozenset[str]
    effects: Effects


class HiddenModules:
    """The preloaded modules, and how they are restored."""

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline
        self.roots: list[Root] = []
        saw = {os.fsdecode(n): os.fsdecode(v) for n, v in baseline.environ.items()}
        self.environment = Environment(saw)
        self.files: dict[str, int] = {}
        """mtime in ns of every file whose change makes this process stale."""
        self.exec_instead: Callable[[str], None] | None = None
        """Called in a rank if numpy or torch must not come from here: execs the rank. Returns if
        that is impossible. None in our own processes, which use whatever is imported."""
        self._sealed: frozenset[str] = frozenset()
        self.modules: dict[str, Any] = {}
        """The hidden modules."""
        self._needs: dict[str, frozenset[str]] = {}
        self._units: dict[str, list[str]] = {}
        self._callables: dict[str, dict[str, Any]] = {}
        """Functions and classes of each module of the standard library."""
        self._restored_modules: dict[str, Any] = {}
        self._applied: set[str] = set()
        self._path: list[str] = []
        self._lock = _thread.RLock()  # a rank's threads may import at the same moment
        self.finder = _Finder(self)

    # ------------------------------------------------------------ in the server

    def stale_file(self) -> str:
        """The first file that has changed since it was imported; empty if none."""
        return next((path for path, then in self.files.items() if mtime(path) != then), "")

    @contextlib.contextmanager
    def importing(self, name: str) -> Iterator[None]:
        """Record what the block imports as the root `name`, with its side effects."""
        _forget_codecs(self.baseline.modules)
        modules, before = set(sys.modules), Effects.now()
        requested: set[str] = set()
        original = builtins.__import__
        builtins.__import__ = partial(_note_import, original, requested)
        try:
            yield
        finally:
            builtins.__import__ = original
        brought = sys.modules.keys() - modules
        # the server had imported some modules of the standard library before
        brought |= {each for each in requested & modules if not is_ours(each)}
        self.roots.append(Root(name, frozenset(brought), Effects.now().since(before)))

    def seal(self) -> None:
        """Index all modules that were imported. Called in the server before the first fork, and
        before that in the warm process, if the server is a fork of one. No-op if nothing was
        imported since the last call."""
        imported = frozenset(sys.modules)
        if imported == self._sealed:
            return
        self._sealed = imported
        self._index()
        prepare_end(self.modules.values(), self.baseline.exits.register)
        # Never freed: freeing it at exit would touch, and so copy, pages that a rank has never
        # used.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.modules))
        made = {n: v for root in self.roots for n, v in root.effects.environ.items()}
        self.environment.made = {os.fsdecode(n): os.fsdecode(v) for n, v in made.items()}

    def _index(self) -> None:
        """Compute which modules exist, which are restored together, and which depend on which.
        Modules that only the server itself needs are left out."""
        skip = (*self.baseline.modules, *STAYS, _MAIN_ALIAS)
        self.modules = {
            name: module
            for name, module in sys.modules.items()
            if name not in skip and not is_ours(name)
        }
        self._units = {}
        for name in self.modules:
            self._units.setdefault(_unit(name), []).append(name)
        self._needs = {unit: self._needed_by(unit) for unit in self._units}
        needed = {each for root in self.roots for each in self._closure(root.name)}
        self.modules = {name: self.modules[name] for name in self.modules if name in needed}
        self._units = {u: [n for n in names if n in needed] for u, names in self._units.items()}
        self._callables = {
            name: {
                each: value
                for each, value in vars(module).items()
                if isinstance(value, (FunctionType, type)) and each not in _OWN_CALLS
            }
            for name, module in self.modules.items()
            if name.partition(".")[0] in sys.stdlib_module_names and isinstance(module, ModuleType)
        }

    def top_names(self) -> set[str]:
        """Top-level names that must not also exist in a folder of the user: all names here except
        those that every interpreter imports before it searches that folder."""
        tops = {name.partition(".")[0] for name in (*self.modules, *STAYS)}
        return tops - self.baseline.modules

    def _needed_by(self, unit: str) -> frozenset[str]:
        """Units that this unit depends on: those whose modules, classes or functions its modules
        refer to. For the standard library, what its code imports: its packages have attributes for
        all submodules that anybody has imported, although `importlib` does not need
        `importlib.metadata`."""
        standard = unit.partition(".")[0] in sys.stdlib_module_names
        found = set(_imported_by(self.modules[unit])) if standard else {unit.rpartition(".")[0]}
        if standard:  # `typing.io`, which typing itself creates
            found |= {
                name
                for name, module in self.modules.items()
                if name.startswith(f"{unit}.") and getattr(module, "__spec__", None) is None
            }
            # `_blake2`, which a function of hashlib imports during the import of hashlib
            held = vars(self.modules[unit]).values()
            kinds = (BuiltinFunctionType, type)
            found |= {str(v.__module__) for v in held if type(v) in kinds and _is_c(v)}
        for name in () if standard else self._units[unit]:
            for value in list(getattr(self.modules[name], "__dict__", {}).values()):
                kind = type(value)
                if kind is ModuleType:
                    found.add(_unit(value.__name__))
                elif kind in (FunctionType, BuiltinFunctionType, type):
                    found.add(_unit(str(value.__module__)))
        return frozenset(found & self._units.keys() - {unit})

    @property
    def packages(self) -> set[str]:
        """Packages outside the standard library."""
        return {name.partition(".")[0] for name in self.modules} - set(sys.stdlib_module_names)

    def hide(self) -> None:
        """Remove the preloaded modules from sys.modules. Done once in the server, which does not
        need them by name; in a child it would touch, and so copy, a page for each module."""
        for root in reversed(self.roots):
            root.effects.undo()
        if finalize := _finalize():
            finalize._registered_with_atexit = self.baseline.finalizes
            finalize._dirty = bool(finalize._registry)
        kept = self.baseline.modules.union(STAYS)
        _forget_codecs(kept)
        for name in [name for name in sys.modules if name not in kept]:
            del sys.modules[name]
        sys.path[:] = self.baseline.path
        sys.meta_path[:] = [self.finder, *self.baseline.meta_path]
        sys.path_hooks[:] = self.baseline.path_hooks
        # Python 3.12 warns of forks in a process with threads, such as OpenBLAS's idle one.
        _set_filters([("ignore", None, DeprecationWarning, None, 0), *self.baseline.filters])

    # ------------------------------------------------------------ in the child

    def activate(self, exec_instead: Callable[[str], None]) -> None:
        """In a rank: restore modules on import from now on. Call right before the script starts,
        when sys.path is the script's."""
        self.exec_instead = exec_instead
        self._path = list(sys.path)
        _set_filters(self.baseline.filters)

    def restore(self, name: str) -> Any:
        """Put `name` and its dependencies into sys.modules and return the module; or exec this
        rank, if the import would now differ. None if it is
        neither hidden nor imported: another thread has imported the last root."""
        with self._lock:
            return self._restore(name) if name in self.modules else sys.modules.get(name)

    def _restore(self, name: str) -> Any:
        module = self.modules[name]
        names = self._closure(name)
        installed = any(n.partition(".")[0] not in sys.stdlib_module_names for n in names)
        if self.exec_instead is not None and installed and (reason := self.why_differs(names)):
            self.exec_instead(reason)
        for each in [each for each in self.modules if each in names]:
            found = self.modules.pop(each)
            if each not in sys.modules or not _is_blank(found):
                sys.modules[each] = found
            self._restored_modules[each] = sys.modules[each]
        if "multiprocessing" in names:
            sys.modules[_MAIN_ALIAS] = sys.modules["__main__"]
        for root in self.roots:
            if root.name in names and root.name not in self._applied:
                self._applied.add(root.name)
                root.effects.apply(self.baseline.affinity)
        self.baseline.exits.register_held(names)
        if not any(root.name in self.modules for root in self.roots):
            self.modules.clear()  # no root is left
            self._restored_modules.clear()
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self.finder)
        return module

    def _closure(self, name: str) -> set[str]:
        """Everything that is restored with `name`. With torch, all that was imported before it,
        which its own import would have loaded."""
        names: set[str] = set()
        waiting = [name, _unit(name)]
        seen: set[str] = set()
        while waiting:
            each = waiting.pop()
            if each in seen:
                continue
            seen.add(each)
            for root in self.roots:
                if root.name == each:
                    names |= root.modules
                    waiting += {_unit(module) for module in root.modules}
            unit = {n for n in self._units.get(each, ()) if not self._is_later(n, seen)}
            names |= unit
            waiting += [root.name for root in self.roots if root.name in unit]
            waiting += self._needs.get(each, frozenset())
        if "torch" in names:
            first = next((r for r in self.roots if r.name == "numpy"), None)
            names |= first.modules if first is not None else frozenset()
        return names & self.modules.keys()

    def _is_later(self, name: str, requested: set[str]) -> bool:
        """Whether `name` belongs to a separate root (--preload=torch._dynamo) that was not
        requested."""
        owner = next((root for root in self.roots if name in root.modules), None)
        if owner is None or owner.name in requested:
            return False
        top = name.partition(".")[0]
        return owner.name != top and any(root.name == top for root in self.roots)

    # ------------------------------------------------------------ may it be restored?

    def why_differs(self, names: Iterable[str]) -> str:
        """Why importing these now would differ from the server's import, because of what the script
        has changed since it began; empty if nothing."""
        wanted = set(names)
        return next(filter(None, self._differences(wanted)), "")

    def _differences(self, names: set[str]) -> Iterator[str]:
        tops = {name.partition(".")[0] for name in names}
        third = sorted(tops - set(sys.stdlib_module_names))
        which = next((name for name in (*reversed(GUARDED), *third) if name in tops), "")
        if changed := self.environment.changed(third, os.environ):
            yield f"{', '.join(changed)} was set before the first import of {which}"
        before = f"before the first import of {which}"
        expected = [self.finder, *self.baseline.meta_path]
        if sys.meta_path[: len(expected)] != expected:
            yield f"sys.meta_path was changed {before}"
        if sys.path_hooks[: len(self.baseline.path_hooks)] != self.baseline.path_hooks:
            yield f"sys.path_hooks was changed {before}"
        for name, module in self._restored_modules.items():
            if sys.modules.get(name) is not module:
                yield f"{name} was replaced in sys.modules {before}"
        for name in names:
            own = self.modules[name]  # in sys.modules already if the script imported it by itself
            if sys.modules.get(name, own) is not own and not _is_blank(own):
                yield f"{name} was put into sys.modules {before}"
        if sys.path != self._path:
            for top in sorted(tops & self.modules.keys()):
                if not _is_same(self.modules[top], self.find_by_others(top)):
                    yield f"sys.path was changed {before}, where another {top} is"
        for name in self._restored_modules:
            for each, value in self._callables.get(name, {}).items():
                if vars(self._restored_modules[name]).get(each) is not value:
                    yield f"{name}.{each} was replaced {before}"
        yield self._logging_differs(before)
        if path := self.stale_file():
            yield f"{path} has changed since it was imported"

    def _logging_differs(self, before: str) -> str:
        logging: Any = self._restored_modules.get("logging")
        if logging is None:
            return ""
        if logging.getLoggerClass() is not logging.Logger or logging.root.manager.loggerClass:
            return f"logging has another class of loggers {before}"
        for root in self.roots:
            if root.name not in self._applied:
                for name, logger in root.effects.loggers.items():
                    there = logging.root.manager.loggerDict.get(name)
                    if isinstance(there, logging.Logger) and isinstance(logger, logging.Logger):
                        return f"the logger {name} was made {before}"
        return ""

    def find_by_others(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the finders after ours find."""
        where = sys.meta_path.index(self.finder) + 1 if self.finder in sys.meta_path else 0
        for finder in sys.meta_path[where:]:
            find = getattr(finder, "find_spec", None)
            if find is not None and (spec := find(name, path, target)) is not None:
                return spec  # type: ignore[no-any-return]
        return None


def _forget_codecs(kept: Collection[str]) -> None:
    """Remove all codecs except `kept`, so that the next lookup imports their modules again."""
    for name in [each for each in sys.modules if each.startswith("encodings.")]:
        if name not in kept:
            del sys.modules[name]
            vars(encodings).pop(name.rpartition(".")[2], None)
    vars(encodings)["_cache"].clear()
    codecs.unregister(encodings.search_function)  # also clears the interpreter's own cache
    codecs.register(encodings.search_function)


def _note_import(
    original: Callable[..., Any],
    requested: set[str],
    name: str,
    globals: Any = None,
    locals: Any = None,
    fromlist: Any = (),
    level: int = 0,
) -> Any:
    """Import as usual, and record which modules outside the importing package were requested."""
    module = original(name, globals, locals, fromlist, level)
    if not level:
        words = name.split(".")
        requested.update(".".join(words[: count + 1]) for count in range(len(words)))
        requested.update(f"{name}.{each}" for each in fromlist or () if isinstance(each, str))
    return module


def _is_same(module: Any, spec: importlib.machinery.ModuleSpec | None) -> bool:
    """Whether a module was loaded from the origin that `spec` names."""
    own = getattr(module, "__spec__", None)
    if own is None or spec is None:
        return own is spec
    folders = own.submodule_search_locations, spec.submodule_search_locations
    return own.origin == spec.origin and (
        own.origin is not None or list(folders[0] or ()) == list(folders[1] or ())
    )


def _imported_by(module: Any) -> Iterator[str]:
    """Modules that a module's code imports outside of functions, with names that may be modules or
    attributes of one. Yields nothing but the parent package for a module without Python code."""
    name = module.__name__
    yield name.rpartition(".")[0]
    try:
        code = module.__spec__.loader.get_code(name)
    except (AttributeError, ImportError, OSError):
        return
    package = name if hasattr(module, "__path__") else name.rpartition(".")[0]
    for level, what, parts in _imports_in(code) if code is not None else ():
        base = what
        if level:
            above = package.split(".")[: len(package.split(".")) - level + 1]
            base = ".".join([*above, what] if what else above)
        words = base.split(".")
        yield from (".".join(words[: count + 1]) for count in range(len(words)))
        yield from (f"{base}.{part}" for part in parts)


def _imports_in(code: CodeType) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Level, name and from-list of each import statement, as loaded before IMPORT_NAME."""
    before: list[Any] = [0, None]
    wide = 0
    for inner in code.co_consts:  # a class body runs with its module
        if isinstance(inner, CodeType) and not inner.co_flags & _OPTIMIZED:
            yield from _imports_in(inner)
    for index in range(0, len(code.co_code), 2):
        operation, argument = code.co_code[index], code.co_code[index + 1] | wide
        wide = argument << 8 if operation == _EXTENDED else 0
        if operation == _LOAD_CONST:
            before = [before[1], code.co_consts[argument]]
        elif operation == _SMALL_INT:
            before = [before[1], argument]
        elif operation == _IMPORT:
            level, parts = before
            yield int(level or 0), code.co_names[argument], tuple(parts or ())


def _set_filters(filters: Sequence[Any]) -> None:
    module: Any = warnings
    module.filters[:] = filters
    for name in ("_filters_mutated", "_filters_mutated_lock_held"):  # the latter since 3.14
        if hasattr(module, name):
            getattr(module, name)()
            return


class _Finder(importlib.abc.MetaPathFinder):
    """Finds hidden modules, with the same spec that the other finders would return."""

    def __init__(self, hidden: HiddenModules) -> None:
        self._hidden = hidden

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        module = self._hidden.modules.get(name)
        if module is None:
            return None
        spec = self._hidden.find_by_others(name, path, target)
        top = name.partition(".")[0]
        if not _is_same(module, spec):
            if top not in GUARDED:
                return spec
            if self._hidden.exec_instead is not None:
                found = getattr(spec, "origin", None) or "none"
                self._hidden.exec_instead(f"the import of {name} finds another file now ({found})")
        if spec is None:
            spec = importlib.machinery.ModuleSpec(name, None)
        _load_from(self._hidden, spec, getattr(module, "__spec__", None))
        return spec


def _load_from(hidden: HiddenModules, spec: importlib.machinery.ModuleSpec, own: Any) -> None:
    """Replace the spec's loader by one that loads nothing: the module exists and its code has
    run."""
    original: Any = spec.loader
    spec.loader = loader = _like(original)

    def create_module(spec: importlib.machinery.ModuleSpec) -> Any:
        module = hidden.restore(spec.name)
        if module is None and original is not None:
            spec.loader = original
            return original.create_module(spec)
        return module

    def exec_module(module: ModuleType) -> None:
        with contextlib.suppress(AttributeError):  # an object in place of a module
            module.__spec__ = own

    loader.create_module = create_module
    loader.exec_module = exec_module


def _like(loader: Any) -> Any:
    """Copy a loader for use with a single module: the loader of an archive serves all its modules.
    `copy` is not used, because it would import modules that the script has not imported."""
    if loader is None or isinstance(loader, type):  # the loader of built-in modules is a class
        return _Loader()
    try:
        made = object.__new__(type(loader))
        vars(made).update(vars(loader))
    except TypeError:  # a C type, or one without a __dict__
        return _Loader()
    return made


class _Loader(importlib.abc.Loader):
    """Replaces a loader that cannot be copied."""
