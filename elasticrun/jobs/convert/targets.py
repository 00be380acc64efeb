"""The conversion targets: an ElasticJob, or the words of `elasticrun render slurm`."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

from elasticrun.jobs.convert.command import script_at
from elasticrun.jobs.convert.document import Document, NotConvertible
from elasticrun.jobs.convert.sources import ForeignJob

API: Final = "elasticrun.dev/v1alpha1"

GPUS: Final = re.compile(r"(nvidia\.com/(gpu|mig-.*)|amd\.com/gpu|huawei\.com/Ascend.*)$")
"""Names of resources that Slurm counts as GPUs."""


UNSUPPORTED_FIELDS: Final = {
    "image": "install its content on the nodes, or use a container plugin of the cluster",
    "volumeMounts": "paths are those of the nodes",
    "workingDir": "set a folder of the nodes with #SBATCH --chdir",
}
"""Fields of a container without a counterpart in Slurm, and what to do instead."""

_SIMPLE: Final = re.compile(r"\s*(?:exec\s+)?elasticrun(?:\\\n|[^\n;&|<>`$()])*\n?")
"""Shell text that consists of a single elasticrun command."""


def elastic_job(job: ForeignJob) -> dict[str, Any]:
    """Build the ElasticJob."""
    meta: dict[str, Any] = {"name": job.name}
    for name, value in (("namespace", job.namespace), ("labels", job.labels),
                        ("annotations", job.annotations)):  # fmt: skip
        if value:
            meta[name] = value
    spec: dict[str, Any] = {"nodes": max(job.nodes, 1)}
    if 0 < job.min_nodes < job.nodes:
        spec["minNodes"] = job.min_nodes
    if job.suspend:
        spec["suspend"] = True
    if job.success:
        spec["successPolicy"] = job.success
    if job.gang:
        spec["gang"] = {"scheduler": "volcano", **({"queue": job.queue} if job.queue else {})}
    if job.policy:
        spec["runPolicy"] = job.policy
    spec["template"] = job.template
    return {"apiVersion": API, "kind": "ElasticJob", "metadata": meta, "spec": spec}


def slurm_words(job: ForeignJob, document: Document) -> list[str]:
    """The words after `elasticrun render slurm`. Adds notes to `document` about what is left out.
    Raises NotConvertible unless the container's command is a single elasticrun command."""
    pod = job.template["spec"]
    main = pod["containers"][0]
    words, path = [*main.get("command", ()), *main.get("args", ())], "spec.template.spec.containers"
    if words[1:2] == ["-c"] and len(words) == 3 and _SIMPLE.fullmatch(words[2]):
        words = shlex.split(words[2])
    if words[:1] != ["elasticrun"]:
        raise NotConvertible(
            f"{document.where(path)}: its command is not a single elasticrun with a script: put "
            "it into a script"
        )
    low, high = job.min_nodes, max(job.nodes, 1)
    made = ["--name", job.name, "--nnodes", f"{low}:{high}" if 0 < low < high else str(high)]
    at = 1 + script_at(words[1:])
    module = words[at : at + 1] in (["-m"], ["--module"])
    made += [*words[1:at], *words[at : at + module], *_resources(main, document, path)]
    if deadline := job.policy.get("activeDeadlineSeconds"):
        made += ["--time", str(math.ceil(deadline / 60))]
    for entry in main.get("env", ()):
        if isinstance(entry, Mapping) and isinstance(entry.get("value"), str):
            made += ["--env", f"{entry.get('name')}={entry['value']}"]
        else:
            document.note(f"{path}.env", f"left out: {entry}: only plain values are carried over")
    for name in sorted(
        set(main) - {"name", "command", "args", "env", "resources", "imagePullPolicy"}
    ):
        why = UNSUPPORTED_FIELDS.get(name, "Slurm nodes have no equivalent")
        document.note(f"{path}.{name}", f"left out: {why}")
    others = sorted(set(pod) - {"containers", "volumes"})
    others += ["side containers"] if len(pod["containers"]) > 1 else []
    others += [name for name, given in (
        ("metadata.namespace", job.namespace), ("suspend", job.suspend), ("gang", job.gang),
        ("successPolicy", job.success),
        *((f"runPolicy.{one}", one != "activeDeadlineSeconds") for one in job.policy),
    ) if given]  # fmt: skip
    if others:
        document.note("spec", f"left out: {', '.join(others)}: Slurm has no equivalent")
    return [*made, "--", *words[at + module :]]


def _resources(main: Mapping[str, Any], document: Document, path: str) -> Iterator[str]:
    parts = [main.get("resources", {}).get(part) for part in ("requests", "limits")]
    amounts = {
        name: size for part in parts if isinstance(part, dict) for name, size in part.items()
    }
    for name, amount in amounts.items():
        if name == "cpu" and str(amount).isdecimal():
            yield from ("--cpus-per-task", str(amount))
        elif name == "memory" and (size := re.fullmatch(r"(\d+)([KMGT])i?", str(amount))):
            yield from ("--mem", size[1] + size[2])
        elif GPUS.match(name):
            yield from ("--gpus-per-node", str(amount))
        else:
            document.note(f"{path}.resources", f"left out: {name}: {amount}")
