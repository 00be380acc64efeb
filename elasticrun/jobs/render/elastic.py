"""Renders a job as an ElasticJob, for clusters that run the operator.

The pod template is that of the Indexed Job without the settings that the operator gives to agents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Final

from elasticrun.jobs.render import pods
from elasticrun.jobs.render.checks import Invalid
from elasticrun.jobs.render.pods import Gang, PodNames
from elasticrun.jobs.render.settings import JOB_UID, MASTER_PORT, PodSettings

API: Final = "elasticrun.dev/v1alpha1"
KIND: Final = "ElasticJob"

UNIT: Final = "--node-unit="

NO_TLS: Final = "its master has a separate pod, without these files"


def elastic_document(settings: PodSettings) -> dict[str, Any]:
    """The ElasticJob. Raises Invalid for settings that only an Indexed Job supports."""
    _refuse(settings)
    launch, most = settings.launch, settings.launch.max_nodes
    unit = next((word.removeprefix(UNIT) for word in launch.flags if word.startswith(UNIT)), "1")
    counts = settings.backoff_limit is not None or settings.retries
    policy = {
        "activeDeadlineSeconds": settings.deadline or None,
        "ttlSecondsAfterFinished": settings.ttl,
        "backoffLimit": settings.failures_allowed if counts else None,
    }
    gang = {"scheduler": settings.gang, "queue": settings.queue}
    spec = {
        "nodes": min(settings.replicas, most),
        "minNodes": launch.min_nodes,
        "spares": max(0, settings.replicas - most) or None,
        "nodeUnit": int(unit),
        "suspend": settings.suspend or None,
        "runPolicy": pods.without_empty(policy),
        "gang": None if settings.gang == "none" else pods.without_empty(gang),
        "template": _template(settings),
    }
    metadata = pods.common_metadata(settings) | pods.without_empty(
        {"annotations": dict(settings.annotations)}
    )
    return {"apiVersion": API, "kind": KIND, "metadata": metadata, "spec": pods.without_empty(spec)}


def _refuse(settings: PodSettings) -> None:
    for flag, given, why in (
        ("--rbac", settings.rbac, "only its operator has rights in the cluster"),
        ("--port", settings.port != MASTER_PORT, "its master has a separate pod and port"),
        ("--master-store", settings.launch.by_etcd, "its master has a separate pod"),
        ("TLS flags", has_tls(settings.launch.flags), NO_TLS),
    ):
        if given:
            raise Invalid(
                f"{flag}: not for an ElasticJob, because {why}; --plain makes an Indexed Job"
            )


def own_words(words: Iterable[str]) -> list[str]:
    """A launcher's words before its script, the first word that ends in `.py`."""
    return list(itertools.takewhile(lambda word: not word.endswith(".py"), words))


def has_tls(words: Iterable[str]) -> bool:
    """Whether a launcher's words name TLS files."""
    return any(word.replace("_", "-").startswith("--tls-") for word in own_words(words))


def _template(settings: PodSettings) -> dict[str, Any]:
    made = pods.template(settings, PodNames("", ""), Gang())
    (container,) = made["spec"]["containers"]
    launch = settings.launch
    words = [f"--nproc-per-node={launch.nproc_per_node}"]
    words += [word for word in launch.flags if not word.startswith(UNIT)]
    container["args"] = list(map(pods.literal, (*words, *launch.program)))
    container["env"] = [one for one in container.get("env", ()) if one["name"] != JOB_UID]
    del container["ports"]
    return made
