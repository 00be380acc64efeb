"""What is left to `make soak` has a test of the same rule in `make test`, by name."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
FURTHER = "further"


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _marks(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[ast.Call]:
    return [
        mark
        for mark in node.decorator_list
        if isinstance(mark, ast.Call)
        and isinstance(mark.func, ast.Name)
        and mark.func.id == FURTHER
    ]


def _whole(file: Path) -> list[ast.Call]:
    """The marks of a file as a whole: `pytestmark = further(...)`."""
    if f"pytestmark = {FURTHER}" not in file.read_text(encoding="utf-8"):
        return []
    return [
        call
        for node in _tree(file).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for call in ast.walk(node.value)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == FURTHER
    ]


@cache
def _tests(file: Path) -> dict[str, bool]:
    """Names of a file's tests (a class' too), and whether each is in `make test`."""
    found: dict[str, bool] = {}
    for node in _tree(file).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for one in members:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and "test" in one.name:
                here = not _marks(one) and not _whole(file)
                name = f"{node.name}::{one.name}" if isinstance(node, ast.ClassDef) else one.name
                found[name] = here
                if isinstance(node, ast.ClassDef):
                    found[node.name] = here or found.get(node.name, False)
    return found


def _nodes(file: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Tests and classes of tests of a file in which something is soaked."""
    if FURTHER not in (text := file.read_text(encoding="utf-8")) and "mark.soak" not in text:
        return []
    outer = _tree(file).body
    inner = [one for node in outer if isinstance(node, ast.ClassDef) for one in node.body]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node for node in (*outer, *inner) if isinstance(node, kinds)]


def _covers(word: str, file: Path) -> str:
    """What is wrong with a name that covers something in this file, "" if nothing."""
    place, _, test = word.partition("::") if "/" in word else ("", "", word)
    if place.startswith("core/scripts/"):
        return "" if (TESTS / place).exists() else f"no script {place}"
    other = TESTS / f"{place}.py" if place else file
    if not other.exists():
        return f"no file {place}"
    known = _tests(other)
    if not test:
        return "" if any(known.values()) else f"{place} is soaked as a whole"
    if test not in known:
        return f"no test {word}"
    return "" if known[test] else f"{word} is soaked itself"


def test_what_is_soaked_is_covered() -> None:
    wrong, count = [], 0
    for file in sorted(TESTS.rglob("test_*.py")):
        nodes = _nodes(file)
        for mark in [mark for node in nodes for mark in _marks(node)] + _whole(file):
            count += 1
            words = [ast.literal_eval(word) for word in mark.args]
            assert words or mark.keywords, f"{file}: {ast.unparse(mark)}"
            wrong += [f"{file.relative_to(TESTS)}: {no}" for w in words if (no := _covers(w, file))]
    assert count > 50
    assert not wrong, "\n".join(wrong)


def test_nothing_is_soaked_without_a_word() -> None:
    """A bare mark says not what covers it: `further` does, or what `cases` leaves of a table."""
    bare = [
        f"{file.relative_to(TESTS)}:{mark.lineno}"
        for file in sorted(TESTS.rglob("test_*.py"))
        for node in _nodes(file)
        for mark in node.decorator_list
        if ast.unparse(mark).startswith("pytest.mark.soak")
    ]
    assert not bare, "\n".join(bare)
