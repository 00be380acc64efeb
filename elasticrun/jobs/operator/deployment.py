"""The objects that install the operator (`elasticrun render operator`): the CRD, a service account
with only the rights that the operator uses, the Deployment. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from elasticrun import __version__
from elasticrun.jobs.operator.crd import GROUP, OPERATOR, PLURAL, Json, crd

HOME: Final = "elasticrun"
"""The operator's namespace if it manages the jobs of all namespaces."""

BARE_IMAGE: Final = "python:3.12-slim"
"""The image if the user names none that contains elasticrun: the container then installs elasticrun
when it starts."""

NEEDED: Final = ("grpcio>=1.66", "msgspec>=0.19", "protobuf>=5.27", "lightkube>=1.0")

UNPRIVILEGED_UID: Final = 65532
"""The conventional uid of a user without privileges (`nonroot`) in container images."""

REMARKS: Final = {
    ("spec", "terminationGracePeriodSeconds"): "jobs keep training without the operator"
}
"""YAML comments, by the path of the field that they explain."""

RIGHTS: Final[tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = (
    (GROUP, (PLURAL,), ("get", "list", "watch", "delete")),
    (GROUP, (f"{PLURAL}/status",), ("patch",)),
    ("", ("pods",), ("get", "list", "watch", "create", "delete")),
    ("", ("services",), ("get", "create")),
    ("", ("secrets", "events"), ("create",)),
    ("scheduling.volcano.sh", ("podgroups",), ("get", "create")),
    ("scheduling.x-k8s.io", ("podgroups",), ("get", "create")),
    ("scheduling.k8s.io", ("podgroups",), ("get", "create")),
)
"""API group, resources, verbs. An account that can create pods can already read every Secret that a
pod can mount, so the right to create Secrets adds nothing. The operator reads only its own
Secret."""


@dataclass(frozen=True, slots=True)
class Installation:
    """How to install the operator. `namespace`: "" if it manages the jobs of all namespaces."""

    namespace: str = ""
    image: str = ""
    replicas: int = 1

    @property
    def home(self) -> str:
        return self.namespace or HOME


def documents(installed: Installation) -> list[Json]:
    """The objects, in the order of creation."""
    home = installed.home
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": home}}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(home)}
    rules = [
        {"apiGroups": [group], "resources": list(what), "verbs": list(verbs)}
        for group, what, verbs in RIGHTS
    ]
    made = [crd(), *([] if installed.namespace else [space]), account]
    if installed.namespace:
        made += _role("Role", home, OPERATOR, [*rules, *_own_rights(installed)])
    else:
        made += _role("ClusterRole", home, OPERATOR, rules)
        made += _role(
            "Role", home, f"{OPERATOR}-own", [_create_rule(["secrets"]), *_own_rights(installed)]
        )
    return [*made, _deployment(installed)]


def _metadata(namespace: str, name: str = OPERATOR) -> Json:
    labels = {"app.kubernetes.io/name": OPERATOR}
    space = {"namespace": namespace} if namespace else {}
    return {"name": name, **space, "labels": labels}


def _create_rule(what: list[str], group: str = "") -> Json:
    return {"apiGroups": [group], "resources": what, "verbs": ["create"]}


def _own_rights(installed: Installation) -> list[Json]:
    """The operator's rights to its own Secret and, with several replicas, to the Lease."""
    its = {"resourceNames": [OPERATOR]}
    rules: list[Json] = [
        {"apiGroups": [""], "resources": ["secrets"], **its, "verbs": ["get"]},
    ]
    if installed.replicas > 1:
        lease = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
        rules.append({**lease, **its, "verbs": ["get", "update"]})
        rules.append(_create_rule(["leases"], "coordination.k8s.io"))
    return rules


def _role(kind: str, home: str, name: str, rules: list[Json]) -> list[Json]:
    group = "rbac.authorization.k8s.io"
    space = "" if kind == "ClusterRole" else home
    subject = {"kind": "ServiceAccount", "name": OPERATOR, "namespace": home}
    role = {"apiVersion": f"{group}/v1", "kind": kind, "metadata": _metadata(space, name)}
    bound = {**role, "kind": f"{kind}Binding"}
    reference = {"apiGroup": group, "kind": kind, "name": name}
    return [role | {"rules": rules}, bound | {"roleRef": reference, "subjects": [subject]}]


def _deployment(installed: Installation) -> Json:
    labels = {"app.kubernetes.io/name": OPERATOR}
    words = ["operator"]
    words += [f"--namespace={installed.namespace}"] if installed.namespace else []
    words += ["--lease"] if installed.replicas > 1 else []
    container = {
        "name": "operator",
        "image": installed.image or BARE_IMAGE,
        **_command(installed, words),
        "env": [{"name": name, "value": "/scratch"} for name in ("HOME", "TMPDIR")],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    }
    spec = {
        "serviceAccountName": OPERATOR,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UNPRIVILEGED_UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": 10,
        "containers": [container],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
    }
    template = {"metadata": {"labels": labels}, "spec": spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(installed.home),
        "spec": {
            "replicas": installed.replicas,
            "selector": {"matchLabels": labels},
            **({"strategy": {"type": "Recreate"}} if installed.replicas == 1 else {}),
            "template": template,
        },
    }


def _command(installed: Installation, words: list[str]) -> Json:
    if installed.image:
        return {"command": ["elasticrun", *words]}
    pip = "pip install --quiet --no-cache-dir --target /scratch/site"
    script = (
        f"{pip} --no-deps elasticrun=={__version__} && {pip} {' '.join(map(repr, NEEDED))} && "
        'PYTHONPATH=/scratch/site exec python -m elasticrun "$@"'
    )
    return {"command": ["sh", "-c", script, "sh", *words]}
