"""Operations on jobs in a cluster, the same for an ElasticJob and an Indexed Job."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from elasticrun.core.words import did_you_mean
from elasticrun.host.runs.index import first_names
from elasticrun.jobs.backend import Forbidden, JobMissing, RequestFailed
from elasticrun.jobs.kube.api import ELASTIC_JOBS, INDEXED_JOBS, KubeApi
from elasticrun.jobs.kube.observed import MANAGED_LABEL, STOPPED, ClusterJob, ObservedPod, in_order
from elasticrun.jobs.operator.cluster import PODS
from elasticrun.jobs.operator.crd import Json
from elasticrun.jobs.operator.objects import format_time

MARGIN: Final = 60.0
"""Seconds beyond the pods' grace period that a suspended job has to release all of its pods."""


def _kind(job: ClusterJob) -> Any:
    return ELASTIC_JOBS if job.is_elastic else INDEXED_JOBS


# ---------------------------------------------------------------- finding jobs


async def jobs(api: KubeApi, namespace: str = "") -> tuple[list[ClusterJob], list[str]]:
    """The jobs of a namespace ("": the context's; or EVERYWHERE), and a sentence for each kind that
    this user may not list. Raises RequestFailed if the user may list none."""
    where = namespace or api.namespace
    found: list[ClusterJob] = []
    kinds = [INDEXED_JOBS]
    if await api.has_elastic_jobs():
        kinds.insert(0, ELASTIC_JOBS)
    refused: list[Forbidden] = []
    for kind in kinds:
        mine = {} if kind is ELASTIC_JOBS else {"labels": MANAGED_LABEL}
        try:
            bodies = await api.list(kind, where, **mine)
        except Forbidden as why:
            refused.append(why)
            continue
        found += [ClusterJob({**body, "kind": kind.__name__}) for body in bodies]
    if len(refused) == len(kinds):
        raise refused[0]
    return found, list(map(str, refused))


async def find(api: KubeApi, name: str, *, exact: bool = False) -> ClusterJob:
    """The job of that name in the namespace, or, unless `exact`, the only one whose name begins
    with it; for "" the only job. Raises RequestFailed."""
    for kind in (ELASTIC_JOBS, INDEXED_JOBS) if name else ():
        with contextlib.suppress(Forbidden):  # the user may lack rights to one of the kinds
            if (body := await api.get(kind, name, api.namespace)) is not None:
                return ClusterJob({**body, "kind": kind.__name__})
    known, _ = await jobs(api)
    names = sorted(job.name for job in known)
    meant = [job for job in known if job.name.startswith(name) and not exact]
    if len(meant) == 1:
        return meant[0]
    shown = first_names(names)
    if meant:
        raise RequestFailed(f"several jobs are in namespace {api.namespace}: {shown}; name one")
    hint = did_you_mean(name, names) or (f"; there is {shown}" if shown else "")
    raise JobMissing(f"no job {name or 'of elasticrun'} is in namespace {api.namespace}{hint}")


async def watch_job(api: KubeApi, job: ClusterJob) -> AsyncIterator[tuple[str, ClusterJob]]:
    """The current state of the job, then its state after each change; each with the type of the
    change (ADDED, MODIFIED, DELETED)."""
    only = {"metadata.name": job.name}
    async for word, body in api.changes(_kind(job), job.namespace, fields=only):
        if body["metadata"]["uid"] == job.uid:
            yield word, ClusterJob({**body, "kind": _kind(job).__name__})


async def pods(api: KubeApi, job: ClusterJob) -> list[ObservedPod]:
    """The job's pods, in order."""
    return in_order(await api.list(PODS, job.namespace, labels=job.pods), job)


# ---------------------------------------------------------------- creating and deleting


async def create_job(
    api: KubeApi, documents: Sequence[Json], *, dry_run: bool = False
) -> ClusterJob:
    """Create the job, which is the last document, then the others with the job as their owner, so
    that they are deleted with it. If one of these fails, delete the job and raise RequestFailed.
    `dry_run`: have the server validate everything, and create nothing."""
    *others, last = documents
    made = await api.create(last, api.namespace, dry_run=dry_run)
    job = ClusterJob({**made, "kind": last["kind"]})
    owner = {
        "apiVersion": last["apiVersion"],
        "kind": last["kind"],
        "name": job.name,
        "uid": job.uid,
    }
    try:
        for body in others:
            mine = body if dry_run else {
                **body, "metadata": {**body["metadata"], "ownerReferences": [owner]}
            }  # fmt: skip
            await api.create(mine, api.namespace, dry_run=dry_run)
    except RequestFailed:
        if not dry_run:
            await api.delete(_kind(job), job.name, job.namespace)
        raise
    return job


async def delete(api: KubeApi, job: ClusterJob) -> str:
    """Delete the job's object; the cluster then deletes everything the job owns. Pods save within
    their grace period."""
    await api.delete(_kind(job), job.name, job.namespace)
    return f"job {job.name} is deleted from namespace {job.namespace}; its pods save and leave"


# ---------------------------------------------------------------- changing


async def scale(api: KubeApi, job: ClusterJob, nodes: int) -> str:
    """Set the job's number of nodes. Returns a sentence, as do the functions below."""
    if job.is_over:
        raise RequestFailed(f"job {job.name} has {job.state}: there is nothing to scale")
    if job.is_elastic:
        change: Json = {"spec": {"replicas": nodes}}
        await api.patch(ELASTIC_JOBS.Scale, job.name, job.namespace, change)
    else:
        change = {"spec": {"completions": nodes, "parallelism": nodes}}
        await api.patch(INDEXED_JOBS, job.name, job.namespace, change)
    sentence = f"job {job.name} is set to {nodes} nodes (before: {job.nodes})"
    if job.is_suspended:
        sentence += f"; it is {job.state}, and gets them when it resumes"
    elif most := job.template_max_nodes if nodes > job.template_max_nodes > 0 else 0:
        sentence += f"; its ranks use at most {most} (--nodes at its creation): the rest are spares"
    return sentence


async def suspend(api: KubeApi, job: ClusterJob, *, stop: bool = False) -> str:
    """Suspend the job: it saves and releases its pods. Returns when that is done. `stop`: also
    annotate the job as stopped, that is, not meant to be resumed."""
    word = "stopped" if stop else "suspended"
    if job.is_over:
        raise RequestFailed(f"job {job.name} has {job.state}: it holds no nodes")
    if job.state == word:
        return f"job {job.name} is already {word}"
    mark = format_time(time.time()) if stop else None
    change = {"spec": {"suspend": True}, "metadata": {"annotations": {STOPPED: mark}}}
    await api.patch(_kind(job), job.name, job.namespace, change)
    await _wait_for_pods_to_end(api, job)
    found = await api.get(_kind(job), job.name, job.namespace)
    now = ClusterJob({**found, "kind": _kind(job).__name__}) if found else job
    if now.is_over:
        raise RequestFailed(f"job {job.name} has {now.state} in the meantime: {now.reason}")
    row = now.row(time.time())
    step = f" at step {row.step}" if row.step >= 0 else ""
    return f"job {job.name} is {word}{step}; continue with `elasticrun resume {job.name}`"


async def resume(api: KubeApi, job: ClusterJob) -> str:
    """Resume a suspended or stopped job, which continues from its newest saved step."""
    if job.is_over:
        raise RequestFailed(f"job {job.name} has {job.state}: submit it again to rerun it")
    if not job.is_suspended:
        raise RequestFailed(f"job {job.name} is {job.state}: there is nothing to resume")
    change = {"spec": {"suspend": False}, "metadata": {"annotations": {STOPPED: None}}}
    await api.patch(_kind(job), job.name, job.namespace, change)
    return f"job {job.name} resumes: its pods are being created"


async def _wait_for_pods_to_end(api: KubeApi, job: ClusterJob) -> None:
    """Wait until none of the job's pods is active. Raises RequestFailed after their grace period
    and MARGIN."""
    try:
        async with asyncio.timeout(job.grace + MARGIN):
            await _watch_pods_end(api, job)
    except TimeoutError:
        found = await api.get(_kind(job), job.name, job.namespace)
        if found and ClusterJob({**found, "kind": _kind(job).__name__}).is_unprocessed:
            raise RequestFailed(
                f"job {job.name} was updated, but no operator has reacted: is it running "
                "(docs/operator.md)?"
            ) from None
        raise RequestFailed(
            f"job {job.name} is still leaving: `elasticrun status {job.name}` shows its pods"
        ) from None


async def _watch_pods_end(api: KubeApi, job: ClusterJob) -> None:
    found, version = await api.list_at(PODS, job.namespace, labels=job.pods)
    left = {pod.name for pod in in_order(found, job) if pod.is_active}
    if not left:
        return
    async for word, body in api.changes(PODS, job.namespace, after=version, labels=job.pods):
        for pod in in_order([body], job):
            (left.discard if word == "DELETED" or not pod.is_active else left.add)(pod.name)
        if not left:
            return
