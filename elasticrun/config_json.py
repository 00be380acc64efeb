"""Configurations (and other records) as JSON text, for processes that talk over inherited fds.

`loads(dumps(config), type(config)) == config`. Both ends are of one installation, so there is no
version to negotiate; what is not exactly a configuration raises ValueError with a sentence.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

import msgspec

MAX_CONFIG_BYTES = 8 * 1024 * 1024
"""More than an environment and a command line can be (2 MB each on Linux) with JSON's escapes."""

_SCALARS = frozenset({str, int, float, bool, type(None)})
"""Types whose values are their own JSON: most of a large round is, and takes a short way."""

C = TypeVar("C")


def dumps(config: Any) -> str:
    """A configuration (a record of records, tuples, dicts, words and numbers) as JSON."""
    return json.dumps(plain(config))


def loads(text: str | bytes, cls: type[C]) -> C:
    """The configuration of type `cls` in `text`. Raises ValueError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"this is no {cls.__name__}: it is not JSON") from None
    config: C = _value(cls, value, cls.__name__)
    return config


def typed(value: Any, kind: Any) -> Any:
    """The value of type `kind` that was made `plain`. Raises ValueError."""
    return _value(kind, value, getattr(kind, "__name__", str(kind)))


def plain(value: Any) -> Any:
    """A configuration as `json.dumps` takes it; `typed(plain(config), type(config)) == config`."""
    if type(value) in _SCALARS:
        return value
    kind: type = type(value)
    if is_record(kind):
        return {
            name: item if type(item := getattr(value, name)) in _SCALARS else plain(item)
            for name in fields_of(kind)
        }
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def _value(kind: Any, value: Any, where: str) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _one_of(inner, value, where)
    if origin is tuple and isinstance(value, list):
        kind = inner[0]
        return tuple(v if _is_plainly(v, kind) else _value(kind, v, where) for v in value)
    if origin is dict and isinstance(value, dict):
        return {_key(inner[0], k, where): _value(inner[1], v, where) for k, v in value.items()}
    if isinstance(kind, type) and is_record(kind) and isinstance(value, dict):
        return _object(kind, value, where)
    return _scalar(kind, value, where)


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    for kind in kinds:
        if kind is not type(None):
            try:
                return _value(kind, value, where)
            except ValueError:
                continue
    raise ValueError(f"{where} has the wrong type {type(value).__name__}")


@cache
def fields_of(cls: type[Any]) -> dict[str, Any]:
    """The fields of a record with their types; ten thousand seats of a round ask for them."""
    hints = typing.get_type_hints(cls)
    names = getattr(cls, "__struct_fields__", None)
    if names is None:
        names = [field.name for field in dataclasses.fields(cls)]
    return {name: hints[name] for name in names}


def is_record(cls: type) -> bool:
    """Whether it is a class of named fields: a dataclass, or a struct of msgspec."""
    return issubclass(cls, msgspec.Struct) or dataclasses.is_dataclass(cls)


def _object(cls: type, body: dict[str, Any], where: str) -> Any:
    hints = fields_of(cls)
    unknown = body.keys() - hints.keys()
    if unknown:
        raise ValueError(f"{where} has no field {min(unknown)[:60]!r}")
    try:
        return cls(
            **{
                key: v if _is_plainly(v, hints[key]) else _value(hints[key], v, f"{where}.{key}")
                for key, v in body.items()
            }
        )
    except TypeError:
        raise ValueError(f"{where} is not complete") from None


def _is_plainly(value: Any, kind: Any) -> bool:
    return type(value) is kind and kind in _SCALARS


def _key(kind: type, text: str, where: str) -> Any:
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{where} has the key {text[:60]!r}, which is no number") from None
    return text


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, StrEnum) and isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"{where} is {value[:60]!r}, which is none of its words") from None
    if kind is float and type(value) in (int, float):
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise ValueError(f"{where} has the wrong type {type(value).__name__}")
