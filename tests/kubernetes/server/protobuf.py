"""The few messages that kubectl sends as protobuf and not as JSON, read by their field numbers."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from tests.kubernetes.server.kinds import Obj
from tests.kubernetes.server.store import Refusal

MAGIC = b"k8s\0"
TEXT, NUMBER = "text", "number"
TEXTS = {"map": TEXT}
META = {
    1: ("name", TEXT),
    2: ("generateName", TEXT),
    3: ("namespace", TEXT),
    5: ("uid", TEXT),
    6: ("resourceVersion", TEXT),
    11: ("labels", TEXTS),
    12: ("annotations", TEXTS),
}
ATTRIBUTES = {
    i: (name, TEXT)
    for i, name in enumerate(
        ("namespace", "verb", "group", "version", "resource", "subresource", "name"), 1
    )
}
DELETE = {1: ("gracePeriodSeconds", NUMBER), 2: ("preconditions", {1: ("uid", TEXT)}),
          4: ("propagationPolicy", TEXT)}  # fmt: skip
SHAPES: dict[str, Any] = {
    "SelfSubjectAccessReview": {2: ("spec", {1: ("resourceAttributes", ATTRIBUTES)})},
    "Namespace": {1: ("metadata", META)},
    "ServiceAccount": {1: ("metadata", META)},
    "ConfigMap": {1: ("metadata", META), 2: ("data", TEXTS)},
    "Secret": {1: ("metadata", META), 2: ("data", {"map": "bytes"}), 3: ("type", TEXT)},
    "Eviction": {1: ("metadata", META), 2: ("deleteOptions", DELETE)},
    "DeleteOptions": DELETE,
}


def read(raw: bytes) -> Obj:
    """The object; Refusal 415 of a kind that is not known here."""
    told: Obj = {"apiVersion": "", "kind": ""}
    inner = b""
    for number, value in _fields(raw.removeprefix(MAGIC)):
        if number == 1:
            told |= _message(value, {1: ("apiVersion", TEXT), 2: ("kind", TEXT)})
        elif number == 2:
            inner = value
    if told["kind"] not in SHAPES:
        message = f"a {told['kind']} as protobuf is not understood here: send JSON"
        raise Refusal(415, "UnsupportedMediaType", message)
    return told | _message(inner, SHAPES[told["kind"]])


def _message(raw: bytes, shape: Any) -> Obj:
    made: Obj = {}
    for number, value in _fields(raw):
        name, form = shape.get(number, ("", ""))
        if isinstance(form, dict) and "map" in form:
            pair = _message(value, {1: ("key", TEXT), 2: ("value", form["map"])})
            made.setdefault(name, {})[pair.get("key", "")] = pair.get("value", "")
        elif isinstance(form, dict):
            made[name] = _message(value, form)
        elif form == TEXT:
            text = value.decode()
            made |= {name: text} if text else {}
        elif form == NUMBER:
            made[name] = value
        elif form == "bytes":
            made[name] = base64.b64encode(value).decode()
    return made


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(raw):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
        elif wire == 2:
            size = varint()
            at += size
            yield number, raw[at - size : at]
        else:
            at += 8 if wire == 1 else 4
