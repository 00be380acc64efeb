"""Tests name what they need beyond what `make check` installs (`tests/needs.py`), so that they are
skipped with the reason where it is missing."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parent
INSIDE_JOBS = ("scripts", "packages")
"""Folders of files that only jobs import. The tests that start these jobs name the needs."""

EVERYWHERE = ("bash", "cat", "make", "nohup", "sh", "sleep", "true")
"""Programs of each machine that runs `make check`."""

STARTING = ("run", "check_output", "check_call", "Popen", "command", "create_subprocess_exec")
NAMING = ("program", "packages", "importorskip")
OWN = ("elasticrun", "tests", "benchmarks")


def word(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def programs(call: ast.Call) -> Iterator[str]:
    """The program that this call starts, if it is a literal: `run(["git", ...])`."""
    for first in call.args[:1]:
        literal = first.elts[0] if isinstance(first, ast.List | ast.Tuple) and first.elts else first
        name = word(literal)
        if (literal is not first or called(call) == STARTING[-1]) and not name.startswith("-"):
            yield Path(name).name


def called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [] if node.level else [node.module or ""]
    return [one.name for one in node.names] if isinstance(node, ast.Import) else []


def needs_of(source: str) -> tuple[set[str], set[str], set[str]]:
    """Programs that are started, packages that are imported, and what is named as a need."""
    started: set[str] = set()
    imported: set[str] = set()
    named: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        imported.update(name.partition(".")[0] for name in imports(node))
        if isinstance(node, ast.Call) and called(node) in STARTING:
            started.update(programs(node))
        if isinstance(node, ast.Call) and called(node) in NAMING:
            named.update(word(one).partition(".")[0] for one in node.args)
    return started - {""}, imported, named


def with_dependencies(*names: str) -> set[str]:
    """These distributions and what they require, as far as they are installed."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", waiting.pop())[0]).lower()
        if name in found:
            continue
        found.add(name)
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        waiting += [one for one in required if "extra ==" not in one]
    return found


def test_each_need_of_a_test_is_named() -> None:
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    installed = with_dependencies(
        *project["dependencies"], *project["optional-dependencies"]["dev"]
    )
    owners = metadata.packages_distributions()
    needed: dict[str, dict[str, Path]] = defaultdict(dict)
    named: dict[str, set[str]] = defaultdict(set)
    for path in TESTS.rglob("*.py"):
        place = path.relative_to(TESTS)
        if set(place.parts) & {*INSIDE_JOBS}:
            continue
        started, imported, names = needs_of(path.read_text(encoding="utf-8"))
        for name in imported - sys.stdlib_module_names - {*OWN}:
            owner = {re.sub(r"[-_.]+", "-", one).lower() for one in owners.get(name, ())}
            if not owner & installed:
                needed[place.parts[0]][name] = place
        needed[place.parts[0]] |= dict.fromkeys(started - {*EVERYWHERE}, place)
        named[place.parts[0]] |= names
    missing = [
        f"{place}: nothing in tests/{room} names {name} as a need"
        for room, found in needed.items()
        for name, place in found.items()
        if name not in named[room]
    ]
    assert not missing, "\n".join(missing)


def test_needs_are_found_in_source() -> None:
    source = """
import os.path, pandas.io
subprocess.run(["/usr/bin/git", "x"]); world.command(("etcdctl",)); run([sys.executable, "-m", "x"])
asyncio.create_subprocess_exec("nsenter", "-t"); run(["-c"]); run("whole"); path.unlink(["no"])
needs.program("git", package="git"); needs.packages("lightning.pytorch")
"""
    started, imported, named = needs_of(source)
    assert started == {"git", "etcdctl", "nsenter"}
    assert imported == {"os", "pandas"}
    assert named == {"git", "lightning"}
