"""Pods, with and without an operator for PyTorch.

PyTorchJob (training-operator, also through Arena), Kubeflow Trainer and Volcano's PyTorch plugin
set torch's variables. Newer versions also set PET_*, the defaults of flags, here as in torchrun.
In these pods RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT count *nodes*; ranks never get these
values.
Without such an operator: LeaderWorkerSet, Volcano, Indexed Job (alone or in a JobSet), StatefulSet.

An Indexed Job and a StatefulSet give their pods only an index; the user must give the number of
nodes. Pod 0's name is this pod's own name with the last number set to 0: the kubelet writes the
name with its subdomain into the pod's /etc/hosts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from elasticrun.cli.detection.found import (
    TERMINAL,
    Found,
    Given,
    HostFacts,
    as_int,
    not_a_number,
    number,
    port_of_name,
    text,
)

POD: Final = "KUBERNETES_SERVICE_HOST"
"""A variable that the kubelet sets in every pod."""

_LOOPBACK: Final = ("localhost", "127.0.0.1")
_NAME = re.compile(r"[A-Za-z0-9_.:-]+\Z")


def kubeflow(environ: Mapping[str, str], facts: HostFacts) -> Found | None:
    """A pod with PET_NNODES and PET_MASTER_ADDR or PET_RDZV_ENDPOINT, torchrun's own variables,
    which set everything; so no values are returned."""
    nodes = text(environ, "PET_NNODES")
    where = text(environ, "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR")
    if nodes is None or where is None or POD not in environ:
        return None
    return Found(
        "Kubeflow",
        f"a pod of a training job whose operator says PET_NNODES={nodes.value}",
    )


def pytorch_job(environ: Mapping[str, str], facts: HostFacts) -> Found | None:
    """A pod of a PyTorchJob without PET_*. Outside Kubernetes RANK and the like may just as well
    come from a launcher that started this process as a rank, so they are ignored."""
    if POD not in environ:
        return None
    seen = f"pod {facts.hostname} of a PyTorchJob or the like"
    return node_level(environ, facts, "PyTorchJob", seen)


def node_level(
    environ: Mapping[str, str], facts: HostFacts, family: str, seen: str
) -> Found | None:
    """The values of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, where an operator has set them
    to count nodes; None if one is missing or invalid."""
    rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    master = text(environ, "MASTER_ADDR")
    if rank is None or size is None or master is None or not _NAME.match(master.value):
        return None
    host, name = master, Given(master.value.partition(".")[0], master.source)
    if as_int(size) > 1 and master.value in _LOOPBACK:
        # Some operators give pod 0 this address; the other pods use its name.
        if as_int(rank) != 0 or not facts.fqdn:
            return None
        host = Given(facts.fqdn, "the host name")
        name = Given(facts.hostname, "the host name")
    port = number(environ, "MASTER_PORT")
    if port is None or not 0 < as_int(port) < 65536:
        port = Given(str(port_of_name(name.value)), name.source)
    found = Found(family, seen, nodes=size, node_rank=rank)
    if as_int(size) <= 1:
        return found
    use, why = f"--nnodes={as_int(size)}", TERMINAL if facts.terminal else ""
    return replace(found, job_id=name, host=host, port=port, why_alone=why, use=use)


NO_SUBDOMAIN: Final = "the pod has no subdomain (a headless Service), so pod 0 has no name"

_NUMBERED = re.compile(r"(.+)-([0-9]{1,6})\Z")
_HOSTS = re.compile(r"VC_([A-Z0-9_]+)_HOSTS\Z")


def leader_worker_set(environ: Mapping[str, str], facts: HostFacts) -> Found | None:
    """One group of a LeaderWorkerSet; LWS_WORKER_INDEX exists since its version 0.6."""
    leader = text(environ, "LWS_LEADER_ADDRESS")
    if leader is None:
        return None
    size, index = number(environ, "LWS_GROUP_SIZE"), number(environ, "LWS_WORKER_INDEX")
    seen = f"a pod of the LeaderWorkerSet group of {leader.value}"
    found = Found("LeaderWorkerSet", seen, nodes=size, node_rank=index)
    found = _with_first_pod(found, leader, leader.value)
    if size is None:
        why = not_a_number(environ, "LWS_GROUP_SIZE")
        return replace(found, why_alone=why, use="--nnodes=N")
    return _for_all_pods(found, facts)


def volcano(environ: Mapping[str, str], facts: HostFacts) -> Found | None:
    """A task of a Volcano job with the plugins svc and env, or with the PyTorch plugin."""
    index = number(environ, "VC_TASK_INDEX", "VK_TASK_INDEX")
    if index is None:
        return None
    seen = f"pod {facts.hostname} of a Volcano job"
    counted = node_level(environ, facts, "Volcano", seen)
    if counted is not None:
        return counted
    tasks = sorted(name for name in environ if _HOSTS.match(name))
    if len(tasks) != 1:
        why = "the plugin svc is off, so the other pods' addresses are unknown"
        if tasks:
            why = f"the job has {len(tasks)} kinds of tasks, and their relation is unknown"
        return Found("Volcano", seen, why_alone=why)
    hosts = [one.strip() for one in environ[tasks[0]].split(",") if one.strip()]
    first = Given(hosts[0], f"${tasks[0]}") if hosts else None
    size = number(environ, tasks[0].removesuffix("HOSTS") + "NUM")
    size = size or Given(str(len(hosts)), f"${tasks[0]}")
    found = Found("Volcano", seen, nodes=size, node_rank=index)
    if first is None:
        return replace(found, why_alone=f"{tasks[0]} is empty")
    return _for_all_pods(
        _with_first_pod(found, first, _numbered(first.value.partition(".")[0])[0]), facts
    )


def indexed_job(environ: Mapping[str, str], facts: HostFacts) -> Found | None:
    """A pod of an Indexed Job, alone or as part of a JobSet."""
    index = number(environ, "JOB_COMPLETION_INDEX")
    if index is None:
        return None
    stem, own = _numbered(facts.hostname)
    domain = _domain(facts)
    family, first = "Indexed Job", f"{stem}-0"
    parent, job = _numbered(stem)
    subdomain = domain.partition(".")[0]
    if job is not None and subdomain and parent.startswith(f"{subdomain}-"):
        # SET-REPLICATEDJOB-JOBINDEX-PODINDEX, with the set's name as the subdomain.
        family, first, stem = "JobSet", f"{parent}-0-0", parent
    found = Found(family, f"pod {index.value} of the {family} {stem}", node_rank=index)
    if own != as_int(index):
        # In the host's network a pod has the host's name.
        seen = f"pod {index.value} of an Indexed Job"
        why = f"its host name {facts.hostname} is not the pod's, and pod 0's is unknown"
        return replace(found, family="Indexed Job", seen=seen, why_alone=why)
    if family == "JobSet" and job:
        # The number of pods of the earlier jobs is unknown.
        found = replace(found, node_rank=None)
    return _by_index(found, domain, first, stem)


def stateful_set(environ: Mapping[str, str], facts: HostFacts) -> Found | None:
    """A pod of a StatefulSet, recognized only by its name."""
    stem, own = _numbered(facts.hostname)
    domain = _domain(facts)
    if POD not in environ or own is None or not domain:
        return None
    seen = f"pod {own} of what looks like the StatefulSet {stem}"
    found = Found("StatefulSet", seen, node_rank=Given(str(own), "the host name"))
    # The name is weak evidence: many pods look like this, so a bare command ignores it.
    return replace(_by_index(found, domain, f"{stem}-0", stem), why_alone="", use="")


def _by_index(found: Found, domain: str, first: str, name: str) -> Found:
    if not domain:
        return replace(found, why_alone=NO_SUBDOMAIN)
    found = _with_first_pod(found, Given(f"{first}.{domain}", "the host name"), name)
    return replace(found, why_alone="their number is unknown", use="--nnodes=N")


def _with_first_pod(found: Found, host: Given, name: str) -> Found:
    port = Given(str(port_of_name(name)), "the job's name")
    return replace(found, host=host, port=port, job_id=Given(name, host.source))


def _for_all_pods(found: Found, facts: HostFacts) -> Found:
    """`found`, with what a bare command means if there are several nodes: a job of all of them, or
    why not."""
    count = as_int(found.nodes)
    if count <= 1:
        return found
    found = replace(found, use=f"--nnodes={count}")
    if found.node_rank is None:
        return replace(found, why_alone="this pod's index is unknown")
    return replace(found, why_alone=TERMINAL) if facts.terminal else found


def _numbered(name: str) -> tuple[str, int | None]:
    """Split `job-3` into ("job", 3); a name without a number at its end is returned with None."""
    match = _NUMBERED.match(name)
    return (match[1], int(match[2])) if match is not None else (name, None)


def _domain(facts: HostFacts) -> str:
    """The part of the full host name after the host name; "" if there is none."""
    name, _, domain = facts.fqdn.partition(".")
    return domain if name == facts.hostname else ""
