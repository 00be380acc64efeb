"""Every way of a script to end, by exec and by fork: the same code and the same output."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.agent.workers.exits import read_error_file
from elasticrun.wire.spawning import Stale
from elasticrun.wire.types import EntryKind, Entrypoint
from tests.forkserver.driver import LIMIT, Driver, plain_environment
from tests.forkserver.endings import OUTCOMES, RECURSION, TORCH_OUTCOMES
from tests.further import cases

pytestmark = pytest.mark.slow

Outcome = tuple[int, str, str]


def by_exec(words: list[str], place: Path) -> Outcome:
    with (place / "exec.out").open("wb") as out, (place / "exec.err").open("wb") as err:
        done = subprocess.run(
            [sys.executable, "-u", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=plain_environment(),
            start_new_session=True,
            timeout=LIMIT,
        )
    return done.returncode, *_texts(place, "exec")


def by_fork(server: Driver, entry: Entrypoint, place: Path, error_file: str = "") -> Outcome:
    stdout, stderr = str(place / "fork.out"), str(place / "fork.err")
    key = server.start(entry, stdout=stdout, stderr=stderr, error_file=error_file)
    assert server.spawned(key).forked, server.all_of(Stale)
    code = server.exited(key).code
    return code, *_texts(place, "fork")


def _texts(place: Path, way: str) -> tuple[str, str]:
    out, err = ((place / f"{way}.{end}").read_text("utf-8", "replace") for end in ("out", "err"))
    return re.sub(r"0x[0-9a-f]{8,}", "ADDRESS", out), re.sub(r"0x[0-9a-f]{8,}", "ADDRESS", err)


ALIKE = (
    *("exception with a cause", "exception in the context of another", "exception group"),
    *("exception with a note", "exit none", "exit true", "exit 256", "exit class", "exit object"),
    *("interrupt after exec of text", "atexit order", "atexit and __file__ after exit"),
    *("atexit and __file__ after an exception", "excepthook that exits", "warning from C"),
    *("indentation", "null byte", "annotations", "coding", "asyncio interrupt"),
)
"""Soaked: each has a neighbour in the table that ends on the same way."""


@pytest.mark.parametrize("name", cases(OUTCOMES, soaked=ALIKE))
def test_outcome(server: Driver, tmp_path: Path, name: str) -> None:
    _compare(server, tmp_path, OUTCOMES[name])


def test_recursion_limit_differs_on_purpose(server: Driver, tmp_path: Path) -> None:
    """What calls the script counts as two levels of the interpreter's 1000; the script has them
    less. `sys.getrecursionlimit()` is the same."""
    path = tmp_path / "script.py"
    path.write_text(RECURSION)
    by_python = int(by_exec([str(path)], tmp_path)[1])
    forked = int(by_fork(server, Entrypoint(EntryKind.SCRIPT, str(path)), tmp_path)[1])
    assert by_python - 2 <= forked <= by_python


KEPT = ["record", "objects alive at the end"]


@pytest.mark.parametrize("name", cases(TORCH_OUTCOMES, kept=KEPT))
def test_outcome_with_torch(server: Driver, tmp_path: Path, name: str) -> None:
    _compare(server, tmp_path, TORCH_OUTCOMES[name])


def _compare(server: Driver, place: Path, text: str) -> None:
    path = place / "script.py"
    path.write_bytes(text.encode())
    expected, error = by_exec([str(path)], place), place / "error.json"
    entry = Entrypoint(EntryKind.SCRIPT, str(path))
    assert by_fork(server, entry, place, str(error)) == expected
    if text == OUTCOMES["syntax error"]:
        found = read_error_file(str(error))
        assert found.message == "SyntaxError: invalid syntax (script.py, line 1)"
        assert found.traceback == expected[2].rstrip()
        assert found.cannot_load


UNRUNNABLE = {
    "missing": lambda place: None,
    "folder without __main__": lambda place: (place / "script.py").mkdir(),
    "no text": lambda place: (place / "script.py").write_bytes(b"\x7fELF\xff\xfe"),
    "not utf-8": lambda place: (place / "script.py").write_bytes(b"x = '\xff'\n"),
    "unknown coding": lambda place: (place / "script.py").write_bytes(b"# coding: none-such\n"),
    "zip that is none": lambda place: (place / "script.zip").write_bytes(b"no zip"),
}


@pytest.mark.parametrize("name", UNRUNNABLE)
def test_what_python_says_of_no_script(server: Driver, tmp_path: Path, name: str) -> None:
    UNRUNNABLE[name](tmp_path)
    target = str(tmp_path / ("script.zip" if "zip" in name else "script.py"))
    expected = by_exec([target], tmp_path)
    assert expected[0] != 0
    assert by_fork(server, Entrypoint(EntryKind.SCRIPT, target), tmp_path) == expected


MODULES = {
    "relative import": ("from .other import x\nprint(x, __name__, __package__)\n", "pack.run"),
    "exception": ("def f():\n    1 / 0\n\n\nf()\n", "pack.run"),
    "package": ("", "pack"),
    "no such module": ("", "pack.nothing"),
    "no such package": ("", "nothing.at.all"),
    "exit 3": ("import sys\nprint(sys.argv[0])\nsys.exit(3)\n", "pack.run"),
    "syntax error": ("def f(:\n", "pack.run"),
    "depth": ("import traceback\ntraceback.print_stack()\n", "pack.run"),
}


@pytest.fixture(scope="module")
def placed(tmp_path_factory) -> Iterator[tuple[Driver, Path]]:
    """A fork server that was started in a folder, for what is named from there; and the folder."""
    place = tmp_path_factory.mktemp("placed")
    with contextlib.ExitStack() as stack:
        with contextlib.chdir(place):
            nothing = Entrypoint(EntryKind.SCRIPT, "none.py")
            driver = stack.enter_context(Driver(nothing, env=plain_environment()))
            assert driver.ready().mode == "fork"
        yield driver, place


@pytest.mark.parametrize("name", MODULES)
def test_module(placed: tuple[Driver, Path], tmp_path: Path, monkeypatch, name: str) -> None:
    driver, place = placed
    text, module = MODULES[name]
    package = place / f"pack{[*MODULES].index(name)}"
    package.mkdir()
    (package / "__init__.py").write_text("print('package')\n")
    (package / "other.py").write_text("x = 5\n")
    (package / "run.py").write_text(text)
    if name == "package":
        (package / "__main__.py").write_text("print('main', __spec__.name)\n")
    monkeypatch.chdir(place)
    module = module.replace("pack", package.name)
    expected, error = by_exec(["-m", module], tmp_path), tmp_path / "error.json"
    forked = by_fork(driver, Entrypoint(EntryKind.MODULE, module), tmp_path, str(error))
    assert forked == expected
    assert error.exists() == (expected[0] == 1), expected
    found = read_error_file(str(error))
    assert found.traceback in expected[2]
    assert found.cannot_load == (name in ("no such module", "no such package", "syntax error"))
    if name == "no such module":
        assert found.message == f"No module named {module}"


@pytest.mark.parametrize("target", ["script.py", "./script.py", "sub/../script.py", "link.py"])
def test_script_given_by_a_relative_path(
    placed: tuple[Driver, Path], tmp_path: Path, monkeypatch, target: str
) -> None:
    driver, place = placed
    (place / "sub").mkdir(exist_ok=True)
    (place / "script.py").write_text(
        "import sys\nprint(__file__, sys.argv, sys.path[0])\ndef f():\n    1 / 0\nf()\n"
    )
    if target == "link.py":
        (place / "link.py").symlink_to("sub/../script.py")
    monkeypatch.chdir(place)
    expected = by_exec([target, "a b", "ä"], tmp_path)
    entry = Entrypoint(EntryKind.SCRIPT, target, ("a b", "ä"))
    assert by_fork(driver, entry, tmp_path) == expected


def test_a_compiled_script_is_execed(tmp_path: Path) -> None:
    import py_compile

    (tmp_path / "s.py").write_text("print('compiled')\n")
    compiled = py_compile.compile(str(tmp_path / "s.py"), str(tmp_path / "s.pyc"))
    assert compiled is not None
    entry = Entrypoint(EntryKind.SCRIPT, compiled)
    with Driver(entry, env=plain_environment()) as driver:
        ready = driver.ready()
        assert ready.mode == "exec"
        assert "compiled" in ready.reason
        key = driver.start(entry, stdout=str(tmp_path / "out"))
        assert not driver.spawned(key).forked
        assert driver.exited(key).code == 0
    assert (tmp_path / "out").read_text() == "compiled\n"


def test_a_script_leaves_no_pycache(server: Driver, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("print(1)\n")
    assert (
        server.run(Entrypoint(EntryKind.SCRIPT, str(tmp_path / "s.py")), stdout="/dev/null").code
        == 0
    )
    assert [p.name for p in tmp_path.iterdir()] == ["s.py"]
