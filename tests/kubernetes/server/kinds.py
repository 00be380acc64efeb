"""The kinds of object that the stand-in serves: the built-in ones, and what a CRD adds."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

Obj = dict[str, Any]
Key = tuple[str, str]
"""Group and plural: by which objects of a kind are stored."""

EVERY_VERB = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True)
class Kind:
    """One kind in one version."""

    group: str
    version: str
    name: str
    plural: str
    namespaced: bool = True
    short: tuple[str, ...] = ()
    status: bool = False
    scale: Obj | None = None
    schema: Obj | None = None
    """openAPIV3Schema of a CRD; None: built in."""
    columns: tuple[Obj, ...] = field(default=())
    categories: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        return (self.group, self.plural)

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """As messages name it: `pods`, `elasticjobs.elasticrun.dev`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def subresources(self) -> list[str]:
        extra = {"pods": ["log", "exec", "eviction"], "serviceaccounts": ["token"]}
        found = extra.get(self.plural, []) if not self.group else []
        return [*found, *(["status"] if self.status else []), *(["scale"] if self.scale else [])]


def _b(group: str, version: str, name: str, plural: str, short: str = "", **more: Any) -> Kind:
    return Kind(group, version, name, plural, short=tuple(short.split()), **more)


_REPLICAS = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
}
_RBAC = ("rbac.authorization.k8s.io", "v1")

BUILT_IN = (
    _b("", "v1", "Pod", "pods", "po", status=True, categories=("all",)),
    _b("", "v1", "Service", "services", "svc", status=True, categories=("all",)),
    _b("", "v1", "ConfigMap", "configmaps", "cm"),
    _b("", "v1", "Secret", "secrets"),
    _b("", "v1", "Event", "events", "ev"),
    _b("", "v1", "ServiceAccount", "serviceaccounts", "sa"),
    _b("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims", "pvc", status=True),
    _b("", "v1", "Node", "nodes", "no", status=True, namespaced=False),
    _b("", "v1", "Namespace", "namespaces", "ns", status=True, namespaced=False),
    _b("batch", "v1", "Job", "jobs", status=True, categories=("all",)),
    _b("apps", "v1", "Deployment", "deployments", "deploy", status=True, scale=_REPLICAS,
       categories=("all",)),
    _b("coordination.k8s.io", "v1", "Lease", "leases"),
    _b(*_RBAC, "Role", "roles"),
    _b(*_RBAC, "RoleBinding", "rolebindings"),
    _b(*_RBAC, "ClusterRole", "clusterroles", namespaced=False),
    _b(*_RBAC, "ClusterRoleBinding", "clusterrolebindings", namespaced=False),
    _b("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions",
       "crd crds", status=True, namespaced=False),
    _b("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses", "pc", namespaced=False),
)  # fmt: skip

CRDS = ("apiextensions.k8s.io", "customresourcedefinitions")


def of_crd(crd: Obj) -> list[Kind]:
    """The kinds that a CRD serves, its storage version first."""
    spec, names = crd["spec"], crd["spec"]["names"]
    served = [one for one in spec["versions"] if one["served"]]
    return [
        Kind(
            spec["group"],
            one["name"],
            names["kind"],
            names["plural"],
            namespaced=spec["scope"] == "Namespaced",
            short=tuple(names.get("shortNames", ())),
            status="status" in one.get("subresources", {}),
            scale=one.get("subresources", {}).get("scale"),
            schema=copy.deepcopy(one["schema"]["openAPIV3Schema"]),
            columns=tuple(one.get("additionalPrinterColumns", ())),
            categories=tuple(names.get("categories", ())),
        )
        for one in sorted(served, key=lambda one: not one["storage"])
    ]
