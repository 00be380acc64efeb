"""The verbs for jobs in a Kubernetes cluster: `list`, `status`, `logs`, `scale`, `suspend`,
`resume`, `stop`, `delete` and `top nodes`; others are passed to `inside`.

All use only the API server, with the user's rights; none contacts a job's master from here. The
user names a job that has a run folder on this host, which records its cluster, or any job by its
name in the selected namespace.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import asdict

from elasticrun.cli.flags import PROG, Parser
from elasticrun.cli.settings import UsageError
from elasticrun.cli.verbs.columns import duration, lines, table_width
from elasticrun.config import EXIT_OK, EXIT_USAGE
from elasticrun.core.words import plain, plural
from elasticrun.host.runs.index import prune
from elasticrun.host.runs.layout import RunFolder
from elasticrun.jobs.backend import Forbidden, JobMissing, RequestFailed
from elasticrun.jobs.cluster import inside, logs
from elasticrun.jobs.cluster.arguments import add_cluster, known_run
from elasticrun.jobs.manage.jobs import exit_code_of
from elasticrun.jobs.manage.listing import TITLES, add_output, list_cells
from elasticrun.jobs.rows import DoneRow, as_json, page_of
from elasticrun.jobs.running.orders import resolve_number

if TYPE_CHECKING:
    import argparse

    from elasticrun.jobs.kube.api import KubeApi
    from elasticrun.jobs.kube.observed import ClusterJob, ObservedPod

Json = dict[str, Any]

DOES: Final = {
    "list": "List the jobs of a cluster: ElasticJobs, and Indexed Jobs created by elasticrun.",
    "status": "Show a job of a cluster: its nodes, what it waits for, its pods, its last events.",
    "logs": "Print the output of a job's pods: that of the first node, or after a failure that of "
    "the pod that failed first.",
    "scale": "Set the number of nodes of a job, live.",
    "suspend": "Save a job's state and delete its pods; continue with `resume`.",
    "resume": "Resume a job that was suspended or stopped.",
    "stop": "Save a job's state and delete its pods, permanently; its object and status stay.",
    "delete": "Delete a job and all that belongs to it, and its run folder here.",
    "top": "Show the nodes of a cluster: capacity, requests of pods, usage.",
}

MAX_EVENTS: Final = 10


def main(verb: str, words: Sequence[str]) -> int:
    """Run one of DOES, or a verb of `inside`. Returns the exit code. Raises UsageError."""
    if verb == "exec":
        return inside.execute(words)
    if verb in inside.MASTER_VERBS and words[:1] != ["nodes"]:
        return inside.run_at_master(verb, words)
    made = _parser(verb)
    ns = made.parse_args(words)
    if verb == "scale":
        resolve_number(made, ns)
    return exit_code_of(lambda: asyncio.run(_run(verb, ns)), made.prog)


def _parser(verb: str) -> Parser:
    made = Parser(prog=f"{PROG} {verb}", description=DOES[verb])
    if verb == "top":
        made.add_argument("what", choices=("nodes",), help="the nodes of the cluster")
    elif verb != "list":
        reads = verb in ("status", "logs")
        text = "its name or a unique prefix" + "; optional if there is only one" * bool(reads)
        more: Json = {"nargs": "?", "default": ""} if reads else {}
        made.add_argument("job", metavar="JOB", help=text, **more)
    if verb == "scale":
        text = "how many nodes; `N JOB` works too"
        made.add_argument("number", metavar="N", help=text)
    if verb == "stop":
        made.add_argument("--wait", action="store_true", help="always the case in a cluster")
    if verb == "list":
        text = "jobs of all namespaces"
        made.add_argument("-A", "--all", action="store_true", help=text)
    if verb == "delete":
        text = "keep the run folder on this host"
        made.add_argument("--keep-files", action="store_true", help=text)
    if verb == "logs":
        logs.add_flags(made)
    add_cluster(made)
    add_output(made)
    return made


async def _run(verb: str, ns: argparse.Namespace) -> int:
    whole = "delete" if verb == "delete" else ""
    run = known_run(ns, whole) if "job" in ns else None
    # Late import: the client library is slow to import, and an optional extra.
    from elasticrun.jobs.kube.acts import find as find_job
    from elasticrun.jobs.kube.api import KubeApi

    async with KubeApi(ns.context, ns.namespace) as api:
        if verb == "list":
            return await _list(api, ns)
        if verb == "top":
            return await _top(api, ns)
        try:
            job = await find_job(api, ns.job, exact=bool(run or whole))
        except JobMissing:
            if run is None:
                raise
            missing = f"the cluster no longer has job {ns.job}"
            if verb == "delete":
                return _finish(ns, run, missing)
            raise RequestFailed(
                f"{missing}: remove it from the list with `{PROG} delete {ns.job}`"
            ) from None
        ns.job = job.name
        if verb == "status":
            return await _status(api, job, ns)
        if verb == "logs":
            return await logs.show_logs(api, job, ns)
        message = await _act(verb, api, job, ns)
    return _finish(ns, run if verb == "delete" else None, message)


def _finish(ns: argparse.Namespace, run: RunFolder | None, sentence: str) -> int:
    """Print what was done. Record the job of `run` as stopped, and remove that run folder unless
    the user keeps it; None: a job that was not deleted, or has no run folder."""
    if run is not None:
        from elasticrun.jobs.kubernetes import record_end

        record_end(run, "stopped", "deleted from the cluster")
        if not ns.keep_files:
            prune(run.path.parent, -86400.0, only={run.path})
    print(
        as_json(DoneRow(name=ns.job, done=sentence, on="k8s")) if ns.output == "json" else sentence
    )
    return EXIT_OK


def _act(verb: str, api: KubeApi, job: ClusterJob, ns: argparse.Namespace) -> Awaitable[str]:
    from elasticrun.jobs.kube import acts

    if verb == "scale":
        return acts.scale(api, job, ns.number)
    if verb in ("suspend", "stop"):
        return acts.suspend(api, job, stop=verb == "stop")
    return acts.resume(api, job) if verb == "resume" else acts.delete(api, job)


# ---------------------------------------------------------------- read-only verbs


async def _list(api: KubeApi, ns: argparse.Namespace) -> int:
    from elasticrun.jobs.kube import acts
    from elasticrun.jobs.kube.api import EVERYWHERE

    found, refused = await acts.jobs(api, EVERYWHERE if ns.all else "")
    now = time.time()
    rows = [(job, job.row(now)) for job in found]
    rows.sort(key=lambda pair: (pair[0].is_over, pair[1].age))
    for sentence in refused:
        print(f"{PROG} list: {sentence}", file=sys.stderr)
    if ns.output == "json":
        print(as_json([row for _, row in rows]))
    elif not rows:
        where = "any namespace" if ns.all else f"namespace {api.namespace}"
        print(f"no job is in {where}; `{PROG} submit --on k8s ... -- train.py` makes one")
    elif ns.all:
        table = [(row.id, *list_cells(row)[1:]) for _, row in rows]
        print(*lines(("NAMESPACE/NAME", *TITLES[1:]), table, table_width()), sep="\n")
    else:
        print(*lines(TITLES, [list_cells(row) for _, row in rows], table_width()), sep="\n")
    return EXIT_OK


async def _status(api: KubeApi, job: ClusterJob, ns: argparse.Namespace) -> int:
    from elasticrun.jobs.kube import acts
    from elasticrun.jobs.operator.cluster import EVENTS

    pods = await acts.pods(api, job)
    try:
        only = {"fields": {"involvedObject.name": job.name}}
        found = await api.list(EVENTS, job.namespace, **only)
        events = [one for one in found if one["involvedObject"].get("uid") == job.uid]
        hidden = ""
    except Forbidden as why:
        events, hidden = [], str(why)
    events.sort(key=_when)
    now = time.time()
    if ns.output == "json":
        page: Json = asdict(page_of(job.row(now)))
        page |= {"kind": job.body["kind"], "namespace": job.namespace}
        page |= {"conditions": job.conditions, "pods": [_pod_record(pod) for pod in pods]}
        page["events"] = [_event_record(one) for one in events[-MAX_EVENTS:]]
        print(as_json(page))
        return EXIT_OK
    print(*map(plain, _page(job, pods, now)), sep="\n")
    if events or hidden:
        print("", "last events:" if events else f"events: {hidden}", sep="\n")
    for one in events[-MAX_EVENTS:]:
        print(f"  {duration(max(0.0, now - _when(one))):>6} ago  {one.get('reason', '')}: "
              f"{plain(' '.join(str(one.get('message', '')).split()))}")  # fmt: skip
    return EXIT_OK


def _page(job: ClusterJob, pods: Sequence[ObservedPod], now: float) -> list[str]:
    row = job.row(now)
    found = lines(TITLES, [list_cells(row)], table_width())
    found += ["", f"{job.body['kind']} in namespace {job.namespace}"]
    found += [f"why: {row.reason}"] if row.reason else []
    for one in job.conditions:
        text = " ".join(str(one.get("message") or one.get("reason") or "").split())
        if text and not (one.get("status") != "True" and one.get("type") in _QUIET):
            word = "yes" if one.get("status") == "True" else "no"
            found.append(f"{one.get('type')}: {word}, {text}")
    if pods:
        titles = ("POD", "NODE", "PHASE", "AGE", "ON")
        table = [
            (pod.name, pod.index, "Leaving" if pod.is_terminating and pod.is_active else pod.phase,
             duration(max(0.0, now - pod.created)), pod.node or "-")
            for pod in pods
        ]  # fmt: skip
        found += ["", *lines(titles, table, table_width())]
        found += [f"{pod.name}: {pod.message}" for pod in pods if pod.message]
    return found


_QUIET: Final = ("Recovering", "Succeeded", "Failed", "FailureTarget", "SuccessCriteriaMet")
"""Types of conditions that are shown only if their status is True."""


def _when(event: Json) -> float:
    from elasticrun.jobs.operator.objects import parse_time

    meta = event["metadata"]
    times = (event.get("lastTimestamp"), event.get("eventTime"), meta.get("creationTimestamp"))
    return parse_time(next((one for one in times if one), None))


def _event_record(event: Json) -> Json:
    fields = {name: event.get(name) or "" for name in ("type", "reason", "message")}
    return {"time": _when(event), **fields}


def _pod_record(pod: ObservedPod) -> Json:
    return {
        "name": pod.name,
        "node": pod.index,
        "phase": pod.phase,
        "on": pod.node,
        "exit_code": pod.code,
        "says": pod.message,
    }


async def _top(api: KubeApi, ns: argparse.Namespace) -> int:
    from elasticrun.jobs.kube.capacity import nodes

    rows, notes = await nodes(api)
    for sentence in notes:
        print(f"{PROG} top: {sentence}", file=sys.stderr)
    if ns.output == "json":
        print(as_json(rows))
        return EXIT_OK

    def of(part: float, whole: float, unit: float = 1.0) -> str:
        return f"{part / unit:.3g}/{whole / unit:.3g}" if part >= 0 else f"-/{whole / unit:.3g}"

    gib = 2.0**10
    table = [
        (row.node, row.state, of(row.gpus_taken, row.gpus), of(row.cpus_taken, row.cpus),
         f"{row.cpus_used:.3g}" if row.cpus_used >= 0 else "-",
         of(row.memory_taken, row.memory, gib),
         f"{row.memory_used / gib:.3g}" if row.memory_used >= 0 else "-")
        for row in rows
    ]  # fmt: skip
    titles = ("NODE", "STATE", "GPUS", "CPUS", "USED", "MEMORY GiB", "USED")
    print(*lines(titles, table, table_width()), sep="\n")
    has, taken = sum(row.gpus for row in rows), sum(max(0, row.gpus_taken) for row in rows)
    if has:
        print(f"{plural(len(rows), 'node')}, {taken} of {has} GPUs taken")
    return EXIT_OK


# ---------------------------------------------------------------- scale -f


def scale_plan_words(words: Sequence[str], notify: Callable[[str], None]) -> list[str]:
    """The words of `scale`, with `-f FILE` replaced by the job and the number of nodes in the
    ScalePlan in that file ("-": standard input). `notify` prints what is ignored. Raises
    UsageError."""
    made = Parser(prog=f"{PROG} scale", add_help=False)
    made.add_argument("-f", "--file", required=True)
    ns, rest = made.parse_known_args(list(words))
    # Late import: only this needs YAML.
    from elasticrun.jobs.convert.document import NotConvertible, documents
    from elasticrun.jobs.convert.sources import scale_plan

    try:
        text = sys.stdin.read() if ns.file == "-" else Path(ns.file).read_text()
        found = documents(text)
        if len(found) != 1:
            raise NotConvertible(f"it has {len(found)} documents: a plan is one")
        job, nodes = scale_plan(found[0])
    except (OSError, UnicodeDecodeError) as wrong:
        why = getattr(wrong, "strerror", None) or "it is not text"
        raise UsageError(f"{ns.file} cannot be read: {why}", EXIT_USAGE) from None
    except NotConvertible as wrong:
        raise UsageError(f"{ns.file}: {wrong}", EXIT_USAGE) from None
    for note in found[0].notes:
        notify(note)
    return [job, str(nodes), *rest]
