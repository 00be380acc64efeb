"""Create, update, patch and delete as an API server does them: the meaning above the store."""

from __future__ import annotations

import copy
import datetime
import random
import uuid
from dataclasses import dataclass, field
from typing import Any

from tests.kubernetes.server import patches, schema
from tests.kubernetes.server.kinds import BUILT_IN, CRDS, Key, Kind, Obj, of_crd
from tests.kubernetes.server.store import Place, Refusal, Store, dig, place_of

LETTERS = "bcdfghjklmnpqrstvwxz2456789"
FOREGROUND = "foregroundDeletion"
FINAL = ("Succeeded", "Failed")
KEPT_BY_SERVER = (
    *("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"),
    *("generation", "namespace", "name"),
)


def now(later: float = 0.0) -> str:
    """Seconds only, as in metadata."""
    when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=later)
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Options:
    """How a write was asked for. `strict`: fieldValidation."""

    dry_run: bool = False
    strict: str = "Ignore"
    warnings: list[str] = field(default_factory=list)


PLAIN = Options()


class Registry:
    """All writes go through here."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self._rng = random.Random(seed)
        self.kinds: dict[tuple[str, str, str], Kind] = {
            (one.group, one.version, one.plural): one for one in BUILT_IN
        }
        self.by_key: dict[Key, Kind] = {one.key: one for one in BUILT_IN}
        for name in ("default", "kube-system", "kube-node-lease"):
            self.create(self.kind("namespaces"), "", {"metadata": {"name": name}})

    def kind(self, plural: str, group: str = "") -> Kind:
        return self.by_key[group, plural]

    def get(self, kind: Kind, namespace: str, name: str) -> Obj:
        """As it is in the store: not to be changed."""
        found = self.store.objects[kind.key].get((namespace, name))
        if found is None:
            details = {"name": name, "group": kind.group, "kind": kind.plural}
            message = f'{kind.resource} "{name}" not found'
            raise Refusal(404, "NotFound", message, details=details)
        return found

    # ------------------------------------------------------------ writes

    def create(self, kind: Kind, namespace: str, body: Obj, options: Options = PLAIN) -> Obj:
        obj = self._read(kind, namespace, body, options)
        meta = obj["metadata"]
        if "name" not in meta and meta.get("generateName"):
            tail = "".join(self._rng.choices(LETTERS, k=5))
            meta["name"] = meta["generateName"][:58] + tail
        if not meta.get("name"):
            raise Refusal(422, "Invalid", f"{kind.name} is invalid: metadata.name: Required value: "
                          "name or generateName is required")  # fmt: skip
        if meta.pop("resourceVersion", ""):
            raise Refusal(
                400, "BadRequest", "resourceVersion should not be set on objects to be created"
            )
        for name in ("uid", "creationTimestamp", "deletionTimestamp", "selfLink", "managedFields"):
            meta.pop(name, None)
        # unique on this machine: a pod's processes are found by it, also those of other tests
        meta |= {"uid": str(uuid.uuid4())}
        meta |= {"creationTimestamp": now(), "generation": 1}
        if kind.status:
            obj.pop("status", None)
        self._fill(kind, obj)
        if (place := place_of(obj)) in self.store.objects[kind.key]:
            details = {"name": meta["name"], "group": kind.group, "kind": kind.plural}
            message = f'{kind.resource} "{meta["name"]}" already exists'
            raise Refusal(409, "AlreadyExists", message, details=details)
        self._home(kind, place[0], meta["name"])
        schema.validate(kind, obj, None)
        _begin(kind, obj)
        if options.dry_run:
            return obj
        self.store.put(kind.key, obj)
        if kind.key == CRDS:
            self._serve(obj)
        if kind.plural == "namespaces":
            accounts = self.kind("serviceaccounts")
            self.create(accounts, meta["name"], {"metadata": {"name": "default"}})
        return obj

    def update(
        self,
        kind: Kind,
        place: Place,
        body: Obj,
        sub: str = "",
        options: Options = PLAIN,
    ) -> Obj:
        """Replace an object, or with `sub` its status; the object as it is then."""
        old = self.get(kind, *place)
        new = self._read(kind, place[0], body, options)
        meta, was = new["metadata"], old["metadata"]
        self._match(kind, place[1], meta, was)
        if sub == "status":
            new = {**copy.deepcopy(old), "status": new.get("status", {})}
        else:
            if kind.status:
                new.pop("status", None)
                new |= {"status": copy.deepcopy(old["status"])} if "status" in old else {}
            for name in KEPT_BY_SERVER:
                meta.pop(name, None)
                meta |= {name: was[name]} if name in was else {}
            meta.pop("managedFields", None)
        self._fill(kind, new)
        schema.validate(kind, new, old)
        new["metadata"]["resourceVersion"] = was["resourceVersion"]
        if new == old or options.dry_run:
            return new
        if _meant(new) != _meant(old):
            new["metadata"]["generation"] = was.get("generation", 1) + 1
        self.store.put(kind.key, new)
        if kind.key == CRDS:
            self._serve(new)
        self._end(kind, new)
        return new

    def patch(
        self,
        kind: Kind,
        place: Place,
        content_type: str,
        patch: Any,
        sub: str = "",
        options: Options = PLAIN,
    ) -> Obj:
        if content_type == patches.APPLY and place not in self.store.objects[kind.key] and not sub:
            return self.create(kind, place[0], patch, options)
        old = self.get(kind, *place)
        known = None if kind.schema is not None else schema.schema_of(kind)
        return self.update(
            kind, place, patches.apply(content_type, old, patch, known), sub, options
        )

    def edit(self, kind: Kind, place: Place, change: Any, sub: str = "") -> Obj | None:
        """For controllers: `change` is called with a copy; None where the object has gone."""
        old = self.store.objects[kind.key].get(place)
        if old is None:
            return None
        new = copy.deepcopy(old)
        change(new)
        return self.update(kind, place, new, sub)

    def delete(self, kind: Kind, place: Place, asked: Obj, options: Options = PLAIN) -> Obj:
        """The object as it was last. `asked`: DeleteOptions."""
        old = self.get(kind, *place)
        self._match(kind, place[1], asked.get("preconditions") or {}, old["metadata"])
        if options.dry_run:
            return old
        new = copy.deepcopy(old)
        meta = new["metadata"]
        policy = asked.get("propagationPolicy") or "Background"
        if policy == "Foreground" and FOREGROUND not in meta.get("finalizers", ()):
            meta["finalizers"] = [*meta.get("finalizers", ()), FOREGROUND]
        if policy == "Orphan":
            self._orphan(meta["uid"])
        grace = 0
        if kind.key == ("", "pods") and _is_somewhere(new):
            default = new["spec"]["terminationGracePeriodSeconds"]
            wanted = asked.get("gracePeriodSeconds")
            grace = default if wanted is None else wanted
        if "deletionGracePeriodSeconds" in meta:
            grace = min(grace, meta["deletionGracePeriodSeconds"])
        if "deletionTimestamp" not in meta or grace < meta.get("deletionGracePeriodSeconds", 0):
            meta |= {"deletionTimestamp": now(grace), "deletionGracePeriodSeconds": grace}
            meta["generation"] = meta.get("generation", 1) + 1
            if kind.plural == "namespaces":
                meta["finalizers"] = [FOREGROUND]
                new["status"] = {"phase": "Terminating"}
            if grace or meta.get("finalizers"):
                self.store.put(kind.key, new)
            self._end(kind, new)
        elif not grace:
            self._end(kind, new)
        return new

    # ------------------------------------------------------------ what they are made of

    def _read(self, kind: Kind, namespace: str, body: Any, options: Options) -> Obj:
        """A copy of what was sent, without what the kind has not."""
        if not isinstance(body, dict) or not isinstance(body.get("metadata", {}), dict):
            raise Refusal(400, "BadRequest", "the body of the request is no object")
        for name, own in (("kind", kind.name), ("apiVersion", kind.api_version)):
            if (told := body.get(name, own)) != own:
                message = f"the {name} in the data ({told}) does not match the expected one ({own})"
                raise Refusal(400, "BadRequest", message)
        unknown: list[str] = []
        obj = copy.deepcopy(body)
        obj = obj if kind.schema is not None else schema.without_nulls(obj)
        known, custom = schema.schema_of(kind), kind.schema is not None
        obj = schema.without_unknown(obj, known, "", unknown, crd=custom)
        said = [f'unknown field "{path}"' for path in unknown]
        if said and options.strict == "Strict":
            message = (
                f'{kind.name} in version "{kind.version}" cannot be handled as a {kind.name}: '
                f"strict decoding error: {', '.join(said)}"
            )
            raise Refusal(400, "BadRequest", message)
        if options.strict == "Warn":
            options.warnings.extend(said)
        obj = {"apiVersion": kind.api_version, "kind": kind.name, **obj}
        meta = obj.setdefault("metadata", {})
        if kind.namespaced:
            if meta.setdefault("namespace", namespace) != namespace:
                raise Refusal(400, "BadRequest", "the namespace of the provided object does not "
                              "match the namespace sent on the request")  # fmt: skip
        else:
            meta.pop("namespace", None)
        return obj

    def _match(self, kind: Kind, name: str, asked: Obj, was: Obj) -> None:
        """Refusal 409 where a write is meant for another object or version."""
        details = {"name": name, "group": kind.group, "kind": kind.plural}
        failed = f'Operation cannot be fulfilled on {kind.resource} "{name}": '
        for field_, label in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            if asked.get(field_, was[field_]) == was[field_]:
                continue
            said = (
                f"Precondition failed: {label} in precondition: {asked[field_]}, "
                f"in object meta: {was[field_]}"
            )
            if field_ == "resourceVersion":
                said = (
                    "the object has been modified; please apply your changes to the latest "
                    "version and try again"
                )
            raise Refusal(409, "Conflict", failed + said, details=details)

    def _home(self, kind: Kind, namespace: str, name: str) -> None:
        if not kind.namespaced:
            return
        home = self.get(self.kind("namespaces"), "", namespace)
        if "deletionTimestamp" in home["metadata"]:
            message = (
                f'{kind.resource} "{name}" is forbidden: unable to create new content in namespace '
                f"{namespace} because it is being terminated"
            )
            raise Refusal(403, "Forbidden", message)

    def _fill(self, kind: Kind, obj: Obj) -> None:
        if kind.schema is not None:
            schema.fill(obj, kind.schema)
        elif kind.key == ("", "pods"):
            _fill_pod(obj.setdefault("spec", {}))
        elif kind.key == ("", "services"):
            spec = obj.setdefault("spec", {})
            spec.setdefault("type", "ClusterIP")
            for one in spec.get("ports") or ():
                one.setdefault("protocol", "TCP")
                one.setdefault("targetPort", one["port"])
            if "clusterIP" not in spec:
                number = self._rng.randrange(1, 2**16 - 1)
                spec["clusterIP"] = f"10.96.{number >> 8}.{number & 255}"
        elif kind.key == ("", "secrets"):
            import base64

            for name, text in (obj.pop("stringData", None) or {}).items():
                obj.setdefault("data", {})[name] = base64.b64encode(text.encode()).decode()
            obj.setdefault("type", "Opaque")
        elif kind.key == ("batch", "jobs"):
            spec = obj.setdefault("spec", {})
            for name, value in (("parallelism", 1), ("backoffLimit", 6), ("suspend", False)):
                spec.setdefault(name, value)
            spec.setdefault("completionMode", "NonIndexed")
        elif kind.key == ("apps", "deployments"):
            obj.setdefault("spec", {}).setdefault("replicas", 1)

    def _orphan(self, uid: str) -> None:
        for key, place in list(self.store.owned.get(uid, ())):

            def free(obj: Obj) -> None:
                refs = [one for one in obj["metadata"]["ownerReferences"] if one["uid"] != uid]
                obj["metadata"]["ownerReferences"] = refs

            self.edit(self.by_key[key], place, free)

    def _end(self, kind: Kind, obj: Obj) -> None:
        """Remove what is to be deleted, where nothing holds it any more."""
        meta = obj["metadata"]
        if "deletionTimestamp" not in meta or meta.get("finalizers"):
            return
        graceful = kind.key == ("", "pods") and meta.get("deletionGracePeriodSeconds", 0)
        if graceful and _is_somewhere(obj):
            return
        if place_of(obj) in self.store.objects[kind.key]:
            self.store.remove(kind.key, place_of(obj))
        if kind.key == CRDS:
            for one in of_crd(obj):
                for there in list(self.store.objects[one.key]):
                    self.store.remove(one.key, there)
                self.kinds.pop((one.group, one.version, one.plural), None)
                self.by_key.pop(one.key, None)

    def _serve(self, crd: Obj) -> None:
        """Its kinds can be asked for at once."""
        served = of_crd(crd)
        for one in served:
            self.kinds[one.group, one.version, one.plural] = one
        self.by_key[served[0].key] = served[0]
        if crd.get("status", {}).get("conditions"):
            return
        conditions = [
            {
                "type": name,
                "status": "True",
                "reason": reason,
                "message": "",
                "lastTransitionTime": now(),
            }
            for name, reason in (
                ("NamesAccepted", "NoConflicts"),
                ("Established", "InitialNamesAccepted"),
            )
        ]

        def established(obj: Obj) -> None:
            names = obj["spec"]["names"]
            obj["status"] = {"conditions": conditions, "acceptedNames": names,
                             "storedVersions": [served[0].version]}  # fmt: skip

        self.edit(
            self.kind("customresourcedefinitions", CRDS[0]), place_of(crd), established, "status"
        )

    # ------------------------------------------------------------ scale

    def scale(self, kind: Kind, place: Place) -> Obj:
        """The Scale of an object, by the paths of its CRD."""
        obj, paths = self.get(kind, *place), kind.scale or {}
        meta = obj["metadata"]
        kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        status = {"replicas": dig(obj, paths["statusReplicasPath"]) or 0}
        if selector := dig(obj, paths.get("labelSelectorPath", ".none")):
            status["selector"] = selector
        return {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {name: meta[name] for name in kept if name in meta},
            "spec": {"replicas": dig(obj, paths["specReplicasPath"]) or 0},
            "status": status,
        }

    def rescale(self, kind: Kind, place: Place, scale: Obj, options: Options = PLAIN) -> Obj:
        """Write `spec.replicas` of a Scale where the object has it."""
        old = self.get(kind, *place)
        self._match(kind, place[1], scale.get("metadata") or {}, old["metadata"])
        wanted = dig(scale, ".spec.replicas") or 0
        if not isinstance(wanted, int) or wanted < 0:
            raise Refusal(422, "Invalid", f"spec.replicas: Invalid value: {wanted}: must be >= 0")
        *outer, last = (kind.scale or {})["specReplicasPath"].strip(".").split(".")
        new = at = copy.deepcopy(old)
        for name in outer:
            at = at.setdefault(name, {})
        at[last] = wanted
        self.update(kind, place, new, "", options)
        return self.scale(kind, place)


def _is_somewhere(pod: Obj) -> bool:
    """A kubelet has something to end."""
    return "nodeName" in pod["spec"] and pod["status"]["phase"] not in FINAL


def _meant(obj: Obj) -> Obj:
    return {name: value for name, value in obj.items() if name not in ("metadata", "status")}


def _fill_pod(spec: Obj) -> None:
    for name, value in (
        ("restartPolicy", "Always"),
        ("terminationGracePeriodSeconds", 30),
        ("dnsPolicy", "ClusterFirst"),
        ("schedulerName", "default-scheduler"),
        ("serviceAccountName", "default"),
        ("enableServiceLinks", True),
    ):
        spec.setdefault(name, value)
    for part in ("initContainers", "containers"):
        for one in spec.get(part) or ():
            one.setdefault("imagePullPolicy", "IfNotPresent")
            resources = one.setdefault("resources", {})
            if limits := resources.get("limits"):
                resources["requests"] = {**limits, **resources.get("requests", {})}


def _begin(kind: Kind, obj: Obj) -> None:
    """The status that an object is born with."""
    if kind.key == ("", "pods"):
        obj["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
    elif kind.key == ("", "namespaces"):
        obj["status"] = {"phase": "Active"}
        obj.setdefault("spec", {"finalizers": ["kubernetes"]})
    elif kind.key == ("", "persistentvolumeclaims"):
        obj["status"] = {"phase": "Bound"}
    elif kind.status and kind.schema is None:
        obj["status"] = {}
