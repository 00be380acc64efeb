"""A faster `@dataclass`.

`dataclasses` compiles six functions for a frozen class, one at a time: with its 170 classes an
agent spent a third of its start on them. Here one function of each class is compiled, `__init__`;
the others are closures over the names of the fields. The result is a dataclass for `fields`,
`replace`, `asdict`, pickle and pattern matching. Python 3.13 and newer compile the functions of a
class together, so this saves less there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING
from operator import attrgetter, ge, gt, le, lt
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, Final

_DEFAULT: Final = object()
"""The default of a parameter whose field has a factory."""

_ORDER: Final = {"__lt__": lt, "__le__": le, "__gt__": gt, "__ge__": ge}

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True, order=False, kw_only=False):
        """Like `dataclasses.dataclass`, with fewer flags."""

        def wrap(cls):
            own = set(vars(cls))
            if "__eq__" in own and cls.__hash__ is None:
                own.discard("__hash__")  # Python has set it, not the class
            if cls.__doc__ is None:
                cls.__doc__ = cls.__name__  # else dataclasses imports inspect to make one
            made = dataclasses.dataclass(
                init=False, repr=False, eq=False, slots=slots, kw_only=kw_only
            )(cls)
            methods = _methods(made, frozen=frozen, eq=eq, order=order)
            if frozen and slots:  # pickle and copy would assign to the fields
                methods |= {"__getstate__": _state, "__setstate__": _set_state}
            for name in methods.keys() - own:
                setattr(made, name, methods[name])
            return made

        return wrap if cls is None else wrap(cls)


def _methods(cls: Any, *, frozen: bool, eq: bool, order: bool) -> dict[str, Any]:
    fields = dataclasses.fields(cls)
    shown = [field.name for field in fields if field.repr]
    compared = _reader([field.name for field in fields if field.compare])

    @recursive_repr()
    def text(self: Any) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{type(self).__qualname__}({values})"

    methods: dict[str, Any] = {"__init__": _init(cls, frozen=frozen), "__repr__": text}
    if eq:
        methods["__eq__"] = _comparison(compared, tuple.__eq__)
        methods["__hash__"] = (lambda self: hash(compared(self))) if frozen else None
    if order:
        methods |= {name: _comparison(compared, operator) for name, operator in _ORDER.items()}
    if frozen:
        methods |= {"__setattr__": _refuse, "__delattr__": _refuse}
    return methods


def _reader(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns these attributes of an object."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _comparison(
    compared: Callable[[Any], tuple[Any, ...]], operator: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    def compare(self: Any, other: Any) -> Any:
        if type(other) is not type(self):
            return NotImplemented
        return operator(compared(self), compared(other))

    return compare


def _init(cls: Any, *, frozen: bool) -> Any:
    """Compile `__init__`."""
    names: dict[str, Any] = {"_set": object.__setattr__, "_DEFAULT": _DEFAULT}
    positional: list[str] = []
    keyword: list[str] = []
    body: list[str] = []
    for field in dataclasses.fields(cls):
        name, default = field.name, f"_of_{field.name}"
        parameter, value = name, name
        if field.default_factory is not MISSING:
            names[default] = field.default_factory
            parameter += "=_DEFAULT"
            value = (
                f"{default}() if {name} is _DEFAULT else {name}" if field.init else f"{default}()"
            )
        elif field.default is not MISSING:
            names[default] = field.default
            parameter, value = f"{name}={default}", name if field.init else default
        elif not field.init:
            continue
        if field.init:
            (keyword if field.kw_only else positional).append(parameter)
        body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    head = ", ".join(["self", *positional, *(["*", *keyword] if keyword else [])])
    exec(f"def __init__({head}):\n " + "\n ".join(body or ["pass"]), names)
    made = names["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    return made


def _refuse(self: Any, name: str, *value: Any) -> None:
    does = "assign to" if value else "delete"
    raise dataclasses.FrozenInstanceError(f"cannot {does} field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
