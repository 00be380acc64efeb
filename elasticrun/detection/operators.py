"""Operators that tell their pods in torch's words: PyTorchJob (training-operator, also by way of
Arena), Kubeflow Trainer, Volcano's PyTorch plugin.

Newer ones set PET_*, which is torchrun's own way and is obeyed as under torchrun. RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT mean *nodes* there; no rank ever gets these values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from elasticrun.detection.found import TERMINAL, Facts, Found, Given, amount, number, text
from elasticrun.detection.ports import port_of_name

POD: Final = "KUBERNETES_SERVICE_HOST"
"""Set in every pod by the kubelet."""

_HERE: Final = ("localhost", "127.0.0.1")
_NAME = re.compile(r"[A-Za-z0-9_.:-]+\Z")


def kubeflow(environ: Mapping[str, str], facts: Facts) -> Found | None:
    """PET_NNODES and PET_MASTER_ADDR in a pod: all is said in torchrun's own words."""
    nodes = text(environ, "PET_NNODES")
    where = text(environ, "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR")
    if nodes is None or where is None or POD not in environ:
        return None
    return Found(
        "Kubeflow",
        f"a pod of a training job whose operator says PET_NNODES={nodes.value}",
    )


def pytorch_job(environ: Mapping[str, str], facts: Facts) -> Found | None:
    """A pod of a PyTorchJob without PET_*. Outside Kubernetes these variables are as likely those
    of a launcher that has started us as a rank, so they say nothing."""
    if POD not in environ:
        return None
    seen = f"pod {facts.hostname} of a PyTorchJob or the like"
    return node_level(environ, facts, "PyTorchJob", seen)


def node_level(environ: Mapping[str, str], facts: Facts, family: str, seen: str) -> Found | None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as an operator means them."""
    rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    master = text(environ, "MASTER_ADDR")
    if rank is None or size is None or master is None or not _NAME.match(master.value):
        return None
    host, name = master, Given(master.value.partition(".")[0], master.source)
    if amount(size) > 1 and master.value in _HERE:
        # To pod 0 some operators say so; the others know it by its name.
        if amount(rank) != 0 or not facts.fqdn:
            return None
        host = Given(facts.fqdn, "the host name")
        name = Given(facts.hostname, "the host name")
    port = number(environ, "MASTER_PORT")
    if port is None or not 0 < amount(port) < 65536:
        port = Given(str(port_of_name(name.value)), name.source)
    several = amount(size) > 1
    return Found(
        family,
        seen,
        nodes=size,
        node_rank=rank,
        job_id=name if several else None,
        host=host if several else None,
        port=port if several else None,
        why_alone=TERMINAL if several and facts.terminal else "",
        use=f"--nnodes={amount(size)}" if several else "",
    )
