"""Sizes and habits of the house; each exception is listed with its answer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    p for p in (ROOT / "elasticrun").rglob("*.py") if "pb" not in p.relative_to(ROOT).parts
)
SIMULATOR = sorted((ROOT / "tests/simulator").glob("*.py"))
GPU_CHECK = sorted((ROOT / "benchmarks/gpu").glob("*.py"))
MAX_FILE = 700
MAX_FUNCTION = 60

LONG_FILES = {
    "elasticrun/wire/messages.py": "every report, order and page of the Attend stream",
    "elasticrun/core/reasons.py": "every reason, and beside it its sentence",
}
LONG_FUNCTIONS = {
    "elasticrun/training/checkpointing/checkpointer.py:__init__": "options and their checks",
}
LOCKS = {
    "elasticrun/agent/logs/output.py": "hurry and close may be two threads",
    "elasticrun/agent/logs/console.py": "a bounded queue between two threads, not the loop",
    "elasticrun/host/log.py": "the same, for the agent's own lines",
    "elasticrun/forkserver/lazy_imports.py": "threads of a script import when they like",
}

PICKLES = ("elasticrun/snapshots/dcp/loading.py",)
"""Reads torch's own marker of a checkpoint, with nothing but the classes that it has."""


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_a_file_fits_into_one_head() -> None:
    wrong = []
    for path in SOURCES + SIMULATOR + GPU_CHECK:
        name = str(path.relative_to(ROOT))
        if name in LONG_FILES and _lines(path) <= MAX_FILE:
            wrong.append(f"{name} is short again: take it off the list")
        if name not in LONG_FILES and _lines(path) > MAX_FILE:
            wrong.append(f"{name} has {_lines(path)} lines: say why")
    assert not wrong, "\n".join(wrong)


def test_a_function_fits_on_a_screen() -> None:
    wrong = []
    for path in SOURCES + SIMULATOR + GPU_CHECK:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                name = f"{path.relative_to(ROOT)}:{node.name}"
                if length > MAX_FUNCTION and name not in LONG_FUNCTIONS:
                    wrong.append(f"{name}: {length} lines")
    assert not wrong, "\n".join(wrong)


def test_every_room_has_a_door_sign() -> None:
    wrong = []
    for init in (ROOT / "elasticrun").rglob("__init__.py"):
        if init.parent.name == "pb":
            continue
        doc = ast.get_docstring(ast.parse(init.read_text()))
        if not doc:
            wrong.append(f"{init} does not say what the room is for")
        elif init.parent != ROOT / "elasticrun" and "orbidden" not in doc:
            wrong.append(f"{init} does not say what is forbidden there")
    assert not wrong, "\n".join(wrong)


def test_no_lock_no_pickle_no_fixed_tmp_path() -> None:
    """A state has one owner, so nothing needs a lock. Unpickling runs what the other side sent, so
    only elastic_launch's caller and its own children do it. Two jobs would share a fixed path."""
    wrong = []
    for path in SOURCES:
        text = path.read_text()
        locked = re.search(r"\b(R?Lock|Semaphore|Condition)\(", text) is not None
        if locked != (str(path.relative_to(ROOT)) in LOCKS):
            wrong.append(f"a lock in {path}" if locked else f"no lock in {path} any more")
        may = "functions" in path.parts or str(path.relative_to(ROOT)) in PICKLES
        if not may and re.search(r"^\s*(import|from) pickle", text, re.M):
            wrong.append(f"pickle in {path}")
        if '"/tmp' in text:
            wrong.append(f"a fixed path in {path}")
    assert not wrong, "\n".join(wrong)


def test_the_simulator_has_the_brains_and_nothing_real() -> None:
    """It is no part of the package, so that no import contract sees it. Other tests are not its."""
    ours = r"elasticrun\.(core|master\.trace\.words|wire\.types|wire\.messages|config)\b"
    may = re.compile(rf"{ours}|tests\.simulator\b|msgspec\b")
    standard = {"__future__", "collections", "dataclasses", "difflib", "functools", "heapq"}
    standard |= {"itertools", "pathlib", "random", "sys", "typing"}
    wrong = []
    for path in SIMULATOR:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
            strange = [n for n in names if n.split(".")[0] not in standard and not may.match(n)]
            wrong += [f"{path.name} imports {name}" for name in strange]
    assert SIMULATOR
    assert not wrong, "\n".join(wrong)


def _is_sleep(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    yields = bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
    return node.func.attr == "sleep" and not yields


def test_no_test_sleeps() -> None:
    """Tests wait for events. Programs that tests run (strings, tests/scripts, two files elsewhere)
    may idle."""
    programs = [ROOT / "tests/api/functions.py", ROOT / "tests/snapshots/train.py"]
    wrong = []
    for path in (ROOT / "tests").rglob("*.py"):
        if "scripts" in path.parts or path in programs:
            continue
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "sleep" in text else ():
            if _is_sleep(node):
                line = text.splitlines()[node.lineno - 1]
                if "# the moment is what is tested" not in line:
                    wrong.append(f"{path}:{node.lineno} sleeps")
    assert not wrong, "\n".join(wrong)
