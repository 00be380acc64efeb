"""The output of a job's pods, for `elasticrun logs`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elasticrun.agent.logs.log_index import runs_of
from elasticrun.cli.flags import PROG, Parser
from elasticrun.cli.settings import UsageError
from elasticrun.cli.trust import withdraw
from elasticrun.config import EXIT_OK, EXIT_USAGE
from elasticrun.jobs.backend import RequestFailed
from elasticrun.jobs.manage.listing import parse_age
from elasticrun.jobs.running import logs as files

if TYPE_CHECKING:
    import argparse

    from elasticrun.jobs.kube.api import KubeApi
    from elasticrun.jobs.kube.observed import ClusterJob, ObservedPod
    from elasticrun.jobs.kube.pod_logs import PodLogQuery

TAIL: Final = 20
"""Default number of lines from each pod's log."""


def add_flags(made: Parser) -> None:
    """Add the flags that select log lines."""
    text = "keep printing new lines, also of later pods, until the job ends"
    made.add_argument("-f", "--follow", action="store_true", help=text)
    text = f"the last N lines of each pod, 0 for all [{TAIL}; with --all: 0]"
    made.add_argument("-t", "--tail", metavar="N", type=int, default=None, help=text)
    text = "only lines printed within this time: 90s, 5m, 12h, 7d"
    made.add_argument("--since", metavar="AGE", default="", help=text)
    text = "lines of this rank; with several per node, lines with its number (--tee, --run-dir)"
    made.add_argument("--rank", metavar="R", type=int, default=-1, help=text)
    text = "only this node: its index, or the name of its pod or of the cluster's node"
    made.add_argument("-i", "--node", "--instance", metavar="X", default="", help=text)
    made.add_argument("--all", action="store_true", help="all pods, including earlier ones")
    text = "only lines that match this regular expression"
    made.add_argument("--grep", metavar="RE", default="", help=text)


async def show_logs(api: KubeApi, job: ClusterJob, ns: argparse.Namespace) -> int:
    """Print the selected lines: of the pods, or, if these no longer exist, of the files in the run
    folder. Returns the exit code. Raises RequestFailed if there is no log."""
    from elasticrun.jobs.kube.pod_logs import show

    query = _for_rank(job, _query(ns))
    several = query.mixes_pods
    if query.follow and job.state == "suspended":
        print(f"{PROG} logs: job {job.name} is suspended: waiting for its resume", file=sys.stderr)
    last = ""

    def write(pod: ObservedPod, line: str) -> None:
        nonlocal last
        if ns.output == "json":
            line = json.dumps({"pod": pod.name, "node": pod.index, "line": line})
        elif several and query.follow:
            line = f"[{pod.name}] {line}"
        elif pod.uid != last and (several or pod.has_failed or last):
            print(f"== {pod.name}{', ' * bool(pod.message)}{pod.message} ==")
        last = pod.uid
        print(line, flush=query.follow)

    there = await show(api, job, query, write)
    if query.rank >= 0 and there and not last:
        why = ": submit with `--tee 3` to see the rank of each line"
        why = "" if "--tee" in job.words or job.run_dir else why
        raise RequestFailed(f"no line has the number of rank {ns.rank}{why}")
    if there:
        return EXIT_OK
    if ns.node and query.index:
        raise RequestFailed(
            f"rank {ns.rank} runs on node {query.index}, which has no pod named {ns.node}"
        )
    if (code := await _print_kept_logs(api, job, ns)) is not None:
        return code
    raise RequestFailed(_no_log_sentence(job, query))


async def _print_kept_logs(api: KubeApi, job: ClusterJob, ns: argparse.Namespace) -> int | None:
    """Print the logs in the job's run folder, if this host or a running pod has the folder. Returns
    the exit code; None without the folder."""
    where = job.run_dir
    if not where or job.state in ("submitted", "waiting"):
        return None
    given = {"--tail": ns.tail, "--since": ns.since, "--node": ns.node, "--grep": ns.grep,
              "--rank": None if ns.rank < 0 else ns.rank, "--output": ns.output}  # fmt: skip
    words = [f"{flag}={one}" for flag, one in given.items() if one not in (None, "")]
    words = [where, *["--all"] * ns.all, *words]
    if any(job.name in run.job_id and job.uid[:8] in run.job_id for run in runs_of(Path(where))):
        return files.main(words)
    from elasticrun.jobs.kube import inside

    reading = await inside.volume_command(api, job, where, [PROG, "logs", *words])
    return None if reading is None else inside.run_on_terminal(reading, withdraw(), ours=True)


def _query(ns: argparse.Namespace) -> PodLogQuery:
    from elasticrun.jobs.kube.pod_logs import PodLogQuery

    tail = (0 if ns.all else TAIL) if ns.tail is None else ns.tail
    if tail < 0:
        raise UsageError(f"--tail={tail}: expected a number of lines", EXIT_USAGE)
    try:
        grep = re.compile(ns.grep) if ns.grep else None
    except re.error as wrong:
        raise UsageError(f"--grep={ns.grep}: invalid expression: {wrong}", EXIT_USAGE) from None
    since = round(parse_age(ns.since, "--since")) if ns.since else 0
    return PodLogQuery(ns.follow, tail, since, ns.all, ns.node, rank=ns.rank, grep=grep)


def _for_rank(job: ClusterJob, query: PodLogQuery) -> PodLogQuery:
    """The query for one rank, as the index of its node and its number there, which prefixes its
    lines. If the job's command does not determine the node, print a note and return the query
    unchanged. Raises RequestFailed if the job has no such rank."""
    if query.rank < 0:
        return query
    ranks = job.ranks_per_node
    if not ranks or "--log-line-prefix-template" in job.words:
        why = "the job's command does not determine the ranks of a node"
        print(f"{PROG} logs: {why}: showing lines with number {query.rank} of any pod",
              file=sys.stderr)  # fmt: skip
        return query
    index, number = divmod(query.rank, ranks)
    if index >= job.nodes:
        raise RequestFailed(
            f"the job has {job.nodes * ranks} ranks: {ranks} on each of {job.nodes}"
        )
    return replace(query, index=str(index), rank=number if ranks > 1 else -1)


def _no_log_sentence(job: ClusterJob, query: PodLogQuery) -> str:
    """The sentence that explains why there is no log."""
    if job.state in ("submitted", "waiting"):
        why = f": {job.reason}" if job.reason else ""
        return f"no pod of job {job.name} has started yet{why}"
    what = f"the pods of job {job.name} no longer exist"
    if node := query.node or query.index:
        what = f"job {job.name} has no started pod {node}, or it no longer exists"
    lost = f"{what}, and their output is gone"
    if not job.run_dir:
        return f"{lost}: `--run-dir DIR` of submit keeps it, on a volume"
    if job.volume_at(job.run_dir) is None:
        return f"{lost}: {job.run_dir} was on no volume"
    return (
        f"{what}; what its ranks wrote is on its volume: where that is mounted, `{PROG} logs "
        f"{job.run_dir}` shows it"
    )
