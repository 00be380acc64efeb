"""What a rank must take apart at its end, since the interpreter does not.

A preloaded module is shared by all ranks and is never freed: to free it, a rank would touch, and so
copy, every page of it, which takes a second of a core for torch with its compiler. Nobody sees
that, but for libraries that count what is left: bindings made with nanobind (triton's) print every
object of theirs that is alive when the interpreter has ended, where any *instance* is. Such
instances are default arguments of its functions. So the functions go.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

_NANOBIND = "nanobind"


def prepare_end(modules: Iterable[Any]) -> None:
    """Called in the server when all is imported. Ranks inherit what is registered here; what they
    register themselves runs before it."""
    types = list(_types())
    if types:
        owners = [each for each in modules if isinstance(each, ModuleType) and _functions(each)]
        atexit.register(_drop_functions, [*types, *owners])


def _drop_functions(owners: Iterable[Any]) -> None:
    for owner in owners:
        for name in _functions(owner):
            with contextlib.suppress(AttributeError, TypeError):  # a type that cannot be changed
                delattr(owner, name)


def _functions(owner: Any) -> list[str]:
    return [name for name, value in [*vars(owner).items()] if type(value).__module__ == _NANOBIND]


def _types() -> Iterator[type]:
    """All classes that are bound with nanobind. Its metaclasses tell whether there are any."""
    if not any(each.__module__ == _NANOBIND for each in type.__subclasses__(type)):
        return
    waiting = [each for each in object.__subclasses__() if _is_bound(each)]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += [below for below in type.__subclasses__(each) if _is_bound(below)]


def _is_bound(each: type) -> bool:
    return type(type(each)).__module__ == _NANOBIND
