"""Turns a job that is submitted to a cluster into objects."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from elasticrun.cli import settings
from elasticrun.jobs.backend import Forbidden, Submission, Target
from elasticrun.jobs.kubernetes import KubernetesJobs
from elasticrun.jobs.render import pods
from elasticrun.jobs.render.elastic import elastic_document
from elasticrun.jobs.verbs import render, render_flags


def kubernetes_submission(
    ns: argparse.Namespace, program: Sequence[str], run: Path, notify: Callable[[str], None]
) -> tuple[Submission, Target]:
    """An ElasticJob if the cluster has that kind, else the objects that `render k8s` prints. The
    API server has validated all of them. Raises UsageError, Invalid, RequestFailed."""
    filled = argparse.Namespace(**{**vars(ns), "save_at_breakpoint": True})
    filled.given = {**ns.given, "save_at_breakpoint": ""}
    documents, where, notes = asyncio.run(_validated_objects(filled, program))
    for note in notes:
        notify(note)
    low, high = settings.nodes(ns.nnodes)
    known = Submission(
        name=ns.name,
        on="k8s",
        flags=(f"--nodes={ns.nnodes}", f"--image={ns.image}", *render_flags.launcher_words(filled)),
        program=tuple(program),
        workdir=ns.working_dir,
        min_nodes=low,
        max_nodes=high,
        script=json.dumps(documents),
        number=documents[-1]["kind"],
        context=where[0],
        namespace=where[1],
    )
    return known, KubernetesJobs()


NO_TENSORBOARD: Final = (
    "--tensorboard: the master of an ElasticJob runs in a separate pod, which starts no "
    "TensorBoard: start one on the folder of --logdir, or use --plain"
)


async def _validated_objects(
    ns: argparse.Namespace, program: Sequence[str]
) -> tuple[list[dict[str, Any]], tuple[str, str], list[str]]:
    """Make the objects and have the API server validate them. Returns the objects, the job's last;
    the context and the namespace; notes for the user. If one of the objects is a Secret with a
    token, sets `ns.token_secret` to its name."""
    from elasticrun.jobs.kube import acts
    from elasticrun.jobs.kube.api import KubeApi

    async with KubeApi(ns.context, ns.namespace) as api:
        secret: list[dict[str, Any]] = []
        elastic = not ns.plain and await api.has_elastic_jobs()
        if not (elastic or ns.token_secret or "token_file" in ns.given):
            made = _secret(f"{ns.name}-token")
            try:
                await api.create(made, api.namespace, dry_run=True)
                secret, ns.token_secret = [made], made["metadata"]["name"]
            except Forbidden:
                pass  # then the job has no token; a note tells the user
        settings, notes = render.pods_of(ns, program)
        if elastic:
            # The operator creates the token.
            notes = [note for note in notes if note != render.no_token()]
            notes += [NO_TENSORBOARD] if "tensorboard" in ns.given else []
            documents = [elastic_document(settings)]
        else:
            *others, job = pods.job_documents(settings)
            documents = [*others, *secret, job]
        await acts.create_job(api, documents, dry_run=True)
        return documents, (api.context, api.namespace), notes


def _secret(name: str) -> dict[str, Any]:
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
    return {**body, "stringData": {"token": secrets.token_hex(32)}}
