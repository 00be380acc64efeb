"""Decides whether a fork of this process behaves like a fresh interpreter.

Every public function returns a sentence that says why not, or an empty string; its docstring names
the reason. Counting threads does not detect a poisoned CUDA, so one trial child is forked and
checked.
"""

from __future__ import annotations

import ast
import importlib.machinery
import math
import os
import re
import select
import signal
import site
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

from elasticrun.forkserver.lazy_imports import GUARDED
from elasticrun.forkserver.program import absolute, is_archive, script_folder
from elasticrun.forkserver.renew import read_by_c
from elasticrun.host.system import processes
from elasticrun.wire.env import OMP_NUM_THREADS, PLACEMENT_VARIABLES, PYTHON_EXEC
from elasticrun.wire.types import EntryKind, Entrypoint

TRACERS: Mapping[str, str] = {
    "CUDA_INJECTION64_PATH": "an NVIDIA tool (nsys, ncu or compute-sanitizer)",
    "NVTX_INJECTION64_PATH": "an NVIDIA tool",
    "ROCP_TOOL_LIB": "rocprof",
    "ROCP_TOOL_LIBRARIES": "rocprof",
    "HSA_TOOLS_LIB": "a ROCm tool",
    "ZE_ENABLE_TRACING_LAYER": "a Level Zero tracer",
    "DEBUGPY_LAUNCHER_PORT": "debugpy",
    "PYDEVD_LOAD_VALUES_ASYNC": "a debugger",
}
"""Variables by which tools attach to an exec'd process. According to NVIDIA, nsys does not trace a
fork without exec unless it is configured to.
"""

INJECTED_LIBRARIES = ("ToolsInjection", "TreeLauncher", "rocprof", "roctracer", "libnsys")
"""Parts of file names in LD_PRELOAD with the same meaning."""

INTERPRETER: Mapping[str, str] = {
    "PYTHONINSPECT": "and such an interpreter does not exit in a fork",
    "PYTHONPROFILEIMPORTTIME": "and a fork has imported most of it already",
    "PYTHONVERBOSE": "and a fork has imported most of it already",
}
"""Interpreter settings that a fork cannot honor."""

TESTED_BACKENDS: frozenset[str] = frozenset()
"""Entry points in the group torch.backends whose import is known to leave forks safe."""

DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/davinci", "/dev/accel", "/dev/hl")

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

TRIAL_SECONDS = 20.0
"""Seconds for a trial child to answer. One that does not hangs, as its siblings would."""

MAX_SCRIPT = 4 * 1024 * 1024
"""Maximum bytes of a script that are scanned; a longer file is data."""


def before_import(entry: Entrypoint, numa: bool, environ: Mapping[str, str]) -> str:
    """The first reason that is known before any import."""
    return next(filter(None, _known_before(entry, numa, environ)), "")


def _known_before(entry: Entrypoint, numa: bool, environ: Mapping[str, str]) -> Iterator[str]:
    """Possible reasons, "" for none. The scan of the script comes last because it takes longest."""
    follows = "and may not work after a fork"
    for name, tool in TRACERS.items():
        if environ.get(name):
            yield f"{tool} is attached by {name}, {follows}"
    preloaded, python = environ.get("LD_PRELOAD", ""), environ.get(PYTHON_EXEC, "")
    for part in INJECTED_LIBRARIES:
        if part in preloaded:
            yield f"a tool is attached by LD_PRELOAD ({part}), {follows}"
    if sys.gettrace() is not None or "pydevd" in sys.modules:
        yield f"a debugger is attached, {follows}"
    if python and os.path.realpath(python) != os.path.realpath(sys.executable):
        yield f"{PYTHON_EXEC} names another interpreter ({python})"
    for name, why in INTERPRETER.items():
        if environ.get(name):
            yield f"{name} is set, {why}"
    if numa:
        yield placement(environ)
    yield customized(environ)
    path = _file_of(entry)
    yield f"{path} is compiled" if path.endswith((".pyc", ".pyo")) else ""
    if entry.kind is EntryKind.SCRIPT and not os.path.isdir(path) and is_archive(path):
        # `import torch` searches each archive on sys.path for entry points (importlib.metadata)
        yield f"{path} is an archive, which the import of torch reads"
    yield sets_too_late(entry, read_by_c, environ)


def placement(environ: Mapping[str, str]) -> str:
    """Reason against forking ranks that are bound to cores: libgomp fixes its places when it is
    loaded, which is in the server."""
    for name in PLACEMENT_VARIABLES:
        if environ.get(name):
            return f"{name} is set, which would misplace forks that are bound to cores"
    if not environ.get(OMP_NUM_THREADS):
        return f"ranks are bound to cores, and without {OMP_NUM_THREADS} torch counts those it has"
    return ""


# ---------------------------------------------------------------- the script


def sets_too_late(
    entry: Entrypoint, counts: Callable[[str], bool], environ: Mapping[str, str]
) -> str:
    """The program's text sets a relevant variable to another value above its import of torch. A
    rank would detect this by itself (`child.FreshStart`), but only after its first lines have
    run."""
    path = _file_of(entry)
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(MAX_SCRIPT))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
    for name, value in _set_in(tree, _first_import(tree)):
        if counts(name) and environ.get(name) != value and (value is not None or name in environ):
            return f"{path} sets {name}, which an import reads, before that import"
    return ""


def _first_import(tree: ast.Module) -> float:
    """The line of the first import of torch or numpy outside of functions; infinity if none."""
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for node in ast.walk(statement):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            if any(name.partition(".")[0] in GUARDED for name in names):
                return statement.lineno
    return math.inf


_ANY: Final = "\0"
"""Represents a value that is known only by running the program."""


def _set_in(tree: ast.Module, until: float) -> Iterator[tuple[str, str | None]]:
    """Variables that a text sets above a line, with the value; None if it removes them."""

    def constant(node: ast.expr | None) -> str:
        value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
        return value if isinstance(value, str) else _ANY

    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) >= until:
            continue
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from ((n, constant(value)) for each in targets for n in _keys(each))
            case ast.AugAssign(target=target):
                yield from ((name, _ANY) for name in _keys(target))
            case ast.Delete(targets=targets):
                yield from ((name, None) for each in targets for name in _keys(each))
            case ast.Call(func=ast.Attribute(attr=what), args=args, keywords=keywords):
                first = constant(args[0]) if args else _ANY
                if what in ("putenv", "pop", "unsetenv"):
                    is_set = what == "putenv" and len(args) > 1
                    yield first, constant(args[1]) if is_set else None
                elif what == "setdefault" and first not in os.environ:
                    yield first, constant(args[1] if len(args) > 1 else None)
                elif what == "update":
                    yield from ((each.arg, constant(each.value)) for each in keywords if each.arg)
                    if args and isinstance(args[0], ast.Dict):
                        pairs = zip(args[0].keys, args[0].values, strict=True)
                        yield from ((constant(key), constant(value)) for key, value in pairs)


def _keys(target: ast.expr) -> Iterator[str]:
    """The name in `environ["NAME"]`."""
    match target:
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            yield name


def _file_of(entry: Entrypoint) -> str:
    """The program's file; empty if there is none."""
    if entry.kind in (EntryKind.COMMAND, EntryKind.FUNCTION):
        return ""
    return _module_file(entry.target) if entry.kind is EntryKind.MODULE else entry.target


def _module_file(name: str) -> str:
    """The file that `-m name` would run, found without importing packages; empty if none."""
    folders = [os.getcwd(), *sys.path]
    *packages, last = name.split(".")
    for package in packages:
        folders = [os.path.join(folder, package) for folder in folders]
    for folder in folders:
        for path in (f"{last}.py", os.path.join(last, "__main__.py")):
            if os.path.isfile(os.path.join(folder, path)):
                return os.path.join(folder, path)
    return ""


def shadowed(entry: Entrypoint, names: Collection[str], environ: Mapping[str, str]) -> str:
    """A user's file that a fresh interpreter would import under one of `names`, although the server
    has imported another file. It may be in a folder that only the script has on sys.path, or in
    PYTHONPATH, where the server has found another one first."""
    first = _first_on_path(entry)
    path = [*first, *sys.path]
    for folder in dict.fromkeys([*first, *environ.get("PYTHONPATH", "").split(os.pathsep)]):
        known = folder in sys.path_importer_cache
        for name in sorted(_names_in(folder, names)):
            file = _would_be_imported(name, path)
            if file and not _is_loaded(name, file):
                where = "standard" if name in sys.stdlib_module_names else "installed"
                return f"{file} shadows the {where} {name}"
        if not known:  # a rank searches again, as files may have been written since
            sys.path_importer_cache.pop(folder, None)
    return ""


def _first_on_path(entry: Entrypoint) -> list[str]:
    """What an interpreter puts at the front of sys.path for this program."""
    if entry.kind is EntryKind.SCRIPT and is_archive(entry.target):
        return [absolute(entry.target)]
    if sys.flags.safe_path:
        return []
    if entry.kind is EntryKind.SCRIPT:
        return [script_folder(entry.target)]
    return [os.getcwd()] if entry.kind is EntryKind.MODULE else []


def _names_in(folder: str, names: Collection[str]) -> Collection[str]:
    """Those of `names` for which the folder has files; all of them for an archive."""
    try:
        return {name.partition(".")[0] for name in os.listdir(folder or ".")}.intersection(names)
    except NotADirectoryError:
        return names
    except OSError:
        return ()


def _would_be_imported(name: str, path: list[str]) -> str:
    """The file or folder where `name` is found; empty if sys.path is not searched for it."""
    for finder in (importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter):
        if finder.find_spec(name) is not None:
            return ""
    try:
        spec = importlib.machinery.PathFinder.find_spec(name, path)
    except (ImportError, OSError, ValueError):
        return ""
    if spec is None:
        return ""
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "")


def _is_loaded(name: str, path: str) -> bool:
    """Whether the server has imported this file: the script is next to a package that is installed
    from there."""
    module = sys.modules.get(name)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    real = os.path.realpath(path)
    return any(isinstance(place, str) and os.path.realpath(place) == real for place in places)


# ---------------------------------------------------------------- code that runs at each start

INERT: Final = (
    r"import os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = .*; enabled and "
    r"__import__\('_distutils_hack'\)(\.add_shim\(\))?;?",
    r"import _virtualenv",
    r"import __editable__\w+_finder; __editable__\w+_finder\.install\(\)",
    r"import _\w+_editable(_loader)?",
    r"import sys, ?types, ?os;.*importlib\.machinery\.PathSpec.*",
    r"import sys, ?types, ?os;\s*has_mfs = .*(setattr\(|__path__).*",
    r"import sys; sys\.__plen = len\(sys\.path\)",
    r"import sys; new ?= ?sys\.path\[sys\.__plen:\];.*sys\.__egginsert.*",
)
"""Lines of `.pth` files, as patterns, that have the same effect in every process: of setuptools,
virtualenv, editable installs and namespace packages. They only find files and do not depend on the
rank.
"""

INERT_UNLESS: Final[Mapping[str, tuple[str, ...]]] = {
    r"import (sys; exec\(.*)?coverage.*process_startup\(.*": (
        "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"
    ),
    r"import os, ?sys; ?exec\(.*COV_CORE_SOURCE.*": ("COV_CORE_SOURCE",),
}  # fmt: skip
"""Lines that have no effect unless one of these variables is set."""

APPORT: Final = """
try:
    import apport_python_hook
except ImportError:
    pass
else:
    apport_python_hook.install()
"""
"""Debian's and Ubuntu's sitecustomize: it sets sys.excepthook, which a forked rank keeps."""


def customized(environ: Mapping[str, str]) -> str:
    """Code of the installation or user that the interpreter has run when the server started. It
    would run in each rank, where it would see RANK, which the server does not have."""
    for name in ("sitecustomize", "usercustomize"):
        module = sys.modules.get(name)
        path = getattr(module, "__file__", None)
        if module is not None and not _is_inert_module(path):
            return f"{path or name} runs at each start of Python and must see each rank"
    for folder in _site_folders():
        try:
            names = sorted(n for n in os.listdir(folder) if n.endswith(".pth") and n[0] != ".")
        except OSError:
            continue
        for name in names:
            path = os.path.join(folder, name)
            if any(not _is_inert(line, environ) for line in _code_lines(path)):
                return f"{path} runs code at each start of Python, and must run in each rank"
    return ""


def _is_inert_module(path: str | None) -> bool:
    """Whether a file has no code other than Debian's."""
    try:
        with open(path or "", "rb") as file:
            tree = ast.parse(file.read(MAX_SCRIPT))
    except (OSError, ValueError, SyntaxError):
        return False
    body = [s for s in tree.body if not isinstance(getattr(s, "value", None), ast.Constant)]
    return not body or [ast.dump(s) for s in body] == [ast.dump(s) for s in ast.parse(APPORT).body]


def _site_folders() -> list[str]:
    """Folders in which the interpreter has looked for `.pth` files."""
    folders = list(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [folder for folder in dict.fromkeys(folders) if folder in sys.path]


def _code_lines(path: str) -> list[str]:
    """The lines that the interpreter executes."""
    try:
        # not "utf-8-sig", whose module would make the warm process's index of modules stale
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().removeprefix("\ufeff").split("\n")
    except OSError:
        return []
    return [line.strip() for line in lines if line.startswith(("import ", "import\t"))]


def _is_inert(line: str, environ: Mapping[str, str]) -> bool:
    if any(re.fullmatch(pattern, line) for pattern in INERT):
        return True
    return any(
        re.fullmatch(pattern, line) and not any(environ.get(name) for name in names)
        for pattern, names in INERT_UNLESS.items()
    )


# ---------------------------------------------------------------- backends and builds


def untested_backend(environ: Mapping[str, str]) -> str:
    """A plug-in that `import torch` would load and that might open a device."""
    if environ.get(AUTOLOAD) == "0":
        return ""
    from importlib.metadata import entry_points

    for point in entry_points(group="torch.backends"):
        if point.name not in TESTED_BACKENDS:
            return f"the torch backend {point.name!r} may open a device while torch is imported"
    return ""


def build_reason() -> str:
    """Builds of torch for which forks have not been tested on their hardware."""
    import torch

    for attribute, word in (("hip", "ROCm"), ("xpu", "XPU")):
        if getattr(torch.version, attribute, None):
            return f"this is a {word} build of torch, for which forks have not been tried"
    return ""


# ---------------------------------------------------------------- the trial

FORKED_WELL: Final = frozenset({"jemalloc_bg_thd"})
"""Threads that do not prevent a fork, because their library has fork handlers: jemalloc's returns
freed memory to the kernel, and in a child the threads that free memory do so themselves (jemalloc's
background_thread.c). pyarrow contains it, and so do pandas and `datasets`.
"""


def trial() -> str:
    """Fork once, check the child, and count threads in this process afterwards: libraries that
    support forks (OpenBLAS) end their threads when a fork begins."""
    device = _open_device()
    if device:
        return f"its import opened {device}"
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, f"{_poisoned()}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    try:
        answer = os.read(reading, 4096).decode() if poll.poll(TRIAL_SECONDS * 1000) else ""
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    lasting = [name for name in processes.thread_names() if name not in FORKED_WELL]
    if not answer:
        return "a trial fork died or hung"
    if poisoned := answer.strip():
        return f"its import initialised {poisoned}"
    if lasting:
        return f"its import leaves threads that outlast a fork ({len(lasting)})"
    return ""


def _poisoned() -> str:
    """The device runtime that torch reports as broken in this fork; empty if none."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ""
    names = ["cuda", "xpu", "mtia"]
    try:
        names.append(torch._C._get_privateuse1_backend_name())
    except AttributeError:
        pass
    for name in names:
        bad = getattr(getattr(torch, name, None), "_is_in_bad_fork", None)
        if bad is not None and bad():
            return f"torch.{name}"
    return ""


def _open_device() -> str:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith(DEVICE_FILES):
            return target
    return ""
