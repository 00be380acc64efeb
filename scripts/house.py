"""What the house weighs: counts over elasticrun's source, for the ratchets in tests/test_house.py.

    python scripts/house.py [ROOT]

Each count is a number and where it comes from. The source is read, nothing of it runs.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

CRUMB: Final = 80
"""Lines of a module below which one importer is too few."""

PARAMETERS: Final = 8
"""A function with more takes a record instead."""

RETIRED: Final = frozenset(
    re.findall(
        r"\w+",
        "doorstep ear nursery born buried pet lane shelf sifting needless stays bars barred blame "
        "culprit acquit settlement roster crew succession",
    )
)
"""Private words for which the field has one: pending handshakes, servicer, children, started,
reaped, keepalive, worker pool, slot, pruning, history, back-off, attribution, suspect, cleared,
budget, registry, participants, takeover."""


NAMED_BOOKS: Final = {
    "core.rounds.rendezvous:ready": "the order of joins decides who is taken",
    "core.rounds.rendezvous:_announced": "whether anybody is on the way is asked at each decision",
    "core.rounds.rendezvous:_kept": "the first reason is shown",
    "core.rounds.attribution:_records": "outlives a node's lives; the oldest are forgotten first",
    "core.health.policy:_unresolved": "they are called in by their order",
    "core.sight.ledger:_sums": "what is booked of each one's sums: recorded, ends with the round",
    "core.sight.hangs.watch:_since_of": "forgotten with its round; empty while all train",
    "core.sight.hangs.look:answers": "of one look, in the order in which nodes were asked",
    "core.sight.ledger:_places": "what was booked last, beside what a node does now",
    "core.snapshots.choice:reports": "a watermark is told in the order in which nodes spoke",
    "core.snapshots.ledger:_said": "one for each of several rounds",
    "core.snapshots.snapshots:_nodes": "the first of those that leave is named",
}
"""Dictionaries by node beside its record, each with its reason."""


class Count(NamedTuple):
    number: int
    where: list[str]


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> dict[type, list[ast.AST]]:
        """All of the tree by their kind, from one walk."""
        found: dict[type, list[ast.AST]] = defaultdict(list)
        for node in ast.walk(self.tree):
            found[type(node)].append(node)
        return found

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def folder(self) -> str:
        return self.path.parent.as_posix()

    def named(self, node: ast.stmt | ast.expr, what: str) -> str:
        return f"{self.path}:{node.lineno} {what}"


class House:
    """The modules of `elasticrun` below a repository's root, without generated code."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        for path in sorted((root / "elasticrun").rglob("*.py")):
            short = path.relative_to(root)
            if "pb" not in short.parts:
                name = ".".join(short.with_suffix("").parts).removesuffix(".__init__")
                self.modules[name] = Module(name, short, path.read_text(encoding="utf-8"))

    def _nodes(self, *kinds: type) -> Iterator[tuple[Module, ast.AST]]:
        for module in self.modules.values():
            for kind in kinds:
                for node in module.nodes[kind]:
                    yield module, node

    def lines(self) -> Count:
        by_folder: Counter[str] = Counter()
        for module in self.modules.values():
            by_folder[module.folder] += module.lines
        return Count(
            by_folder.total(), [f"{n} {folder}" for folder, n in sorted(by_folder.items())]
        )

    def files_in_the_fullest_folder(self) -> Count:
        """Without `__init__` and `__main__`."""
        folders = Counter(
            module.folder
            for module in self.modules.values()
            if not module.path.name.startswith("__")
        )
        return Count(max(folders.values()), [f"{n} {f}" for f, n in folders.most_common() if n > 9])

    def classes_over_files(self) -> Count:
        """Subclasses of a class of another module, errors and protocols left out."""
        home: dict[str, list[str]] = defaultdict(list)
        for module, node in self._nodes(ast.ClassDef):
            assert isinstance(node, ast.ClassDef)
            home[node.name].append(module.name)
        found = []
        for module, node in self._nodes(ast.ClassDef):
            assert isinstance(node, ast.ClassDef)
            for base in node.bases:
                name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
                homes = home.get(name, [])
                if homes and module.name not in homes and not name.endswith(("Error", "Refused")):
                    found.append(module.named(node, f"{node.name}({name})"))
        return Count(len(found), found)

    def crumbs(self) -> Count:
        """Short modules that one other module imports."""
        users: dict[str, set[str]] = defaultdict(set)
        for module, node in self._nodes(ast.ImportFrom):
            assert isinstance(node, ast.ImportFrom)
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                target = whole if whole in self.modules else node.module or ""
                if target != module.name:
                    users[target].add(module.name)
        found = [
            f"{module.path} ({module.lines} lines) for {next(iter(users[name]))}"
            for name, module in self.modules.items()
            if module.lines < CRUMB and len(users[name]) == 1 and "__" not in module.path.name
        ]
        return Count(len(found), found)

    def names_used_twice(self) -> Count:
        """Public classes that share their name with one of another module."""
        homes: dict[str, list[str]] = defaultdict(list)
        for module in self.modules.values():
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(module.name)
        twice = {name: where for name, where in homes.items() if len(where) > 1}
        return Count(len(twice), [f"{name}: {', '.join(where)}" for name, where in twice.items()])

    def constructors_with_callables(self) -> Count:
        """`__init__` with two parameters or more that are called back."""
        found = []
        for module, node in self._nodes(ast.FunctionDef):
            assert isinstance(node, ast.FunctionDef)
            if node.name == "__init__":
                every = [*node.args.args, *node.args.kwonlyargs]
                calls = [a for a in every if a.annotation and "Callable" in ast.dump(a.annotation)]
                if len(calls) >= 2:
                    found.append(module.named(node, f"{len(calls)} callables"))
        return Count(len(found), found)

    def tasks_without_an_owner(self) -> Count:
        """The agent's loop, agent/runtime.py, is the one that starts tasks."""
        found = []
        for module, node in self._nodes(ast.Call):
            assert isinstance(node, ast.Call)
            agent = module.name.startswith("elasticrun.agent.")
            if agent and module.name != "elasticrun.agent.runtime":
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in ("create_task", "ensure_future"):
                    found.append(module.named(node, name))
        return Count(len(found), found)

    def readers_of_proc_stat(self) -> Count:
        shape = re.compile(r"/proc/(\{[^}]*\}|self)/stat[\"']")
        found = [str(m.path) for m in self.modules.values() if shape.search(m.text)]
        return Count(len(found), found)

    def functions_with_many_parameters(self) -> Count:
        found = []
        for module, node in self._nodes(ast.FunctionDef, ast.AsyncFunctionDef):
            assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            number = sum(argument.arg not in ("self", "cls") for argument in every)
            if number > PARAMETERS:
                found.append(module.named(node, f"{node.name} takes {number}"))
        return Count(len(found), found)

    def books_by_node(self) -> Count:
        """Attributes in the core, outside core/nodes, that are dictionaries or sets by a text, but
        for NAMED_BOOKS."""
        found = []
        for module, node in self._nodes(ast.AnnAssign):
            assert isinstance(node, ast.AnnAssign)
            core = module.name.startswith("elasticrun.core.")
            if core and ".nodes." not in module.name and isinstance(node.target, ast.Attribute):
                kind = ast.unparse(node.annotation)
                book = f"{module.name.removeprefix('elasticrun.')}:{node.target.attr}"
                by_text = kind.startswith(("dict[str,", "set[str]", "defaultdict[str,"))
                if by_text and book not in NAMED_BOOKS:
                    found.append(module.named(node, f"{ast.unparse(node.target)}: {kind}"))
        return Count(len(found), found)

    def retired_words(self) -> Count:
        """Names of modules, classes, functions and attributes that consist of one or have one."""
        found = []
        for module in self.modules.values():
            names = [(1, module.path.stem)]
            for kind in (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
                names += [(node.lineno, node.name) for node in module.nodes[kind]]
            for node in module.nodes[ast.Attribute]:
                if isinstance(node.ctx, ast.Store):
                    names.append((node.lineno, node.attr))
            for line, name in names:
                words = re.findall(r"[A-Z]?[a-z]+", name)
                found += [f"{module.path}:{line} {name}" for w in words if w.lower() in RETIRED]
        return Count(len(found), found)


COUNTS: Final[tuple[Callable[[House], Count], ...]] = (
    House.files_in_the_fullest_folder,
    House.classes_over_files,
    House.crumbs,
    House.names_used_twice,
    House.constructors_with_callables,
    House.tasks_without_an_owner,
    House.readers_of_proc_stat,
    House.functions_with_many_parameters,
    House.books_by_node,
    House.retired_words,
)


def main(arguments: list[str]) -> None:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    house = House(root)
    print(f"{len(house.modules):7} modules")
    print(f"{house.lines().number:7} lines (not limited: docs/decisions/036)")
    for count in COUNTS:
        found = count(house)
        print(f"{found.number:7} {count.__name__.replace('_', ' ')}")
        for where in found.where if "-v" in sys.argv else ():
            print(f"            {where}")


if __name__ == "__main__":
    main([argument for argument in sys.argv[1:] if argument != "-v"])
