"""Jobs in a Kubernetes cluster.

The object in the cluster is authoritative. The run folder on this host records the object's cluster
and namespace, and how the job ended, once that has been observed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from elasticrun.host.runs.layout import ENDED, RunFolder, RunResult
from elasticrun.jobs.backend import RequestFailed, Submission, submission, write_submission
from elasticrun.jobs.rows import JobRow

if TYPE_CHECKING:
    from elasticrun.jobs.kube.api import KubeApi
    from elasticrun.jobs.kube.observed import ClusterJob

LIST_LIMIT: Final = 5.0
"""Seconds that a list waits for a cluster before it shows the recorded state."""


class KubernetesJobs:
    """Jobs in the clusters of the kubeconfig; each job's run folder records its cluster."""

    def submit(self, run: RunFolder, submission: Submission) -> str:
        """Create the objects in `submission.script`. The submission is recorded without them."""
        from elasticrun.jobs.kube import acts
        from elasticrun.jobs.kube.api import KubeApi

        async def make() -> tuple[str, str]:
            async with KubeApi(submission.context, submission.namespace) as api:
                documents = json.loads(submission.script)
                job = await acts.create_job(api, documents)
                made = ", ".join(f"{one['kind']} {one['metadata']['name']}" for one in documents)
                kind = "ej" if job.is_elastic else "job"
                return job.uid, (
                    f"created in namespace {job.namespace}: {made} (kubectl -n {job.namespace} get "
                    f"{kind} {job.name})"
                )

        uid, made = asyncio.run(make())
        write_submission(
            run, replace(submission, script="", uid=uid)
        )  # the script contains a token
        return made

    def jobs(self, rows: Sequence[JobRow]) -> list[JobRow]:
        """The rows, updated from their objects; those of an unreachable cluster keep their state
        and get a new reason."""
        try:
            return asyncio.run(_update_rows(rows))
        except RequestFailed as why:  # the extra is not installed
            return [replace(row, reason=str(why)) for row in rows]


async def _object(api: KubeApi, known: Submission) -> ClusterJob | None:
    """The job's object, if it exists and is not a later object of the same name."""
    from elasticrun.jobs.kube.api import ELASTIC_JOBS, INDEXED_JOBS
    from elasticrun.jobs.kube.observed import ClusterJob

    kind = ELASTIC_JOBS if known.number == ELASTIC_JOBS.__name__ else INDEXED_JOBS
    body = await api.get(kind, known.name, api.namespace)
    if body is None or known.uid not in ("", body["metadata"]["uid"]):
        return None
    return ClusterJob({**body, "kind": kind.__name__})


def record_end(
    run: RunFolder, state: str, reason: str, row: JobRow | None = None, ended: float = 0.0
) -> None:
    """Record how a job ended, unless its run folder already has a result or is gone. `row`: the
    job's last row. Raises OSError."""
    if run.result() is None and run.path.is_dir():
        result = RunResult(state=state, reason=reason, ended=ended or time.time())
        if row is not None:
            result = replace(
                result, job=row.name, nodes=row.nodes, step=row.step, restarts=row.restarts
            )
        run.write_result(result)


def record_replaced(runs: Sequence[RunFolder], run: RunFolder) -> None:
    """Record as lost each job whose name in the cluster now belongs to the job of `run`: the API
    server accepts a name only once the earlier object is deleted. Raises OSError."""
    new = submission(run)
    for other in runs:
        with contextlib.suppress(RequestFailed):
            old = submission(other)
            same = _object_key(old) == _object_key(new)
            if same and old.uid != new.uid:
                record_end(other, "lost", "the cluster no longer has it")


def _object_key(job: Submission) -> tuple[str, ...]:
    return job.on, job.context, job.namespace, job.number, job.name


async def _update_rows(rows: Sequence[JobRow]) -> list[JobRow]:
    from elasticrun.jobs.kube.api import KubeApi

    async def one(row: JobRow) -> JobRow:
        run = RunFolder(Path(row.run))
        known = submission(run)
        async with KubeApi(known.context, known.namespace) as api:
            job = await _object(api, known)
        if job is None:
            return replace(row, state="lost", reason="the cluster no longer has it")
        now = replace(job.row(time.time(), row.run), user=row.user, host=row.host)
        if job.is_over:
            record_end(run, now.state, now.reason, now)
        return now

    async def bounded(row: JobRow) -> JobRow:
        try:
            async with asyncio.timeout(LIST_LIMIT):
                return row if row.state in ENDED else await one(row)
        except TimeoutError:
            return replace(row, reason=f"its cluster has not answered within {LIST_LIMIT:g} s")
        except (RequestFailed, OSError) as why:
            return replace(row, reason=str(why))

    return list(await asyncio.gather(*map(bounded, rows)))
