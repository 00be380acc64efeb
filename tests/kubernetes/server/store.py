"""Objects with versions, what changed since a version, and how those who watch hear of it.

Everything runs on one event loop: nothing here is locked.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.kubernetes.server.kinds import Key, Obj

Place = tuple[str, str]
"""Namespace ('' for a cluster's own) and name."""

KEPT = 50_000
"""Changes that a watch can begin at; older ones are 410 Gone."""


class Refusal(Exception):
    """An answer that is a Status of a failure."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: Obj | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.details = code, reason, details or {}
        self.retry_after = retry_after

    def status(self) -> Obj:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


class Change(NamedTuple):
    """One object made, changed or gone."""

    version: int
    type: str
    key: Key
    obj: Obj
    old: Obj | None


class Store:
    """What etcd and the watch cache are to an API server. Objects in it are never changed in
    place: who wants another one makes a copy."""

    def __init__(self) -> None:
        self.version = 1000
        self.objects: dict[Key, dict[Place, Obj]] = defaultdict(dict)
        self.changes: list[Change] = []
        self.oldest = self.version
        self.owned: dict[str, set[tuple[Key, Place]]] = defaultdict(set)
        self.uids: set[str] = set()
        self._pulse = asyncio.Event()

    def put(self, key: Key, obj: Obj) -> Obj:
        """Store an object at the next version; the caller gives it away."""
        place = place_of(obj)
        old = self.objects[key].get(place)
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        if old is not None:
            self._disown(key, place, old)
        self.objects[key][place] = obj
        self.uids.add(obj["metadata"]["uid"])
        for one in obj["metadata"].get("ownerReferences", ()):
            self.owned[one["uid"]].add((key, place))
        self._tell("ADDED" if old is None else "MODIFIED", key, obj, old)
        return obj

    def remove(self, key: Key, place: Place) -> Obj:
        old = self.objects[key].pop(place)
        self._disown(key, place, old)
        self.uids.discard(old["metadata"]["uid"])
        self.version += 1
        last = {**old, "metadata": {**old["metadata"], "resourceVersion": str(self.version)}}
        self._tell("DELETED", key, last, old)
        return last

    def _disown(self, key: Key, place: Place, old: Obj) -> None:
        for one in old["metadata"].get("ownerReferences", ()):
            self.owned[one["uid"]].discard((key, place))

    def _tell(self, kind: str, key: Key, obj: Obj, old: Obj | None) -> None:
        self.changes.append(Change(self.version, kind, key, obj, old))
        if len(self.changes) > 2 * KEPT:
            del self.changes[:KEPT]
            self.oldest = max(self.oldest, self.changes[0].version - 1)
        self.wake()

    def forget(self) -> None:
        """Who wants to hear of what has been so far is told 410; the controllers go on."""
        self.oldest = self.version

    def wake(self) -> None:
        """All that wait for a change look again."""
        pulse, self._pulse = self._pulse, asyncio.Event()
        pulse.set()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._pulse.wait()

    def check(self, version: int) -> None:
        """Refusal 410 where what changed after this version is forgotten."""
        if version < self.oldest:
            raise Refusal(410, "Expired", f"too old resource version: {version} ({self.oldest})")

    def since(self, version: int) -> list[Change]:
        """What changed after a version."""
        first = len(self.changes)
        while first and self.changes[first - 1].version > version:
            first -= 1
        return self.changes[first:]

    def at(self, key: Key, version: int) -> list[Obj]:
        """The objects of a kind as they were at a version, by place."""
        found = dict(self.objects[key])
        for change in reversed(self.changes):
            if change.version <= version:
                break
            if change.key == key:
                if change.old is None:
                    del found[place_of(change.obj)]
                else:
                    found[place_of(change.obj)] = change.old
        return [found[place] for place in sorted(found)]

    def all(self, key: Key, namespace: str = "") -> Iterator[Obj]:
        for (own, _), obj in sorted(self.objects[key].items()):
            if not namespace or own == namespace:
                yield obj


def place_of(obj: Obj) -> Place:
    return (obj["metadata"].get("namespace", ""), obj["metadata"]["name"])


def dig(obj: Any, path: str) -> Any:
    """The value at `.a.b`, or None."""
    for name in path.strip(".").split("."):
        obj = obj.get(name) if isinstance(obj, dict) else None
    return obj


class Selector:
    """Label and field selectors of one request."""

    def __init__(self, labels: str, fields: str, *, custom: bool) -> None:
        self._labels = [_requirement(one) for one in re.split(r",(?![^(]*\))", labels) if one]
        self._fields = [_requirement(one) for one in fields.split(",") if one]
        for name, _, _ in self._fields:
            if custom and name not in ("metadata.name", "metadata.namespace"):
                raise Refusal(400, "BadRequest", f"field label not supported: {name}")

    def __call__(self, obj: Obj) -> bool:
        labels = obj["metadata"].get("labels") or {}
        return all(_fits(labels.get(name), op, values) for name, op, values in self._labels) and (
            all(_fits(_text(dig(obj, name)), op, values) for name, op, values in self._fields)
        )


def _text(value: Any) -> str:
    return "" if value is None else str(value).lower() if value is True else str(value)


def _requirement(text: str) -> tuple[str, str, set[str]]:
    text = text.strip()
    if found := re.fullmatch(r"(\S+)\s+(in|notin)\s*\(([^)]*)\)", text):
        return found[1], found[2], {one.strip() for one in found[3].split(",")}
    if found := re.fullmatch(r"([^=!\s]+)\s*(==|=|!=)\s*([^=!\s]*)", text):
        return found[1], "notin" if found[2] == "!=" else "in", {found[3]}
    if found := re.fullmatch(r"(!?)\s*([\w./-]+)", text):
        return found[2], "absent" if found[1] else "present", set()
    raise Refusal(400, "BadRequest", f"unable to parse requirement: {text!r}")


def _fits(value: str | None, op: str, values: set[str]) -> bool:
    if op in ("present", "absent"):
        return (value is not None) == (op == "present")
    return (value in values) == (op == "in")
