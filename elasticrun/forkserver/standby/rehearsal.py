"""In a standby: what happens before the script's first line.

System calls show the tracer everything that a script does except a read of the clock, which needs
none. So the interpreter's own clock functions are hooked: each call looks at its caller, and stops
at the tracer if the script wants to know the time. A read by an installed package that is being
imported passes. The hooks are pointers in the interpreter's tables of functions. The tracer writes
the original ones back when the standby becomes a rank, so functions and modules are never replaced.

torch's TCPStore computes the deadline of its connection from the clock, and then connects. A
standby that parked at that system call would find the deadline passed when it becomes a rank. So
it parks before a TCPStore is made.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any, Final

from elasticrun.forkserver.standby.rules import MARK, Mark

_HEAD: Final = object.__basicsize__
_IN_FUNCTION: Final = _HEAD
"""Where a built-in function has the address of its entry in the table (PyCFunctionObject)."""
_IN_METHOD: Final = _HEAD + 3 * ctypes.sizeof(ctypes.c_void_p)
"""The same for a method of a built-in class (PyMethodDescrObject)."""

_POINTER: Final = ctypes.sizeof(ctypes.c_void_p)
_NEW: Final = _HEAD + 37 * _POINTER
"""Where a class has the function that makes its objects (PyTypeObject.tp_new)."""

_CLOCKS: Final = (
    *("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"),
    *("clock_gettime", "clock_gettime_ns", "localtime", "gmtime", "strftime", "ctime", "asctime"),
)

_FUNCTION: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, *[ctypes.c_void_p] * 4)
"""A function of such a table; those with fewer arguments ignore the others."""

MAIN: Final = "the script"

_OURS: Final = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))

_STANDARD: Final = [f"/{each}" for each in ("tmp", "var/tmp", "usr/tmp")]

_libc = ctypes.CDLL(None, use_errno=True)
_kept: list[object] = []
"""What must not be freed while the standby may still use it."""


def begin(installed: Collection[str], classes: Collection[type], store: type | None) -> None:
    """Tell the tracer that the script starts. `installed`: folders of installed packages;
    `classes`: `datetime` and `date`; `store`: TCPStore."""
    functions: list[tuple[Any, int, Mark]] = [
        (getattr(time, name), _IN_FUNCTION, Mark.CLOCK) for name in _CLOCKS
    ]
    functions.append((os.getloadavg, _IN_FUNCTION, Mark.LOAD))
    functions += [
        (vars(each)[name], _IN_METHOD, Mark.CLOCK)
        for each in classes
        for name in ("now", "utcnow", "today")
        if name in vars(each)
    ]
    places = [*installed, *sys.path, os.path.dirname(os.__file__)]
    known = {*map(os.path.realpath, places[: len(installed)]), *places[-1:], _OURS}
    folders = tuple(os.path.join(p, "") for p in {*known, *places} if os.path.realpath(p) in known)
    hooks = [_hook(*function, folders) for function in functions]
    if store is not None:
        hooks.append(_hook_new(store))
    told = json.dumps({"hooks": hooks, "path": sys.path, "temporary": _temporary()}).encode()
    _kept.append(told)
    _mark(Mark.READY, told, len(told))


def _temporary() -> list[str]:
    """The folders that `tempfile` may choose."""
    names = map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))
    return [each for each in (*names, *_STANDARD) if each]


def _mark(what: Mark, *arguments: Any) -> None:
    """Stop at the tracer; without one the kernel knows no such call."""
    _libc.syscall(ctypes.c_long(MARK), ctypes.c_long(what.value), *arguments)


def _hook(function: Any, offset: int, what: Mark, folders: tuple[str, ...]) -> tuple[int, int]:
    """Hook a function; returns the address of its pointer, and the original one."""
    row = ctypes.c_void_p.from_address(id(function) + offset).value or 0
    name = ctypes.c_char_p.from_address(row).value
    if name != function.__name__.encode():
        raise NotImplementedError("this interpreter has other tables of functions")

    def before() -> None:
        if is_for_script(_callers(sys._getframe(2)), folders):
            _mark(what)

    return _call_first(row + _POINTER, before)


def _hook_new(cls: type) -> tuple[int, int]:
    """Hook how objects of a class of pybind11 are made. Its `__init__` may raise, which a hook
    cannot pass on; this cannot."""
    ours, base = (ctypes.c_void_p.from_address(id(each) + _NEW).value for each in cls.__mro__[:2])
    if not ours or ours != base:
        raise NotImplementedError("this interpreter has other classes")
    return _call_first(id(cls) + _NEW, lambda: _mark(Mark.STORE))


def _call_first(address: int, before: Callable[[], None]) -> tuple[int, int]:
    """Let the function whose pointer is at `address` call `before` first; returns the address, and
    the original pointer."""
    pointer = ctypes.c_void_p.from_address(address)
    original = pointer.value or 0
    call: Callable[..., int | None] = _FUNCTION(original)

    def hooked(*arguments: int | None) -> int | None:
        before()
        return call(*arguments)

    hook = _FUNCTION(hooked)
    _kept.append(hook)
    pointer.value = ctypes.cast(hook, ctypes.c_void_p).value
    return address, original


def _callers(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """File and name of the code of this frame and each one below it, innermost first. `__main__` is
    the script, wherever it is."""
    while frame is not None:
        is_main = frame.f_globals.get("__name__") == "__main__"
        yield MAIN if is_main else frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back


def is_for_script(callers: Iterator[tuple[str, str]], folders: tuple[str, ...]) -> bool:
    """Whether the script wants to know, itself or through a function of an installed package, and
    no installed package is being imported."""
    for file, name in callers:
        if file.startswith("<"):  # frozen modules, code made from text
            continue
        if not file.startswith(folders):
            return True
        if name == "<module>":
            return False
    return True  # a thread that the script, or a package, has started
