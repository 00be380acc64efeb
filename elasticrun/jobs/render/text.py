"""Documents as YAML or JSON.

Strings are quoted if any YAML reader, 1.1 or 1.2, could read them as another type: Go's reads 1e3
as a number and y as a boolean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_Remarks = Mapping[tuple[str, str], str]

REMARKS: Final[_Remarks] = {
    ("spec", "clusterIP"): "headless: every pod gets a DNS name",
    ("spec", "publishNotReadyAddresses"): "even before pod 0 is ready, which it never reports",
    ("spec", "parallelism"): "change both together to resize; the other pods keep running",
    ("spec", "podReplacementPolicy"): "one pod per index, never two",
    ("spec", "podFailurePolicy"): "the first matching rule applies",
    ("spec", "successPolicy"): "the job is done when the minimum number of nodes is done",
    ("spec", "restartPolicy"): "elasticrun restarts ranks in the same pod",
    ("spec", "terminationGracePeriodSeconds"): "SIGTERM: save a step, stop the ranks, leave",
    ("failurePolicy", "maxRestarts"): "lost nodes are replaced; nothing starts over",
}
"""YAML comments, by parent key and key."""

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS: Final = frozenset(
    ("y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf")
)
_UNPRINTABLE = re.compile("[\x7f-\x9f\ud800-\udfff\u2028\u2029\ufeff\ufffe\uffff]")


def as_yaml(documents: Sequence[Mapping[str, Any]], special: _Remarks | None = None) -> str:
    """A stream of YAML documents with comments beside fields that are not self-evident, from
    `special`, else from REMARKS."""
    remarks = {**REMARKS, **(special or {})}
    blocks = ("\n".join(_mapping(one, "", 0, remarks)) + "\n" for one in documents)
    return "---\n".join(blocks)


def as_json(documents: Sequence[Mapping[str, Any]]) -> str:
    """One JSON document: a List of them."""
    whole = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
    return json.dumps(whole, indent=2) + "\n"


def _mapping(value: Mapping[str, Any], above: str, indent: int, remarks: _Remarks) -> Iterator[str]:
    for key, item in value.items():
        remark = remarks.get((above, key))
        tail = f"  # {remark}" if remark else ""
        head = f"{' ' * indent}{_scalar(key)}:"
        if isinstance(item, Mapping) and item:
            yield head + tail
            yield from _mapping(item, key, indent + 2, remarks)
        elif isinstance(item, list | tuple) and item:
            yield head + tail
            yield from _sequence(item, key, indent, remarks)
        else:
            yield f"{head} {_scalar(item)}{tail}"


def _sequence(value: Sequence[Any], above: str, indent: int, remarks: _Remarks) -> Iterator[str]:
    for item in value:
        if isinstance(item, Mapping) and item:
            first, *rest = _mapping(item, above, indent + 2, remarks)
            yield f"{' ' * indent}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{' ' * indent}- {_scalar(item)}"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
            return value
        text = json.dumps(value, ensure_ascii=False)
        return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    if value in ({}, []):
        return "{}" if isinstance(value, Mapping) else "[]"
    raise TypeError(f"{type(value).__name__} has no place in a manifest")
