"""Whether a fork of this process can be trusted to be like a fresh interpreter.

Every function answers with a sentence that says why not, or with an empty string. Counting threads
alone does not see a poisoned CUDA, so one trial child is forked and asked.
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
"""Variables by which tools attach to a process that is exec'd; NVIDIA says that nsys does not
trace a fork without exec unless it is told to."""

INJECTED_LIBRARIES = ("ToolsInjection", "TreeLauncher", "rocprof", "roctracer", "libnsys")
"""Parts of file names in LD_PRELOAD that mean the same."""

INTERPRETER: Mapping[str, str] = {
    "PYTHONINSPECT": "and an interpreter that is to be inspected at its end does not end a fork",
    "PYTHONPROFILEIMPORTTIME": "and a fork has imported most of it already",
    "PYTHONVERBOSE": "and a fork has imported most of it already",
}
"""Settings of the interpreter that a fork cannot follow."""

TESTED_BACKENDS: frozenset[str] = frozenset()
"""Entry points of the group torch.backends whose import has been seen to leave a fork sound."""

DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/davinci", "/dev/accel", "/dev/hl")

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

TRIAL_SECONDS = 20.0
"""A trial child that has not answered by then hangs, as its siblings would."""

MAX_SCRIPT = 4 * 1024 * 1024
"""Bytes of a script that are looked through; a longer one is data, not a first line."""


def before_import(entry: Entrypoint, numa: bool, environ: Mapping[str, str]) -> str:
    """The first reason that is known before anything is imported."""
    return next(filter(None, _known_before(entry, numa, environ)), "")


def _known_before(entry: Entrypoint, numa: bool, environ: Mapping[str, str]) -> Iterator[str]:
    """Reasons, "" where there is none; to look into the script comes last, for it takes longest."""
    follows = "and may not follow a fork"
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
        # `import torch` looks for entry points in each archive on sys.path (importlib.metadata)
        yield f"{path} is an archive, which the import of torch reads"
    yield sets_too_late(entry, read_by_c, environ)


def placement(environ: Mapping[str, str]) -> str:
    """With cores bound per rank: libgomp fixes its places when it is loaded, in the server."""
    for name in PLACEMENT_VARIABLES:
        if environ.get(name):
            return f"{name} is set, and a fork bound to its cores would get the places of others"
    if not environ.get(OMP_NUM_THREADS):
        return f"ranks are bound to cores, and without {OMP_NUM_THREADS} torch counts those it has"
    return ""


# ---------------------------------------------------------------- the script


def sets_too_late(
    entry: Entrypoint, counts: Callable[[str], bool], environ: Mapping[str, str]
) -> str:
    """A variable that counts and that the program's own text sets, above its import of torch, to
    another value than it has. A rank would find out for itself (`child.FreshStart`), but its first
    lines would have run by then."""
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
    """The line of the first import of torch or numpy outside of functions."""
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
"""The value of a variable that is set to something that only running the program tells."""


def _set_in(tree: ast.Module, until: float) -> Iterator[tuple[str, str | None]]:
    """Variables that a text sets above a line, and to what: None where it removes them."""

    def said(node: ast.expr | None) -> str:
        value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
        return value if isinstance(value, str) else _ANY

    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) >= until:
            continue
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from ((n, said(value)) for each in targets for n in _keys(each))
            case ast.AugAssign(target=target):
                yield from ((name, _ANY) for name in _keys(target))
            case ast.Delete(targets=targets):
                yield from ((name, None) for each in targets for name in _keys(each))
            case ast.Call(func=ast.Attribute(attr=what), args=args, keywords=keywords):
                first = said(args[0]) if args else _ANY
                if what in ("putenv", "pop", "unsetenv"):
                    is_set = what == "putenv" and len(args) > 1
                    yield first, said(args[1]) if is_set else None
                elif what == "setdefault" and first not in os.environ:
                    yield first, said(args[1] if len(args) > 1 else None)
                elif what == "update":
                    yield from ((each.arg, said(each.value)) for each in keywords if each.arg)
                    if args and isinstance(args[0], ast.Dict):
                        pairs = zip(args[0].keys, args[0].values, strict=True)
                        yield from ((said(key), said(value)) for key, value in pairs)


def _keys(target: ast.expr) -> Iterator[str]:
    """The text between the brackets of `environ["NAME"]`."""
    match target:
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            yield name


def _file_of(entry: Entrypoint) -> str:
    """The program's file; empty where there is none."""
    if entry.kind in (EntryKind.COMMAND, EntryKind.FUNCTION):
        return ""
    return _module_file(entry.target) if entry.kind is EntryKind.MODULE else entry.target


def _module_file(name: str) -> str:
    """The file that `-m name` would run, found without importing its packages; or empty."""
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
    """A file of the user's that an interpreter of its own would import by one of `names`, which
    the server has imported from elsewhere. It may lie where only a script's path begins, or in
    PYTHONPATH, where the server has found another one first."""
    first = _first_on_path(entry)
    path = [*first, *sys.path]
    for folder in dict.fromkeys([*first, *environ.get("PYTHONPATH", "").split(os.pathsep)]):
        known = folder in sys.path_importer_cache
        for name in sorted(_names_in(folder, names)):
            file = _would_be_imported(name, path)
            if file and not _is_loaded(name, file):
                where = "standard" if name in sys.stdlib_module_names else "installed"
                return f"{file} stands in front of the {where} {name}"
        if not known:  # a rank looks for itself, and may have written files since
            sys.path_importer_cache.pop(folder, None)
    return ""


def _first_on_path(entry: Entrypoint) -> list[str]:
    """What an interpreter puts in front of sys.path for this program."""
    if entry.kind is EntryKind.SCRIPT and is_archive(entry.target):
        return [absolute(entry.target)]
    if sys.flags.safe_path:
        return []
    if entry.kind is EntryKind.SCRIPT:
        return [script_folder(entry.target)]
    return [os.getcwd()] if entry.kind is EntryKind.MODULE else []


def _names_in(folder: str, names: Collection[str]) -> Collection[str]:
    """Those of `names` that files of the folder have; all of them for an archive."""
    try:
        return {name.partition(".")[0] for name in os.listdir(folder or ".")}.intersection(names)
    except NotADirectoryError:
        return names
    except OSError:
        return ()


def _would_be_imported(name: str, path: list[str]) -> str:
    """The file or folder that `name` is found at; empty where the path is not asked."""
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
    """Whether this is what the server has imported: a script that lies beside a package which is
    installed from there."""
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
"""Lines of `.pth` files, as patterns, that do the same in every process: of setuptools, virtualenv,
editable installs and namespace packages. Those of an installation's own modules are not asked
which rank they run in, since they only find files."""

INERT_UNLESS: Final[Mapping[str, tuple[str, ...]]] = {
    r"import (sys; exec\(.*)?coverage.*process_startup\(.*": (
        "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"
    ),
    r"import os, ?sys; ?exec\(.*COV_CORE_SOURCE.*": ("COV_CORE_SOURCE",),
}  # fmt: skip
"""Such lines that do nothing unless one of these variables is set."""

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
    """Code of the installation or the user that the interpreter has run at the server's start and
    would run in each rank: with its RANK, of which the server has none."""
    for name in ("sitecustomize", "usercustomize"):
        module = sys.modules.get(name)
        path = getattr(module, "__file__", None)
        if module is not None and not _is_inert_module(path):
            return f"{path or name} runs at each start of Python, and is to see each rank"
    for folder in _site_folders():
        try:
            names = sorted(n for n in os.listdir(folder) if n.endswith(".pth") and n[0] != ".")
        except OSError:
            continue
        for name in names:
            path = os.path.join(folder, name)
            if any(not _is_inert(line, environ) for line in _code_lines(path)):
                return f"{path} runs code at each start of Python, which is to see each rank"
    return ""


def _is_inert_module(path: str | None) -> bool:
    """Whether a file has no code but Debian's."""
    try:
        with open(path or "", "rb") as file:
            tree = ast.parse(file.read(MAX_SCRIPT))
    except (OSError, ValueError, SyntaxError):
        return False
    body = [s for s in tree.body if not isinstance(getattr(s, "value", None), ast.Constant)]
    return not body or [ast.dump(s) for s in body] == [ast.dump(s) for s in ast.parse(APPORT).body]


def _site_folders() -> list[str]:
    """Those in which the interpreter has looked for `.pth` files."""
    folders = list(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [folder for folder in dict.fromkeys(folders) if folder in sys.path]


def _code_lines(path: str) -> list[str]:
    """The lines that the interpreter has executed."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            return [line.strip() for line in file if line.startswith(("import ", "import\t"))]
    except OSError:
        return []


def _is_inert(line: str, environ: Mapping[str, str]) -> bool:
    if any(re.fullmatch(pattern, line) for pattern in INERT):
        return True
    return any(
        re.fullmatch(pattern, line) and not any(environ.get(name) for name in names)
        for pattern, names in INERT_UNLESS.items()
    )


# ---------------------------------------------------------------- backends and builds


def untested_backend(environ: Mapping[str, str]) -> str:
    """A plug-in that `import torch` would load, and that might open a device."""
    if environ.get(AUTOLOAD) == "0":
        return ""
    from importlib.metadata import entry_points

    for point in entry_points(group="torch.backends"):
        if point.name not in TESTED_BACKENDS:
            return f"the torch backend {point.name!r} may open a device while torch is imported"
    return ""


def build_reason() -> str:
    """Builds of torch that have not been tried on their hardware."""
    import torch

    for attribute, word in (("hip", "ROCm"), ("xpu", "XPU")):
        if getattr(torch.version, attribute, None):
            return f"this is a {word} build of torch, for which forks have not been tried"
    return ""


# ---------------------------------------------------------------- the trial

FORKED_WELL: Final = frozenset({"jemalloc_bg_thd"})
"""Threads that do not stop a fork, since their library has fork handlers for them: jemalloc's gives
freed memory back to the kernel, and in a child the threads that free it do so themselves (its
background_thread.c). pyarrow has it, and with that pandas and `datasets`."""


def trial() -> str:
    """Fork once, look around in the child, and count threads here afterwards: libraries that can
    be forked (OpenBLAS) end their threads when a fork begins."""
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
    """The device runtime that torch knows to be broken in this fork."""
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
