"""A YAML document in which every field is read once, left out with a reason, or refused.

`Fields` is one of its mappings. A field that has not been taken when `close` is called does not
exist in the source kind, or exists only in a newer version of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

MAX_BYTES: Final = 1024 * 1024
"""A longer file is not a job: etcd accepts no larger object."""

MAX_VALUES: Final = 50_000
"""Maximum number of values in a document; an alias counts each time it is used."""

_TYPE_NAMES: Final[Mapping[type, str]] = {
    str: "text", int: "a whole number", bool: "true or false", dict: "a mapping", list: "a list",
}  # fmt: skip

Kind = TypeVar("Kind")


class NotConvertible(Exception):
    """The document cannot be converted; the message is a sentence."""


class Document:
    """One document: its value, the line of each field, and notes on what was not converted."""

    def __init__(self, value: Any, lines: Mapping[str, int]) -> None:
        self.value = value
        self._lines = lines
        self.notes: list[str] = []

    def fields(self) -> Fields:
        """The whole document, which must be a mapping. Raises NotConvertible."""
        if not isinstance(self.value, dict):
            raise NotConvertible(
                "not a job: a Kubernetes object is a mapping with `kind` and `spec`"
            )
        return Fields(self, self.value, "")

    def where(self, path: str) -> str:
        """A position such as `line 12: spec.nproc`."""
        line = self._lines.get(path)
        return f"line {line}: {path}" if line else path

    def note(self, path: str, sentence: str) -> None:
        """Record that a field is left out or converted differently."""
        self.notes.append(f"{self.where(path)}: {sentence}")


class Fields:
    """One mapping of a document."""

    def __init__(self, document: Document, value: Mapping[str, Any], path: str) -> None:
        self._document = document
        self._left = dict(value)
        self.path = path

    def path_of(self, name: str) -> str:
        """The path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def value(self, name: str, kind: type[Kind], default: Kind) -> Kind:
        """A field's value, or the default if it is missing. Raises NotConvertible for another
        type."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(name, f"{value!r} is not {_TYPE_NAMES[kind]}")
        return value

    def number(self, name: str, default: int, least: int = 0) -> int:
        """An integer. Raises NotConvertible if it is below `least`."""
        value = self.value(name, int, default)
        if value < least and value != default:
            raise self.error(name, f"{value} is less than {least}")
        return value

    def inner(self, name: str) -> Fields:
        """An inner mapping, empty if missing. Raises NotConvertible for another type."""
        return Fields(self._document, self.value(name, dict, {}), self.path_of(name))

    def roles(self) -> Iterator[tuple[str, Fields]]:
        """Take all remaining fields, which must be mappings: the name and fields of each."""
        for name in list(self._left):
            yield name, self.inner(name)

    def drop(self, name: str, why: str) -> None:
        """Leave a field out, with a note if it is present and not empty."""
        if self._left.pop(name, None) not in (None, "", {}, []):
            self._document.note(self.path_of(name), f"left out: {why}")

    def note(self, name: str, sentence: str) -> None:
        """Add a note about a field that was taken."""
        self._document.note(self.path_of(name), sentence)

    def error(self, name: str, why: str) -> NotConvertible:
        """The error for a field."""
        return NotConvertible(f"{self._document.where(self.path_of(name))}: {why}")

    def close(self) -> None:
        """Raise NotConvertible if a field has not been taken."""
        for name in self._left:
            raise self.error(name, "unknown field; correct or remove it")


def documents(text: str) -> list[Document]:
    """All documents of a file, without empty ones. Raises NotConvertible, also without PyYAML."""
    if len(text.encode()) > MAX_BYTES:
        raise NotConvertible(f"more than {MAX_BYTES // 1024} KiB, which is too large for a job")
    try:
        import yaml
    except ImportError:
        raise NotConvertible("PyYAML is not installed: pip install 'elasticrun[k8s]'") from None
    try:
        found = [_Reader(yaml).document(node) for node in yaml.compose_all(text)]
    except yaml.YAMLError as wrong:
        raise NotConvertible(f"not YAML: {' '.join(str(wrong).split())}") from None
    except RecursionError:
        raise NotConvertible("nested too deeply to be a job") from None
    return [one for one in found if one.value is not None]


class _Reader:
    """Converts the nodes of one document, as PyYAML composes them, to values, and records the line
    of each field."""

    def __init__(self, yaml: Any) -> None:
        self._yaml = yaml
        self._scalars = yaml.SafeLoader("")
        self._lines: dict[str, int] = {}
        self._count = 0

    def document(self, node: Any) -> Document:
        return Document(self._value(node, ""), self._lines)

    def _value(self, node: Any, path: str) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            raise NotConvertible(f"more than {MAX_VALUES} values, which is too many for a job")
        if isinstance(node, self._yaml.ScalarNode):
            if node.tag.endswith(
                (":timestamp", ":binary")
            ):  # JSON has no such type; Kubernetes keeps text
                return node.value
            return self._scalars.construct_object(node)
        if isinstance(node, self._yaml.SequenceNode):
            return [self._value(one, f"{path}[{at}]") for at, one in enumerate(node.value)]
        found: dict[str, Any] = {}
        own = {id(key) for key, _ in node.value}
        self._scalars.flatten_mapping(node)  # `<<: *other`: its fields come first
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            inner = f"{path}.{name}" if path else name
            line = key.start_mark.line + 1
            if name in seen:
                raise NotConvertible(f"line {line}: {inner} occurs twice")
            if id(key) in own:
                seen.add(name)
            self._lines[inner] = line
            found[name] = self._value(value, inner)
        return {name: value for name, value in found.items() if value is not None}
