"""Counts over elasticrun's source, for the ratchets in tests/test_house.py.

    python scripts/house.py [ROOT]

Each count is a number and its locations. The source is parsed and never executed.
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
"""A module with fewer lines needs more than one importer."""

PARAMETERS: Final = 8
"""A function with more parameters should take a record instead."""

RETIRED: Final = frozenset(
    re.findall(
        r"\w+",
        "doorstep ear nursery born buried pet lane shelf sifting needless stays bars barred blame "
        "culprit acquit settlement roster crew succession",
    )
)
"""Private words that have a standard term instead: pending handshakes, servicer, children, started,
reaped, keepalive, worker pool, slot, pruning, history, back-off, attribution, suspect, cleared,
budget, registry, participants, takeover."""


NAMED_BOOKS: Final = {
    "core.rounds.rendezvous:ready": "the order of joins decides who is taken",
    "core.rounds.rendezvous:_announced": "whether anybody is on the way is asked at each decision",
    "core.rounds.rendezvous:_kept_out": "the first reason is shown",
    "core.rounds.attribution:_records": "outlives a node's lives; the oldest are forgotten first",
    "core.health.policy:_unresolved": "they are called in by their order",
    "core.sight.ledger:_sums": "what is booked of each one's sums: recorded, ends with the round",
    "core.sight.hangs.sample:answers": "of one sample, in the order in which nodes were asked",
    "core.sight.ledger:_places": "what was booked last, beside what a node does now",
    "core.snapshots.choice:reports": "a watermark is told in the order in which nodes spoke",
    "core.snapshots.ledger:_reported": "one for each of several rounds",
    "core.snapshots.snapshots:_nodes": "the first of those that leave is named",
}
"""Dictionaries by node outside the node's record, each with its reason."""


# ---------------------------------------------------------------- docs/decisions/039

_TEXT_TESTS: Final = frozenset(
    {
        "startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition",
        "find", "index", "count",
    }
)  # fmt: skip
_OF_RE: Final = frozenset(
    {
        "compile", "search", "match", "fullmatch", "findall", "finditer", "sub", "split",
    }
)  # fmt: skip

_PROSE: Final = re.compile(r"[A-Za-z]['\",:;)]* +[A-Za-z(]|^ +[a-z]|[a-z][,;:]* +$")
"""Matches text that looks like a part of a sentence: two words, or a word before or after a
blank."""

_SENTENCES: Final = frozenset(
    {
        "reason", "sentence", "why", "refusal", "verdict", "evidence", "last_failure",
        "outcome",
    }
)  # fmt: skip
"""A variable with one of these names counts as a sentence, whatever it is compared with."""

FOREIGN: Final = {
    "agent.sight.outside": "the kernel's errors",
    "agent.sight.stacks": "Python's names of frozen modules",
    "agent.workers.checkout": "git's errors",
    "jobs.manage.arena": "command lines",
    "snapshots.dcp.loading": "pickle's errors",
    "host.doctor.kernel": "the kernel's log",
    "host.doctor.software": "modinfo's output",
    "forkserver.renew": "Python's names of frozen modules, names of files",
    "forkserver.trust": "lines of .pth files",
    "forkserver.child": "names of audit events",
    "jobs.hosts.ssh": "ssh's answer to -G",
    "jobs.kube.api": "the API server's errors",
    "jobs.kube.inside": "titles of processes",
    "jobs.kube.pod_logs": "titles of processes",
    "jobs.kube.observed": "titles of processes",
    "testing.processes": "titles of processes",
    "jobs.operator.controller": "an HTTP client's errors",
    "wire.rpc.channel": "gRPC's errors",
}
"""Modules that may search texts, because another program wrote them; each with what it reads."""

FOREIGN_NAMES: Final = frozenset(
    {"_PEER_LOST", "_TRANSIENT", "NO_TRACEBACK", "_NETWORK", "_HARDWARE"}
)
"""Constants with other libraries' texts, in modules that have sentences of ours too."""

MAILBOXES: Final = {
    "Watch": ("demand",),
    "OperatorRequests": ("restart", "stop"),
    "SnapshotPolicy": ("trouble",),
    "HealthPolicy": ("unfit",),
    "JobContext": ("changed",),
}
"""Attributes by which a part requests something; the job polls them."""

ROUNDS: Final = frozenset(
    {
        "RoundInfo", "Start", "RoundFacts", "RoundReport", "LastRound", "Round", "Participants",
    }
)  # fmt: skip
"""Classes that are types of a round by name; a name that no class has does not count."""

OF_A_ROUND: Final = frozenset(["world_size", "restart_count", "group_rank", "seats", "restore"])
"""Fields of a round. A class with a RoundName and three of these is a type of a round too, and so
is one that embeds a round and repeats one of them."""

EMBEDS: Final = ("RoundInfo", "Start", "Round")
"""A class with a field of one of these types embeds a round, as the agent's `LocalRound` and
`Generation` do."""

A_FACT: Final = "slow_ages"
"""A fact of the master; its locations are counted."""

AN_ORDER: Final = "Warn"
"""An order of the master; its locations are counted."""


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
        """All nodes of the tree by type, from one walk."""
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

    def located(self, node: ast.stmt | ast.expr, what: str) -> str:
        return f"{self.path}:{node.lineno} {what}"


class House:
    """The modules of `elasticrun` in a repository, without generated code."""

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
        """The most files in a folder, without `__init__` and `__main__`; the locations are folders
        with more than nine."""
        folders = Counter(
            module.folder
            for module in self.modules.values()
            if not module.path.name.startswith("__")
        )
        return Count(max(folders.values()), [f"{n} {f}" for f, n in folders.most_common() if n > 9])

    def classes_over_files(self) -> Count:
        """Subclasses of a class of another module, unless the base is named ...Error or
        ...Refused."""
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
                    found.append(module.located(node, f"{node.name}({name})"))
        return Count(len(found), found)

    def crumbs(self) -> Count:
        """Modules of fewer than CRUMB lines that only one other module imports."""
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
        """Public classes that have the same name as a class of another module."""
        homes: dict[str, list[str]] = defaultdict(list)
        for module in self.modules.values():
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(module.name)
        twice = {name: where for name, where in homes.items() if len(where) > 1}
        return Count(len(twice), [f"{name}: {', '.join(where)}" for name, where in twice.items()])

    def constructors_with_callables(self) -> Count:
        """`__init__` methods with at least two callback parameters."""
        found = []
        for module, node in self._nodes(ast.FunctionDef):
            assert isinstance(node, ast.FunctionDef)
            if node.name == "__init__":
                every = [*node.args.args, *node.args.kwonlyargs]
                calls = [a for a in every if a.annotation and "Callable" in ast.dump(a.annotation)]
                if len(calls) >= 2:
                    found.append(module.located(node, f"{len(calls)} callables"))
        return Count(len(found), found)

    def tasks_without_an_owner(self) -> Count:
        """Calls in the agent that start a task outside its loop, agent/runtime.py."""
        found = []
        for module, node in self._nodes(ast.Call):
            assert isinstance(node, ast.Call)
            agent = module.name.startswith("elasticrun.agent.")
            if agent and module.name != "elasticrun.agent.runtime":
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in ("create_task", "ensure_future"):
                    found.append(module.located(node, name))
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
                found.append(module.located(node, f"{node.name} takes {number}"))
        return Count(len(found), found)

    def books_by_node(self) -> Count:
        """Attributes in the core, outside core/nodes, that are dictionaries or sets keyed by a
        string, except NAMED_BOOKS."""
        found = []
        for module, node in self._nodes(ast.AnnAssign):
            assert isinstance(node, ast.AnnAssign)
            core = module.name.startswith("elasticrun.core.")
            if core and ".nodes." not in module.name and isinstance(node.target, ast.Attribute):
                kind = ast.unparse(node.annotation)
                book = f"{module.name.removeprefix('elasticrun.')}:{node.target.attr}"
                by_text = kind.startswith(("dict[str,", "set[str]", "defaultdict[str,"))
                if by_text and book not in NAMED_BOOKS:
                    found.append(module.located(node, f"{ast.unparse(node.target)}: {kind}"))
        return Count(len(found), found)

    def retired_words(self) -> Count:
        """Names of modules, classes, functions and attributes that contain a retired word."""
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

    # ------------------------------------------------------------ docs/decisions/039

    def readers_of_our_sentences(self) -> Count:
        """Modules that test, split or search one of our texts: with a literal that looks like
        prose, or through a variable named like a sentence. Modules in FOREIGN do not count."""
        public = {
            name: texts
            for module in self.modules.values()
            for name, texts in _constants(module).items()
            if not name.startswith("_")
        }
        found: dict[str, list[str]] = defaultdict(list)
        for module in self.modules.values():
            if module.name.removeprefix("elasticrun.") in FOREIGN:
                continue
            prose = public | _constants(module)
            foreign = _lines_of(module, FOREIGN_NAMES)
            for kind in (ast.Call, ast.Compare):
                for node in module.nodes[kind]:
                    assert isinstance(node, ast.Call | ast.Compare)
                    if node.lineno not in foreign and _reads_text(node, prose):
                        found[module.name].append(module.located(node, ast.unparse(node)[:80]))
        return Count(len(found), [where for every in found.values() for where in every])

    def callables_assigned_from_outside(self) -> Count:
        """Assignments such as `loop.on_over = ...` from outside a class to an attribute that some
        class declares as a callable."""
        called: set[str] = set()
        for _, node in self._nodes(ast.AnnAssign):
            assert isinstance(node, ast.AnnAssign)
            own = isinstance(node.target, ast.Attribute) and _is_self(node.target.value)
            if own and ast.unparse(node.annotation).startswith("Callable["):
                called.add(node.target.attr)  # type: ignore[union-attr]
        found = []
        for module, node in self._nodes(ast.Attribute):
            assert isinstance(node, ast.Attribute)
            stored = isinstance(node.ctx, ast.Store) and not _is_self(node.value)
            if stored and node.attr in called:
                found.append(module.located(node, ast.unparse(node)))
        return Count(len(found), found)

    def polled_mailboxes(self) -> Count:
        """The attributes in MAILBOXES that their classes still have."""
        found = []
        for module, node in self._nodes(ast.ClassDef):
            assert isinstance(node, ast.ClassDef)
            own = _attributes(node)
            found += [
                module.located(node, f"{node.name}.{name}")
                for name in MAILBOXES.get(node.name, ())
                if name in own
            ]
        return Count(len(found), found)

    def types_of_a_round(self) -> Count:
        found = []
        for module, node in self._nodes(ast.ClassDef):
            assert isinstance(node, ast.ClassDef)
            fields = {
                one.target.id: ast.unparse(one.annotation)
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
            parts = len(OF_A_ROUND & fields.keys())
            whole = "RoundName" in fields.values() and parts >= 3
            repeats = bool(parts) and any(one in EMBEDS for one in fields.values())
            if node.name in ROUNDS or whole or repeats:
                found.append(module.located(node, node.name))
        return Count(len(found), found)

    def places_of_a_fact(self) -> Count:
        """Functions and classes that name A_FACT."""
        return self._places(A_FACT)

    def places_of_an_order(self) -> Count:
        """Functions and classes that name AN_ORDER."""
        return self._places(AN_ORDER)

    def _places(self, name: str) -> Count:
        found: dict[str, str] = {}
        for module in self.modules.values():
            stack: list[tuple[ast.AST, str]] = [(module.tree, "")]
            while stack:
                node, where = stack.pop()
                mine = getattr(node, "name", "") if isinstance(node, _SCOPES) else ""
                if isinstance(node, ast.Assign | ast.AnnAssign) and not where:
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    mine = ast.unparse(target)
                where = f"{where}.{mine}".strip(".") if mine else where
                words = {getattr(node, key, None) for key in ("id", "attr", "arg", "name")}
                if name in words and not isinstance(node, ast.alias):
                    found[f"{module.path} {where}"] = where
                stack += [(child, where) for child in ast.iter_child_nodes(node)]
        return Count(len(found), sorted(found))

    def attributes_of_the_agent(self) -> Count:
        return self._attributes_of("elasticrun.agent.node", "NodeAgent")

    def attributes_of_the_hang_watch(self) -> Count:
        """The most attributes that the hang watch, one of its states or one of its parts has."""
        whole = "elasticrun.core.sight.hangs"
        most = Count(0, [])
        for name in ("watch", "states", "schedule", "limits"):
            home = self.modules.get(f"{whole}.{name}")
            for node in home.nodes[ast.ClassDef] if home is not None else ():
                assert isinstance(node, ast.ClassDef)
                own = sorted(_attributes(node) | _fields(node))
                if len(own) > most.number:
                    most = Count(len(own), [f"{node.name}.{one}" for one in own])
        return most

    def _attributes_of(self, module: str, name: str) -> Count:
        if (home := self.modules.get(module)) is None:
            return Count(0, [])
        nodes = home.nodes[ast.ClassDef]
        own = [_attributes(one) for one in nodes if getattr(one, "name", "") == name]
        found = sorted(set().union(*own))
        return Count(len(found), found)

    def replaced_configs(self) -> Count:
        """Calls such as `replace(config, ...)`, which make a configuration that differs from what
        the user asked for."""
        found = []
        for module, node in self._nodes(ast.Call):
            assert isinstance(node, ast.Call)
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called == "replace" and node.args:
                what = getattr(node.args[0], "attr", getattr(node.args[0], "id", ""))
                if what.strip("_") in ("config", "resolved", "launch"):
                    found.append(module.located(node, ast.unparse(node)[:60]))
        return Count(len(found), found)

    def import_circles(self) -> Count:
        """Groups of modules that import each other in a cycle; type-only imports and imports in
        functions count."""
        imports = {name: set[str]() for name in self.modules}
        for module, node in self._nodes(ast.ImportFrom, ast.Import):
            for alias in node.names:  # type: ignore[attr-defined]
                base = getattr(node, "module", None)
                whole = f"{base}.{alias.name}" if base else alias.name
                target = whole if whole in self.modules else base or ""
                if target in self.modules and target != module.name:
                    imports[module.name].add(target)
        reach = {name: _reachable(name, imports) for name in imports}
        groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in imports if a in reach[a]}
        found = sorted(", ".join(sorted(group)) for group in groups)
        return Count(len(found), found)

    def top_level_packages(self) -> Count:
        found = {
            module.path.parts[1] for module in self.modules.values() if len(module.path.parts) > 2
        }
        return Count(len(found), sorted(found))


_SCOPES: Final = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _attributes(node: ast.ClassDef) -> set[str]:
    """The attributes of `self` that a class assigns."""
    return {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and _is_self(one.value)
    }


def _fields(node: ast.ClassDef) -> set[str]:
    """The annotated fields of a class."""
    return {
        one.target.id
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }


def _reachable(name: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    rest = list(imports[name])
    while rest:
        if (one := rest.pop()) not in found:
            found.add(one)
            rest += imports[one]
    return found


def _assigned(module: Module) -> Iterator[tuple[str, ast.Assign | ast.AnnAssign]]:
    """The top-level assignments of a module, by name."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                yield target.id, node


def _constants(module: Module) -> dict[str, list[str]]:
    """The string literals in a module's constants, by the constants' names; without
    FOREIGN_NAMES."""
    return {
        name: _texts(node.value)
        for name, node in _assigned(module)
        if node.value is not None and name not in FOREIGN_NAMES
    }


def _lines_of(module: Module, names: frozenset[str]) -> set[int]:
    """The numbers of the lines that define these constants."""
    return {
        line
        for name, node in _assigned(module)
        if name in names
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _texts(node: ast.AST, constants: dict[str, list[str]] | None = None) -> list[str]:
    """The string literals in an expression, and those of the constants that it names."""
    found = []
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            found.append(one.value)
        name = getattr(one, "attr", getattr(one, "id", ""))
        if constants and isinstance(one, ast.Name | ast.Attribute) and name.isupper():
            found += constants.get(name, ())
    return found


def _reads_text(node: ast.Call | ast.Compare, constants: dict[str, list[str]]) -> bool:
    """Whether the expression searches for, cuts off or compares a part of a sentence."""
    if isinstance(node, ast.Compare):
        texts = [text for side in (node.left, *node.comparators) for text in _texts(side)]
        texts += [t for s in (node.left, *node.comparators) for t in _named(s, constants)]
        by_name = isinstance(node.ops[0], ast.In | ast.NotIn) and _is_sentence(node.comparators[0])
        said = by_name and bool(_texts(node.left, constants))
        plain = all(isinstance(op, ast.In | ast.NotIn | ast.Eq | ast.NotEq) for op in node.ops)
        nested = any(isinstance(one, ast.Call) for one in ast.walk(node))
        return plain and not nested and (said or any(map(_PROSE.search, texts)))
    if not isinstance(node.func, ast.Attribute) or not node.args:
        return False
    texts = _texts(node.args[0], constants)
    if getattr(node.func.value, "id", "") == "re" and node.func.attr in _OF_RE:
        return any(map(_PROSE.search, texts))
    if node.func.attr not in _TEXT_TESTS:
        return False
    return any(map(_PROSE.search, texts)) or (bool(texts) and _is_sentence(node.func.value))


def _named(node: ast.AST, constants: dict[str, list[str]]) -> list[str]:
    """The text of a constant, if the expression is its name and it has only one; else []."""
    name = getattr(node, "attr", getattr(node, "id", ""))
    texts = constants.get(name, []) if name.isupper() else []
    return texts if len(texts) == 1 else []


def _is_sentence(node: ast.AST) -> bool:
    name: str = getattr(node, "attr", getattr(node, "id", ""))
    return name.strip("_") in _SENTENCES


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
    House.readers_of_our_sentences,
    House.callables_assigned_from_outside,
    House.polled_mailboxes,
    House.types_of_a_round,
    House.places_of_a_fact,
    House.places_of_an_order,
    House.attributes_of_the_agent,
    House.attributes_of_the_hang_watch,
    House.replaced_configs,
    House.import_circles,
    House.top_level_packages,
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
