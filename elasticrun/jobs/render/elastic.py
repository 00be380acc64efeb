"""Renders a job as an ElasticJob, for clusters with its operator.

The pod template is that of the Indexed Job without the settings that the operator gives its agents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Final

from elasticrun.jobs.render import pods
from elasticrun.jobs.render.checks import Invalid
from elasticrun.jobs.render.pods import Gang, PodNames
from elasticrun.jobs.render.wanted import JOB_UID, MASTER_PORT, Pods

API: Final = "elasticrun.dev/v1alpha1"
KIND: Final = "ElasticJob"

UNIT: Final = "--node-unit="

NO_TLS: Final = "its master has a pod of its own, without these files"


def elastic_document(wanted: Pods) -> dict[str, Any]:
    """The ElasticJob. Raises Invalid for settings that only an Indexed Job supports."""
    _refuse(wanted)
    launch, most = wanted.launch, wanted.launch.max_nodes
    unit = next((word.removeprefix(UNIT) for word in launch.flags if word.startswith(UNIT)), "1")
    counts = wanted.backoff_limit is not None or wanted.retries
    policy = {
        "activeDeadlineSeconds": wanted.deadline or None,
        "ttlSecondsAfterFinished": wanted.ttl,
        "backoffLimit": wanted.failures_allowed if counts else None,
    }
    gang = {"scheduler": wanted.gang, "queue": wanted.queue}
    spec = {
        "nodes": min(wanted.replicas, most),
        "minNodes": launch.min_nodes,
        "spares": max(0, wanted.replicas - most) or None,
        "nodeUnit": int(unit),
        "suspend": wanted.suspend or None,
        "runPolicy": pods.said(policy),
        "gang": None if wanted.gang == "none" else pods.said(gang),
        "template": _template(wanted),
    }
    metadata = pods.common_metadata(wanted) | pods.said({"annotations": dict(wanted.annotations)})
    return {"apiVersion": API, "kind": KIND, "metadata": metadata, "spec": pods.said(spec)}


def _refuse(wanted: Pods) -> None:
    for flag, given, why in (
        ("--rbac", wanted.rbac, "its pods have no rights in the cluster, its operator has them"),
        ("--port", wanted.port != MASTER_PORT, "its master has a pod and a port of its own"),
        ("--master-store", wanted.launch.by_etcd, "its master has a pod of its own"),
        ("--tls-cert and its like", has_tls(wanted.launch.flags), NO_TLS),
    ):
        if given:
            raise Invalid(f"{flag}: an ElasticJob has none, {why}; --plain makes an Indexed Job")


def own_words(words: Iterable[str]) -> list[str]:
    """A launcher's words before its script; later words belong to the script."""
    return list(itertools.takewhile(lambda word: not word.endswith(".py"), words))


def has_tls(words: Iterable[str]) -> bool:
    """Whether a launcher's words name TLS files."""
    return any(word.replace("_", "-").startswith("--tls-") for word in own_words(words))


def _template(wanted: Pods) -> dict[str, Any]:
    made = pods.template(wanted, PodNames("", ""), Gang())
    (container,) = made["spec"]["containers"]
    launch = wanted.launch
    words = [f"--nproc-per-node={launch.nproc_per_node}"]
    words += [word for word in launch.flags if not word.startswith(UNIT)]
    container["args"] = list(map(pods.literal, (*words, *launch.program)))
    container["env"] = [one for one in container.get("env", ()) if one["name"] != JOB_UID]
    del container["ports"]
    return made
