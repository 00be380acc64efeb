"""Selects the cluster and the job, from the flags and the run folders of this host."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elasticrun.cli.flags import Parser
from elasticrun.host.runs.index import NoRun, SeveralRuns, find, runs_root
from elasticrun.host.runs.layout import RunFolder
from elasticrun.jobs.backend import RequestFailed, submission

if TYPE_CHECKING:
    import argparse


def add_cluster(made: Parser) -> None:
    """Add the flags for the cluster's context and namespace."""
    made.add_argument("--on", choices=("k8s", "kubernetes"), default="k8s", help="where the job is")
    text = "the job's namespace [default: from its run folder, else the context's]"
    made.add_argument("-n", "--namespace", default="", metavar="NAME", help=text)
    text = "context in the kubeconfig [default: as the run folder says, else the current one]"
    made.add_argument("--context", default="", metavar="NAME", help=text)


def known_run(ns: argparse.Namespace, whole: str = "") -> RunFolder | None:
    """The run folder of the named job; None if there is none, or if the flags select another
    cluster or namespace. If it is found, `ns` gets the job's name, namespace and context. `whole`:
    the verb, if it does not accept the beginning of a name. Raises RequestFailed if run folders of
    several jobs have the name and no namespace is given."""
    try:
        if not ns.job:
            return None
        run = find(runs_root(os.environ), ns.job, whole=whole)
        job, known = run.job(), submission(run)
    except SeveralRuns as why:
        if ns.namespace:
            return None
        raise RequestFailed(f"{why}, or by --namespace") from None
    except (NoRun, OSError, RequestFailed):
        return None
    if job is None or job.where != "k8s":
        return None
    there = (known.context, known.namespace)
    if (ns.context or known.context, ns.namespace or known.namespace) != there:
        return None
    ns.job, ns.namespace, ns.context = known.name, known.namespace, known.context
    return run
