"""Imported by the server, invisible to the script until the script itself imports it.

`os.environ["OMP_PROC_BIND"] = "true"` above `import torch` is the commonest first line of training
scripts, so the moment of the script's own first import has to exist in a forked rank too. In the
child everything beyond a plain interpreter's modules is taken out of sys.modules; a finder in
front of sys.meta_path puts a module back, with all that its import brings, when it is asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import opcode
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from elasticrun.forkserver.renew import prepare_end

OURS = __name__.partition(".")[0]
"""Our own package. Ranks get none of the modules that the server runs on: see `Stash.own`."""

_IMPORT, _LOAD_CONST = opcode.opmap["IMPORT_NAME"], opcode.opmap["LOAD_CONST"]
_EXTENDED, _SMALL_INT = opcode.opmap["EXTENDED_ARG"], opcode.opmap.get("LOAD_SMALL_INT", -1)

STAYS = ("threading", "_weakrefset")
"""Left in sys.modules: the interpreter looks there for the threads that it must wait for."""


class Baseline:
    """What a plain interpreter has at the start of a script; `modules` are the names that were in
    sys.modules at the server's first instruction."""

    def __init__(self, modules: Iterable[str]) -> None:
        self.modules = frozenset(modules)
        self.path = list(sys.path)
        self.meta_path = list(sys.meta_path)
        self.path_hooks = list(sys.path_hooks)
        self.environ = dict(os.environb)
        self.filters = list(warnings.filters)
        self.affinity = os.sched_getaffinity(0)


def is_ours(name: str) -> bool:
    """Whether a module is of our own package."""
    return name.partition(".")[0] == OURS


def _unit(name: str) -> str:
    """What comes back together: a package with all below it; of the standard library and of ours,
    one module, since nobody imports all of `importlib` to get a part of it."""
    top = name.partition(".")[0]
    return name if top in sys.stdlib_module_names or top == OURS else top


class Root(NamedTuple):
    """A module that the server imported on purpose, with all that came with it."""

    name: str
    modules: frozenset[str]


class Stash:
    """The preloaded modules, and how they come back."""

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline
        self.roots: list[Root] = []
        self.reads: dict[str, str] = {}
        """Environment variables that Python code read while it was imported, with the file."""
        self.saw = {os.fsdecode(n): os.fsdecode(v) for n, v in baseline.environ.items()}
        """The environment at that time."""
        self.own: dict[str, Any] = {}
        """Modules of our package that were imported for the ranks; nobody else has run on them."""
        self._sealed: frozenset[str] = frozenset()
        self.modules: dict[str, Any] = {}
        """Those that are hidden."""
        self._needs: dict[str, frozenset[str]] = {}
        self._units: dict[str, list[str]] = {}
        self._owners: dict[str, Root] = {}
        """By module: the first root that it came with."""
        self._filters: list[Any] = []
        self._meta_path: list[Any] = []
        self._path_hooks: list[Any] = []
        self.environ: dict[bytes, bytes] = {}
        self._affinity: set[int] = set()
        self._returned: Callable[[set[str]], None] = lambda tops: None
        self.looked_for: Callable[[str], None] = lambda name: None
        """Called with the name of each module that is looked for, stashed or not."""

    # ------------------------------------------------------------ in the server

    def add_root(self, name: str, before: set[str]) -> None:
        """`name` has just been imported; `before` were the modules until then."""
        root = Root(name, frozenset(sys.modules.keys() - before))
        self.roots.append(root)
        for module in root.modules:
            self._owners.setdefault(module, root)

    def seal(self) -> None:
        """Everything is imported: note what there is. Called in the server, before the first
        fork, and before that in the warm process of which it may be one."""
        imported = frozenset((*sys.modules, *self.own))
        if imported != self._sealed:
            self._sealed = imported
            self._index()
            prepare_end(self.modules.values())
            # Never freed: a rank that ends would take apart, and so copy, what it never used.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.modules))
        self._filters = [f for f in warnings.filters if f not in self.baseline.filters]
        self._meta_path = [f for f in sys.meta_path if f not in self.baseline.meta_path]
        self._path_hooks = [f for f in sys.path_hooks if f not in self.baseline.path_hooks]
        self.environ = {
            name: value for name, value in os.environb.items() if name not in self.baseline.environ
        }
        self._affinity = os.sched_getaffinity(0)

    def _index(self) -> None:
        """Which modules there are, what comes back together, and what needs what."""
        skip = (*self.baseline.modules, *STAYS)
        self.modules = {
            name: module
            for name, module in sys.modules.items()
            if name not in skip and not is_ours(name)
        }
        self.modules.update(self.own)
        for name in self.own:
            _unbind(name, self.own)
        self._units = {}
        for name in self.modules:
            self._units.setdefault(_unit(name), []).append(name)
        self._needs = {unit: self._needed_by(unit) for unit in self._units}

    def top_names(self) -> set[str]:
        """The packages and modules that a folder of the user's must not have, too: all but those
        that every interpreter has imported before it looks there."""
        tops = {name.partition(".")[0] for name in (*self._units, *STAYS)}
        return tops - self.baseline.modules

    def _needed_by(self, unit: str) -> frozenset[str]:
        """Units whose modules, classes or functions this one's modules hold by name; of the
        standard library, what its code imports: there a package has the names of all below it that
        anybody has imported, and `importlib` does not need `importlib.metadata`."""
        standard = unit.partition(".")[0] in sys.stdlib_module_names
        found = set(_imported_by(self.modules[unit])) if standard else {unit.rpartition(".")[0]}
        for name in () if standard else self._units[unit]:
            for value in list(getattr(self.modules[name], "__dict__", {}).values()):
                kind = type(value)
                if kind is ModuleType:
                    found.add(_unit(value.__name__))
                elif kind in (FunctionType, BuiltinFunctionType, type):
                    found.add(_unit(str(value.__module__)))
        return frozenset(found & self._units.keys() - {unit})

    def hide(self) -> None:
        """Take the preloaded modules away. Done once in the server, which needs none of them by
        name: done in a child, it would touch, and so copy, a page for each module."""
        kept = self.baseline.modules.union(STAYS)
        for name in [name for name in sys.modules if name not in kept]:
            del sys.modules[name]
        sys.path[:] = self.baseline.path
        sys.meta_path[:] = [_Finder(self), *self.baseline.meta_path]
        sys.path_hooks[:] = self.baseline.path_hooks
        # Python 3.12 warns of forks beside a thread, such as OpenBLAS' idle one.
        _set_filters([("ignore", None, DeprecationWarning, None, 0), *self.baseline.filters])

    # ------------------------------------------------------------ in the child

    def tell(self, returned: Callable[[set[str]], None]) -> None:
        """`returned` is called with the names of the packages (not of the standard library) that
        an import of the script's has just brought back."""
        self._returned = returned
        _set_filters(self.baseline.filters)

    def give_back(self, name: str) -> Any:
        """Put `name` and what it needs into sys.modules; the module itself."""
        module = self.modules[name]
        names, roots = self._closure(name)
        for each in [each for each in self.modules if each in names]:
            sys.modules[each] = self.modules.pop(each)
            if each in self.own:
                _bind(each)
        if any(root.name == "torch" for root in roots):
            self._set_torch_state()
        tops = {each.partition(".")[0] for each in names} - set(sys.stdlib_module_names)
        if tops:
            self._returned(tops)
        return module

    def _closure(self, name: str) -> tuple[set[str], list[Root]]:
        names: set[str] = set()
        roots: list[Root] = []
        waiting = [name, _unit(name)]
        seen: set[str] = set()
        while waiting:
            each = waiting.pop()
            if each in seen:
                continue
            seen.add(each)
            for root in self.roots:
                if root.name == each:
                    roots.append(root)
                    names |= root.modules
                    waiting += {_unit(module) for module in root.modules}
            mine = self._units.get(each, ())
            names.update(m for m in mine if m in self.modules and not self._is_later(m, roots))
            waiting += self._needs.get(each, frozenset())
        return names & self.modules.keys(), roots

    def _is_later(self, name: str, roots: list[Root]) -> bool:
        """Whether `name` came with a root of its own (torch._dynamo) that nobody asked for."""
        owner = self._owners.get(name)
        if owner is None or owner in roots:
            return False
        top = name.partition(".")[0]
        return owner.name != top and any(root.name == top for root in self.roots)

    def _set_torch_state(self) -> None:
        """What the import of torch changes beside sys.modules."""
        fresh = [f for f in self._filters if f not in warnings.filters]
        _set_filters([*fresh, *warnings.filters])
        sys.meta_path += [f for f in self._meta_path if f not in sys.meta_path]
        sys.path_hooks += [f for f in self._path_hooks if f not in sys.path_hooks]
        for name, value in self.environ.items():
            os.environb.setdefault(name, value)
        if self._affinity != self.baseline.affinity and (
            os.sched_getaffinity(0) == self.baseline.affinity
        ):
            os.sched_setaffinity(0, self._affinity)  # libgomp binds the thread that loads it


def _imported_by(module: Any) -> Iterator[str]:
    """The modules that a module's own code imports outside of functions, with names that may be
    modules or what is in one; nothing of a module that is not Python's."""
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
    """Level, name and list of each import statement, as they stand before IMPORT_NAME."""
    before: list[Any] = [0, None]
    wide = 0
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


def _unbind(name: str, modules: Mapping[str, Any]) -> None:
    """Where a package has what lies below it by name, `from package import name` imports nothing,
    and brings back nothing."""
    package, _, last = name.rpartition(".")
    if package:
        vars(modules[package]).pop(last, None)


def _bind(name: str) -> None:
    """As an import does it."""
    package, _, last = name.rpartition(".")
    if package in sys.modules:
        setattr(sys.modules[package], last, sys.modules[name])


def _set_filters(filters: Sequence[Any]) -> None:
    module: Any = warnings
    module.filters[:] = filters
    for name in ("_filters_mutated", "_filters_mutated_lock_held"):  # the latter since 3.14
        if hasattr(module, name):
            getattr(module, name)()
            return


class _Finder(importlib.abc.MetaPathFinder):
    """Answers for what is stashed, with a spec that looks like the module's own."""

    def __init__(self, stash: Stash) -> None:
        self._stash = stash

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        self._stash.looked_for(name)
        if name not in self._stash.modules:
            return None
        own = getattr(self._stash.modules[name], "__spec__", None)
        spec = importlib.machinery.ModuleSpec(
            name,
            _Loader(self._stash, own),
            origin=getattr(own, "origin", None),
            is_package=getattr(own, "submodule_search_locations", None) is not None,
        )
        if own is not None:
            spec.submodule_search_locations = own.submodule_search_locations
            spec.has_location = own.has_location
            spec.cached = own.cached
        return spec


class _Loader(importlib.abc.Loader):
    """Loads nothing: the module is there, its code has run."""

    def __init__(self, stash: Stash, own: Any) -> None:
        self._stash = stash
        self._own = own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self._stash.give_back(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        with contextlib.suppress(AttributeError):  # an object in a module's place
            module.__spec__ = self._own

    def __getattr__(self, name: str) -> Any:
        """The rest (get_source, get_data, path ...) is what the module's own loader says."""
        loader = getattr(self.__dict__.get("_own"), "loader", None)
        if loader is None:
            raise AttributeError(name)
        return getattr(loader, name)
