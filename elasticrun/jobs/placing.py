"""Where the job of a verb's words is: in a Kubernetes cluster, or outside of clusters."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from elasticrun.cli.settings import UsageError
from elasticrun.config import EXIT_USAGE
from elasticrun.jobs.backend import NotDone
from elasticrun.jobs.choosing import is_in_cluster


class Placed(NamedTuple):
    """The words of a verb, and what runs it in a cluster; None for a job outside of clusters."""

    words: Sequence[str]
    run: Callable[[], int] | None


def placed(verb: str, words: Sequence[str], say: Callable[[str], None]) -> Placed:
    """Find the place of the job that these words name; a ScalePlan (`scale -f`) becomes words.
    UsageError."""
    if verb == "scale" and any(word in ("-f", "--file") for word in words):
        from elasticrun.jobs.cluster.verbs import of_a_plan

        words = of_a_plan(words, say)
    others = int(verb in ("exclude", "include"))
    try:
        is_there = is_in_cluster(words, os.environ, others=others)
    except NotDone as wrong:
        raise UsageError(str(wrong), EXIT_USAGE) from None
    if not is_there:
        return Placed(words, None)
    from elasticrun.jobs.cluster import verbs

    return Placed(words, partial(verbs.main, verb, words))
