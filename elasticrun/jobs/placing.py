"""Decides whether a verb applies to a job in a Kubernetes cluster or to one outside clusters."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from elasticrun.cli.settings import UsageError
from elasticrun.config import EXIT_USAGE
from elasticrun.jobs.backend import RequestFailed
from elasticrun.jobs.backends import is_in_cluster


class ResolvedVerb(NamedTuple):
    """A verb's words. `run` runs the verb in the cluster and returns the exit code; None for jobs
    outside clusters."""

    words: Sequence[str]
    run: Callable[[], int] | None


def resolve_verb(verb: str, words: Sequence[str], notify: Callable[[str], None]) -> ResolvedVerb:
    """Find out where the named job runs; a ScalePlan (`scale -f`) is first translated into words.
    Raises UsageError."""
    if verb == "scale" and any(word in ("-f", "--file") for word in words):
        from elasticrun.jobs.cluster.verbs import scale_plan_words

        words = scale_plan_words(words, notify)
    others = int(verb in ("exclude", "include"))
    try:
        is_there = is_in_cluster(words, os.environ, others=others)
    except RequestFailed as wrong:
        raise UsageError(str(wrong), EXIT_USAGE) from None
    if not is_there:
        return ResolvedVerb(words, None)
    from elasticrun.jobs.cluster import verbs

    return ResolvedVerb(words, partial(verbs.main, verb, words))
