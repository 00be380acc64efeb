"""Records (dataclasses and structs) as plain values, as JSON text, and back.

`loads(dumps(record), type(record)) == record`. What is not exactly such a record raises ValueError
with a sentence: there is no second guess about what somebody may have meant. `strict` is for what
other processes say: no text with a NUL, no number that no field can mean.

Ranks and the fork server import this, so it knows structs without importing msgspec.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Final, TypeVar

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
"""Types whose values are their own JSON: most of a large round is, and takes a short way."""

_STRICT_INT: Final = 2**63
_STRICT_FLOAT: Final = 1e18
_FLOAT_BITS: Final = 1024  # an int of more has no float

R = TypeVar("R")


def dumps(record: Any) -> str:
    """A record (of records, tuples, dicts, words and numbers) as JSON."""
    return json.dumps(plain(record))


def loads(text: str | bytes, kind: type[R]) -> R:
    """The record of type `kind` in `text`. ValueError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"this is no {kind.__name__}: it is not JSON") from None
    record: R = typed(value, kind)
    return record


def plain(value: Any) -> Any:
    """A record as `json.dumps` takes it; `typed(plain(record), type(record)) == record`."""
    if type(value) in _SCALARS:
        return value
    kind: type = type(value)
    if is_record(kind):
        return {
            name: item if type(item := getattr(value, name)) in _SCALARS else plain(item)
            for name in _names(kind)
        }
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def typed(value: Any, kind: Any, where: str = "", *, strict: bool = False) -> Any:
    """The value of type `kind` that was made `plain`; `where` it stands, for the sentence.
    ValueError."""
    where = where or getattr(kind, "__name__", str(kind))
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _one_of(inner, value, where, strict)
    if origin is tuple and isinstance(value, list):
        return tuple(_item(item, inner[0], where, strict) for item in value)
    if origin is dict and isinstance(value, dict):
        return {
            _key(key, inner[0], where, strict): _item(item, inner[1], where, strict)
            for key, item in value.items()
        }
    if isinstance(kind, type):
        if isinstance(value, dict) and is_record(kind):
            return _record(value, kind, where, strict)
        return _scalar(value, kind, where, strict)
    raise ValueError(f"{where} has the wrong type {type(value).__name__}")


def is_record(kind: type) -> bool:
    """Whether it is a class of named fields: a dataclass, or a struct of msgspec."""
    return hasattr(kind, "__struct_fields__") or is_dataclass(kind)


@cache
def _names(kind: type) -> tuple[str, ...]:
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    names: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
    return names


@cache
def fields_of(kind: type) -> dict[str, Any]:
    """The fields of a record with their types; ten thousand seats of a round ask for them."""
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in _names(kind)}


@cache
def resolve(kind: Any) -> None:
    """Look up the fields of a record and of all records in it, while sys.modules still has their
    modules: the fork server hides its own before it reads its second message."""
    if isinstance(kind, type) and is_record(kind):
        for inner in fields_of(kind).values():
            resolve(inner)
    for inner in typing.get_args(kind):
        resolve(inner)


def _item(value: Any, kind: Any, where: str, strict: bool) -> Any:
    """By the short way where there is one."""
    if type(value) is kind and kind in _SCALARS and (not strict or _is_usual(value)):
        return value
    return typed(value, kind, where, strict=strict)


def _one_of(kinds: tuple[Any, ...], value: Any, where: str, strict: bool) -> Any:
    for kind in kinds:
        if kind is not type(None):
            try:
                return typed(value, kind, where, strict=strict)
            except ValueError:
                continue
    raise ValueError(f"{where} has the wrong type {type(value).__name__}")


def _record(body: dict[str, Any], kind: type, where: str, strict: bool) -> Any:
    hints = fields_of(kind)
    for name in body:
        if name not in hints:
            raise ValueError(f"{where} has no field {name[:60]!r}")
    values = {
        name: _item(value, hints[name], f"{where}.{name}", strict) for name, value in body.items()
    }
    try:
        return kind(**values)
    except TypeError:
        missing = next((name for name in hints if name not in body), "a field")
        raise ValueError(f"{where} comes without {missing}") from None


def _key(text: str, kind: type, where: str, strict: bool) -> Any:
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{where} has the key {text[:60]!r}, which is no number") from None
    return _item(text, kind, where, strict)


def _scalar(value: Any, kind: type, where: str, strict: bool) -> Any:
    if issubclass(kind, StrEnum) and isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"{where} is {value[:60]!r}, which is none of its words") from None
    if kind is float and type(value) is int and value.bit_length() < _FLOAT_BITS:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} has the wrong type {type(value).__name__}")
    if strict and not _is_usual(value):
        raise ValueError(f"{where} has the wrong type or is out of range")
    return value


def _is_usual(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" not in value
    if isinstance(value, float):
        return abs(value) < _STRICT_FLOAT  # a NaN is not
    return not isinstance(value, int) or -_STRICT_INT <= value < _STRICT_INT
