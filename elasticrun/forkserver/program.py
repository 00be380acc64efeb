"""Runs the user's program in a forked child the way the interpreter itself would.

The call comes from an unusual place. The fork server's main module ends with an exception of ours.
The interpreter then calls `sys.excepthook` with no Python frame below, and a SystemExit raised
there ends the process as in any run: atexit, threads, flushing. The hook runs the program. The
interpreter omits the hook's own frame from f_back, tracebacks and `sys._getframe`, because its code
has no RESUME instruction (CPython treats a frame before RESUME as not started). `hides_frames`
tests whether this interpreter does so; otherwise one frame is visible.

If a script cannot be run (missing, not Python, not readable), Python itself reports it: the child
becomes a plain interpreter by exec, before any user code has run.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import opcode
import os
import signal
import sys
import time
import zipimport
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from elasticrun.wire.spawning import CANNOT_LOAD, command
from elasticrun.wire.types import EntryKind, Entrypoint

MAX_CALLSTACK = 256 * 1024
"""Maximum length of a traceback, in characters; Python abbreviates deep recursions."""


def write_error_file(path: str, error: BaseException) -> None:
    """Describe `error` in a new file `path`, in the format of torch's `@record`. An existing file
    (from `@record`) is kept.

    Never raises for a full or missing disk: the exception itself matters more.
    """
    import json
    import traceback

    no_module = is_no_module(error)
    try:
        message = str(error) if no_module else f"{type(error).__name__}: {error}"
    except Exception:  # an exception whose __str__ raises
        message = type(error).__name__
    try:
        lines = [message] if no_module else traceback.format_exception(error)
        extra = {
            "py_callstack": "".join(lines)[-MAX_CALLSTACK:],
            "timestamp": str(int(time.time())),
        }
        if no_module or isinstance(error, ImportError | SyntaxError):
            extra[CANNOT_LOAD] = "true"
        record = {"message": {"message": message, "extraInfo": extra}}
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(record, file)
    except Exception:
        return


def is_no_module(error: BaseException) -> bool:
    """Whether this is runpy's error for a module of `-m` that is not there."""
    runpy: Any = sys.modules.get("runpy")
    return runpy is not None and isinstance(error, runpy._Error)


class BecomeRank(BaseException):
    """Unwinds the server's stack in a forked child, up to the end of its main module."""

    def __init__(self, program: Program) -> None:
        self.program = program


class Program:
    """The user's program, ready to run; created while signals are still blocked."""

    def __init__(
        self, entry: Entrypoint, error_file: str, signals: Iterable[int], excepthook: Any
    ) -> None:
        """`signals`: the signal mask that the program starts with; `excepthook`: a plain
        interpreter's sys.excepthook, which a sitecustomize may have set."""
        self.entry = entry
        self.argv = [entry.target, *entry.args]
        self.error_file = error_file
        self._mask = set(signals)
        self._excepthook = excepthook
        self._call: Callable[[], object] = self._exec_instead
        self._invalid: SyntaxError | None = None

    def prepare(self) -> None:
        """Set argv, path and `__main__`, and compile a script. Runs no user code."""
        sys.argv = list(self.argv)
        sys.orig_argv = command(self.entry)
        if self.entry.kind is EntryKind.MODULE:
            self._prepare_module(self.entry.target, "-m", os.getcwd())
        elif self.entry.kind is EntryKind.RUN_PATH:
            import runpy

            self._call = partial(runpy.run_path, self.entry.target, run_name="__main__")
        elif is_archive(self.entry.target):
            self._prepare_module("__main__", self.entry.target, absolute(self.entry.target))
        else:
            self._prepare_script()

    def _prepare_module(self, name: str, first_word: str, first_path: str) -> None:
        import runpy

        sys.argv[0] = first_word
        if first_word != "-m" or not sys.flags.safe_path:
            sys.path.insert(0, first_path)
        _fresh_main(importlib.machinery.BuiltinImporter)
        run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
        self._call = partial(run, name, first_word == "-m")

    def _prepare_script(self) -> None:
        name = absolute(self.entry.target)
        try:
            with open(self.entry.target, "rb") as file:
                source = file.read()
            code = compile(source, name, "exec", dont_inherit=True)
        except SyntaxError as error:
            self._invalid = error.with_traceback(None)
            return  # the interpreter reports it: _exec_instead
        except (OSError, ValueError, RecursionError, MemoryError, OverflowError):
            return  # the same
        if not sys.flags.safe_path:
            sys.path.insert(0, script_folder(self.entry.target))
        loader = importlib.machinery.SourceFileLoader("__main__", name)
        namespace = _fresh_main(loader, __file__=name, __cached__=None)
        self._call = partial(builtins.exec, code, namespace)

    def _exec_instead(self) -> NoReturn:
        if self._invalid is not None and self.error_file:
            write_error_file(self.error_file, self._invalid)
        os.execv(sys.executable, command(self.entry))

    def hook(self) -> Callable[..., None]:
        """The function to put into sys.excepthook before the server's main module ends."""
        calls, mask, error_file = [self._call], self._mask, self.error_file
        excepthook = self._excepthook
        self._call = self._exec_instead

        def run(*_: object) -> None:
            del _  # the exception that led here, with the server's frames
            _forget_server(excepthook)
            caught = None
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                calls.pop()()  # leaves the only reference to its namespace to the interpreter
            except SystemExit as ended:
                reason = ended.__context__
                if error_file and reason is not None and is_no_module(reason):
                    write_error_file(error_file, reason)
                raise  # the interpreter handles every kind of it
            except BaseException as error:
                caught = error  # handled below, outside this except block
            if caught is None:
                _forget_file()
                raise SystemExit(0)
            _end_with(caught, error_file)

        hidden: Callable[..., None] = _hide(run)
        return hidden


def _forget_server(excepthook: Any) -> None:
    sys.excepthook = excepthook
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)


def _end_with(error: BaseException, error_file: str) -> None:
    """Handle an uncaught exception as the interpreter does, and write the error file."""
    kind, trace = type(error), error.__traceback__
    if not isinstance(error, KeyboardInterrupt) and error_file:
        write_error_file(error_file, error)
    for name, value in (("type", kind), ("value", error), ("traceback", trace), ("exc", error)):
        if name != "exc" or sys.version_info >= (3, 12):
            setattr(sys, f"last_{name}", value)
    hook = getattr(sys, "excepthook", sys.__excepthook__)
    try:
        hook(kind, error, trace)
    except SystemExit:
        raise
    except BaseException as second:
        print("Error in sys.excepthook:", file=sys.stderr)
        below = second.__traceback__
        second.__traceback__ = below.tb_next if below else None  # drop this frame
        sys.__excepthook__(type(second), second, second.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(kind, error, trace)
    _forget_file()
    if kind is not KeyboardInterrupt:
        raise SystemExit(1)
    # After a KeyboardInterrupt in the main program, the interpreter shuts down and then kills
    # itself with SIGINT. It sets a flag for that whenever it runs a program from text, also by
    # exec(); the normal end of the hook then takes that path.
    try:
        builtins.exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        pass


def _forget_file() -> None:
    """Remove `__file__`, as the interpreter does at the end of a script, before atexit and
    threads."""
    namespace = sys.modules["__main__"].__dict__
    if isinstance(namespace.get("__loader__"), importlib.machinery.SourceFileLoader):
        namespace.pop("__file__", None)
        namespace.pop("__cached__", None)


# ---------------------------------------------------------------- hidden frames


def _hide(function: Any) -> Any:
    """Remove RESUME from a function's code, so that its frames are invisible."""
    code = function.__code__
    words = bytearray(code.co_code)
    resume, nop = opcode.opmap["RESUME"], opcode.opmap["NOP"]
    for index in range(0, len(words), 2):
        if words[index] == resume:
            words[index : index + 2] = bytes((nop, 0))
    function.__code__ = code.replace(co_code=bytes(words))
    return function


def hides_frames() -> bool:
    """Whether `_hide` works on this interpreter."""
    depth = _depth()
    return bool(_hide(lambda: _depth())() == depth)


def _depth() -> int:
    frame, depth = sys._getframe(0).f_back, 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


# ---------------------------------------------------------------- what python derives from argv


def absolute(target: str) -> str:
    """`__file__` of a script given as `target`, computed like the interpreter: dots are kept."""
    return os.path.join(os.getcwd(), target)


def is_archive(target: str) -> bool:
    """Whether the interpreter treats `target` as a folder or zip with a `__main__`."""
    if os.path.isdir(target):
        return True
    try:
        zipimport.zipimporter(target)
    except ImportError:
        return False
    return True


def script_folder(target: str) -> str:
    """sys.path[0] for a script: its folder with links resolved."""
    return os.path.dirname(os.path.realpath(target))


def _fresh_main(loader: Any, **more: object) -> dict[str, Any]:
    """A new `__main__`, filled like the interpreter does. The old one's namespace is referenced by
    frames of the server until the process exits, so nothing in it would be finalized."""
    sys.modules["__main__"] = module = ModuleType("__main__")
    namespace = module.__dict__
    namespace["__loader__"] = loader
    if sys.version_info < (3, 14):
        namespace["__annotations__"] = {}
    namespace["__builtins__"] = builtins
    namespace.update(more)
    return namespace
