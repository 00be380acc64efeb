"""Which scheduler this is: the first that knows itself in the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from elasticrun.detection import dlrover, kubernetes, kubernetes as operators, skypilot, slurm
from elasticrun.detection.found import Facts, Found, amount

Family = Callable[[Mapping[str, str], Facts], Found | None]

ORDER: Final[tuple[Family, ...]] = (
    operators.kubeflow,  # PET_*: torchrun's own variables count more than any scheduler's
    dlrover.detect,
    slurm.detect,  # before Kubernetes: slurmd may run in a pod
    kubernetes.leader_worker_set,
    kubernetes.volcano,
    kubernetes.indexed_job,  # and JobSet
    operators.pytorch_job,
    skypilot.detect,
    kubernetes.stateful_set,  # last: nothing but the host name shows it
)

INSIDE: Final = "TORCHELASTIC_RUN_ID"
"""Set in every rank. What a rank starts inherits the scheduler's variables as well, and is one
process on one node all the same."""


def detect(environ: Mapping[str, str], facts: Facts) -> Found | None:
    """This node's place in its job; None where no scheduler is to be seen."""
    for family in ORDER:
        found = family(environ, facts)
        if found is not None:
            if INSIDE in environ and not found.external:
                several = found.why_alone or amount(found.nodes) > 1
                why = "a rank of another job has started this" if several else ""
                return replace(found, why_alone=why, host=None, use="")
            return found
    return None
