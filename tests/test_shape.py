"""Sizes and habits of the house; each exception is listed with its answer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    p for p in (ROOT / "elasticrun").rglob("*.py") if "pb" not in p.relative_to(ROOT).parts
)
MAX_FILE = 700
MAX_FUNCTION = 60

LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS = {
    "elasticrun/checkpointing/checkpointer.py:__init__": "options, a sentence for each, checks",
}
LOCKS = {
    "elasticrun/agent/logs.py": "hurry and close may be two threads",
    "elasticrun/agent/console.py": "a bounded queue between two threads, neither of them the loop",
    "elasticrun/operator_log.py": "the same, for the agent's own lines",
}

PICKLES = ("elasticrun/dcp/loading.py",)
"""Reads torch's own marker of a checkpoint, with nothing but the classes that it has."""


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_a_file_fits_into_one_head() -> None:
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        if name in LONG_FILES:
            assert _lines(path) > MAX_FILE, f"{name} is short again: take it off the list"
        else:
            assert _lines(path) <= MAX_FILE, f"{name} has {_lines(path)} lines: say why"


def test_a_function_fits_on_a_screen() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                name = f"{path.relative_to(ROOT)}:{node.name}"
                assert length <= MAX_FUNCTION or name in LONG_FUNCTIONS, f"{name}: {length} lines"


def test_every_room_has_a_door_sign() -> None:
    for init in (ROOT / "elasticrun").rglob("__init__.py"):
        if init.parent.name == "pb":
            continue
        doc = ast.get_docstring(ast.parse(init.read_text()))
        assert doc, f"{init} does not say what the room is for"
        if init.parent != ROOT / "elasticrun":
            assert "orbidden" in doc, f"{init} does not say what is forbidden there"


def test_no_lock_no_pickle_no_fixed_tmp_path() -> None:
    """Laws 4, 6 and 9. elastic_launch's own children are law 6's one exception."""
    for path in SOURCES:
        text = path.read_text()
        locked = re.search(r"\b(R?Lock|Semaphore|Condition)\(", text) is not None
        assert locked == (str(path.relative_to(ROOT)) in LOCKS), f"a lock in {path}"
        if "caller" not in path.parts and str(path.relative_to(ROOT)) not in PICKLES:
            assert not re.search(r"^\s*(import|from) pickle", text, re.M), f"pickle in {path}"
        assert '"/tmp' not in text, f"a fixed path in {path}"


def _is_sleep(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    yields = bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
    return node.func.attr == "sleep" and not yields


def test_no_test_sleeps() -> None:
    """Tests wait for events. Programs that tests run (strings, tests/scripts) may idle."""
    for path in (ROOT / "tests").rglob("*.py"):
        if "scripts" in path.parts or path.name == "functions.py":
            continue
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if _is_sleep(node):
                line = text.splitlines()[node.lineno - 1]
                assert "# the moment is what is tested" in line, f"{path}:{node.lineno} sleeps"
