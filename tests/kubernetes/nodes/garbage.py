"""Objects whose owners have gone go too, in the background; and what waits for its own to go."""

from __future__ import annotations

from tests.kubernetes.server.kinds import Obj
from tests.kubernetes.server.registry import FOREGROUND, Registry
from tests.kubernetes.server.store import Change, Place, Refusal, place_of


class Garbage:
    """The collector: sees each change."""

    def __init__(self, registry: Registry) -> None:
        self._registry, self._store = registry, registry.store

    def see(self, change: Change) -> None:
        meta = change.obj["metadata"]
        if change.type != "DELETED":
            if "deletionTimestamp" in meta and FOREGROUND in meta.get("finalizers", ()):
                self._empty(change.obj)
            owners = meta.get("ownerReferences", ())
            if owners and not any(one["uid"] in self._store.uids for one in owners):
                self._delete(change.key, place_of(change.obj))
            return
        for key, place in sorted(self._store.owned.pop(meta["uid"], ())):
            found = self._store.objects[key].get(place)
            refs = (found or change.obj)["metadata"].get("ownerReferences", ())
            if not any(one["uid"] in self._store.uids for one in refs):
                self._delete(key, place)
        self._release(change.obj)
        if change.key == ("", "nodes"):
            for pod in list(self._store.all(("", "pods"))):
                if pod["spec"].get("nodeName") == meta["name"]:
                    self._delete(("", "pods"), place_of(pod), {"gracePeriodSeconds": 0})

    def _below(self, owner: Obj) -> list[tuple[tuple[str, str], Place]]:
        """What has to be gone before an object may go."""
        meta = owner["metadata"]
        if owner["kind"] == "Namespace":
            return [(key, place) for key, found in self._store.objects.items()
                    for place in found if place[0] == meta["name"]]  # fmt: skip
        return sorted(self._store.owned.get(meta["uid"], ()))

    def _empty(self, owner: Obj) -> None:
        below = self._below(owner)
        for key, place in below:
            obj = self._store.objects[key].get(place)
            if obj is not None and "deletionTimestamp" not in obj["metadata"]:
                self._delete(key, place)
        if not below:
            self._free(owner)

    def _release(self, gone: Obj) -> None:
        """The owners that waited for this one."""
        wanted = {one["uid"] for one in gone["metadata"].get("ownerReferences", ())}
        home = gone["metadata"].get("namespace", "")
        for found in list(self._store.objects.values()):
            for obj in list(found.values()):
                meta = obj["metadata"]
                if FOREGROUND not in meta.get("finalizers", ()):
                    continue
                if meta["uid"] in wanted or (obj["kind"], meta["name"]) == ("Namespace", home):
                    self._empty(obj)

    def _free(self, owner: Obj) -> None:
        def freed(obj: Obj) -> None:
            left = [one for one in obj["metadata"].get("finalizers", ()) if one != FOREGROUND]
            obj["metadata"]["finalizers"] = left

        for key, kind in self._registry.by_key.items():
            if (kind.name, kind.api_version) == (owner["kind"], owner["apiVersion"]):
                if place_of(owner) in self._store.objects[key]:
                    self._registry.edit(kind, place_of(owner), freed)
                return

    def _delete(self, key: tuple[str, str], place: Place, asked: Obj | None = None) -> None:
        try:
            self._registry.delete(self._registry.by_key[key], place, asked or {})
        except Refusal:  # it is gone
            pass
