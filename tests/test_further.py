"""What is left to `make soak` has a test of the same rule in `make test`, by name."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent


@cache
def contents(file: Path) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The tests of a file by their names."""
    found = ast.parse(file.read_text(encoding="utf-8")).body
    functions = [one for one in found if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {one.name: one for one in functions if one.name.startswith("test")}


def marks(test: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.Call]:
    """Those that leave a test to `make soak`."""
    calls = [mark for mark in test.decorator_list if isinstance(mark, ast.Call)]
    return [mark for mark in calls if ast.unparse(mark.func) == "further"]


def soaked_files() -> list[Path]:
    """Files in which something is soaked."""
    files = sorted(TESTS.rglob("test_*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    return [file for file, text in texts.items() if "further" in text or "mark.soak" in text]


def lack(word: str, file: Path) -> str:
    """What is wrong with a name that covers something in this file, "" if nothing."""
    place, _, test = word.partition("::") if "/" in word else ("", "", word)
    if place.startswith("core/scripts/"):
        return "" if (TESTS / place).exists() else f"no script {place}"
    other = TESTS / f"{place}.py" if place else file
    if not other.exists():
        return f"no file {place}"
    known = contents(other)
    if not test:
        return f"{place} is soaked as a whole" if all(map(marks, known.values())) else ""
    if test not in known:
        return f"no test {word}"
    return f"{word} is soaked itself" if marks(known[test]) else ""


def test_what_is_soaked_is_covered() -> None:
    wrong, count = [], 0
    for file in soaked_files():
        for mark in [mark for test in contents(file).values() for mark in marks(test)]:
            count += 1
            words = [ast.literal_eval(word) for word in mark.args]
            assert words or mark.keywords, f"{file}: {ast.unparse(mark)}"
            wrong += [f"{file.relative_to(TESTS)}: {no}" for w in words if (no := lack(w, file))]
    assert count > 20
    assert not wrong, "\n".join(wrong)


def test_nothing_is_soaked_without_a_word() -> None:
    """A bare mark says not what covers it: `further` does, or what `cases` leaves of a table."""
    bare = [
        f"{file.relative_to(TESTS)}:{mark.lineno}"
        for file in soaked_files()
        for test in contents(file).values()
        for mark in test.decorator_list
        if ast.unparse(mark).startswith("pytest.mark.soak")
    ]
    assert not bare, "\n".join(bare)
