"""Who may do what: Roles, ClusterRoles and their bindings, as they are in the store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.kubernetes.server.kinds import Obj
from tests.kubernetes.server.store import Refusal, Store

GROUP = "rbac.authorization.k8s.io"
MASTERS = "system:masters"


class Who(NamedTuple):
    """Whom a token stands for."""

    name: str
    groups: tuple[str, ...] = ()


class Ask(NamedTuple):
    """What somebody wants to do. `resource`: with its subresource, as `pods/log`."""

    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""


def account(namespace: str, name: str) -> Who:
    """A service account."""
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}")
    return Who(f"system:serviceaccount:{namespace}:{name}", groups)


def may(store: Store, who: Who, ask: Ask) -> bool:
    if MASTERS in who.groups or ask.group == "authorization.k8s.io":
        return True
    return any(_allows(rule, ask) for rule in _rules(store, who, ask.namespace))


def check(store: Store, who: Who, ask: Ask) -> None:
    """Refusal 403 where it is not allowed."""
    if may(store, who, ask):
        return
    one = f'"{ask.name}" ' if ask.name else ""
    where = f'in the namespace "{ask.namespace}"' if ask.namespace else "at the cluster scope"
    plural = ask.resource.split("/")[0]
    full = f"{plural}.{ask.group}" if ask.group else plural
    message = (
        f'{full} {one}is forbidden: User "{who.name}" cannot {ask.verb} resource "{ask.resource}" '
        f'in API group "{ask.group}" {where}'
    )
    details = {"name": ask.name, "group": ask.group, "kind": plural}
    raise Refusal(403, "Forbidden", message, details=details)


def _rules(store: Store, who: Who, namespace: str) -> Iterator[Obj]:
    bindings = list(store.all((GROUP, "clusterrolebindings")))
    if namespace:
        bindings += store.all((GROUP, "rolebindings"), namespace)
    for binding in bindings:
        home = binding["metadata"].get("namespace", "")
        if any(_is(who, one, home) for one in binding.get("subjects") or ()):
            role = binding["roleRef"]
            plural = "roles" if role["kind"] == "Role" else "clusterroles"
            place = (home if plural == "roles" else "", role["name"])
            yield from (store.objects[GROUP, plural].get(place) or {}).get("rules") or ()


def _is(who: Who, subject: Obj, home: str) -> bool:
    if subject["kind"] == "ServiceAccount":
        return who.name == account(subject.get("namespace", home), subject["name"]).name
    if subject["kind"] == "Group":
        return subject["name"] in (*who.groups, "system:authenticated")
    return bool(subject["name"] == who.name)


def _allows(rule: Obj, ask: Ask) -> bool:
    def has(field: str, *values: str) -> bool:
        return not {"*", *values}.isdisjoint(rule.get(field) or ())

    below = "*/" + ask.resource.split("/")[1] if "/" in ask.resource else ask.resource
    names = rule.get("resourceNames") or ()
    return (
        has("verbs", ask.verb)
        and has("apiGroups", ask.group)
        and has("resources", ask.resource, below)
        and (not names or ask.name in names)
    )
