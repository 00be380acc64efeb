"""What a PATCH does to an object, by its content type."""

from __future__ import annotations

import copy
from typing import Any

from tests.kubernetes.server.kinds import Obj
from tests.kubernetes.server.schema import resolve
from tests.kubernetes.server.store import Refusal

JSON = "application/json-patch+json"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"


def apply(content_type: str, obj: Obj, patch: Any, schema: Obj | None) -> Obj:
    """The object with the patch in it. `schema`: of a built-in kind, whose lists have keys."""
    obj = copy.deepcopy(obj)
    if content_type == JSON:
        return _operations(obj, patch)
    if not isinstance(patch, dict):
        raise Refusal(400, "BadRequest", "the patch is no object")
    if content_type == MERGE or (content_type == APPLY and schema is None):
        return merge(obj, patch)
    if content_type in (STRATEGIC, APPLY) and schema is not None:
        return _strategic(obj, patch, schema)
    message = "the body of the request was in an unknown format"
    raise Refusal(415, "UnsupportedMediaType", message)


def merge(obj: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    obj = obj if isinstance(obj, dict) else {}
    for name, value in patch.items():
        if value is None:
            obj.pop(name, None)
        else:
            obj[name] = merge(obj.get(name), value)
    return obj


def _operations(obj: Any, patch: Any) -> Any:
    """RFC 6902, less move and copy."""
    for step in patch:
        op, path = step["op"], step["path"]
        *outer, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
        try:
            at = obj
            for part in outer:
                at = at[int(part)] if isinstance(at, list) else at[part]
            there: Any = last
            if isinstance(at, list):
                there = len(at) if last == "-" else int(last)
            if op == "test" and at[there] != step["value"]:
                raise Refusal(422, "Invalid", f"the server rejected our request: test of {path}")
            if op == "remove" or op == "replace":
                _ = at[there]  # it has to be there
            if op == "remove":
                del at[there]
            elif op == "add" and isinstance(at, list):
                at.insert(there, step["value"])
            elif op in ("add", "replace"):
                at[there] = step["value"]
        except (KeyError, IndexError, TypeError, ValueError):
            message = f"the server rejected our request: {op} at {path}: there is no such place"
            raise Refusal(422, "Invalid", message) from None
    return obj


def _strategic(obj: Any, patch: Obj, schema: Obj) -> Any:
    """By the merge keys of the built-in schemas; `$retainKeys` and the order of lists are left."""
    schema = resolve(schema)
    if patch.get("$patch") == "replace":
        return {name: value for name, value in patch.items() if name != "$patch"}
    obj = obj if isinstance(obj, dict) else {}
    for name, value in patch.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            field = name.split("/", 1)[1]
            obj[field] = [one for one in obj.get(field, []) if one not in value]
        if name.startswith("$"):
            continue
        below = schema.get("properties", {}).get(name) or schema.get("additionalProperties") or {}
        if value is None:
            obj.pop(name, None)
        elif isinstance(value, dict):
            obj[name] = _strategic(obj.get(name), value, below)
            if value.get("$patch") == "delete":
                del obj[name]
        elif isinstance(value, list) and below.get("x-kubernetes-patch-strategy", "") == "merge":
            obj[name] = _lists(obj.get(name) or [], value, below)
        else:
            obj[name] = value
    return obj


def _lists(old: list[Any], new: list[Any], schema: Obj) -> list[Any]:
    key = schema.get("x-kubernetes-patch-merge-key")
    if key is None:
        return [*old, *(one for one in new if one not in old)]
    found = list(old)
    for one in new:
        same = next((i for i, was in enumerate(found) if was.get(key) == one.get(key)), None)
        if one.get("$patch") == "delete":
            found = [was for was in found if was.get(key) != one.get(key)]
        elif same is None:
            found.append(one)
        else:
            found[same] = _strategic(found[same], one, schema.get("items") or {})
    return found
