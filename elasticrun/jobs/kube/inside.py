"""Builds and runs kubectl commands in the pods of a job, on this terminal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from elasticrun.core.words import names
from elasticrun.jobs.backend import RequestFailed
from elasticrun.jobs.kube import acts
from elasticrun.jobs.kube.api import KubeApi
from elasticrun.jobs.kube.observed import MANAGED_LABEL, ClusterJob, ObservedPod, observe_pod
from elasticrun.jobs.operator.cluster import PODS
from elasticrun.jobs.operator.objects import MASTER, volume_at


async def node_command(
    api: KubeApi, job: ClusterJob, node: str, command: Sequence[str]
) -> list[str]:
    """The words that run a command in the pod of `node`, or if that is "" in the first running pod
    other than the master's. Raises RequestFailed."""
    pods = await _running(api, job)
    meant = [pod for pod in pods if (pod.is_called(node) if node else pod.index != MASTER)]
    if not meant:
        there = names([pod.host for pod in pods]) or "none"
        raise RequestFailed(f"job {job.name} has no pod {node or 'that runs'}; there is {there}")
    flags = ["-it"] if _at_terminal() else ["-i"]
    return _in_pod(api, job, meant[-1] if node else meant[0], command, flags)


async def master_command(
    api: KubeApi, job: ClusterJob, command: Sequence[str], *, node: str = "", terminal: bool = False
) -> list[str]:
    """The words that run a command in the pod of the job's master. `node`: a node of the job as the
    user typed it; its name in the master is appended to the command. Raises RequestFailed."""
    pods = await _running(api, job)
    masters = [pod for pod in pods if pod.index == (MASTER if job.is_elastic else "0")]
    if not masters:
        why, verb = f": {job.reason}" if job.reason else "", "has" if job.is_over else "is"
        raise RequestFailed(
            f"job {job.name} {verb} {job.state}, and its master's pod does not run{why}; "
            f"`elasticrun status {job.name}` shows its pods"
        )
    hosts = sorted({pod.host for pod in pods if pod.index != MASTER and pod.is_called(node)})
    if len(hosts) > 1:
        raise RequestFailed(
            f"several pods of job {job.name} are on {node}: {', '.join(hosts)}; name one"
        )
    words = [*command, *(hosts or [node])] if node else command
    return _in_pod(api, job, masters[-1], words, ["-it"] if terminal and _at_terminal() else [])


async def volume_command(
    api: KubeApi, job: ClusterJob, path: str, command: Sequence[str]
) -> list[str] | None:
    """The words that run a command in any pod of elasticrun in the job's namespace that mounts the
    same volume at that path; None if no such pod runs."""
    there = job.volume_at(path) or {}
    if not there or "hostPath" in there:  # a hostPath differs on each node
        return None
    for body in await api.list(PODS, job.namespace, labels=MANAGED_LABEL):
        pod = observe_pod(body)
        if pod.phase == "Running" and volume_at(body["spec"], path) == there:
            return _in_pod(api, job, pod, command, [])
    return None


def _at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _in_pod(
    api: KubeApi, job: ClusterJob, pod: ObservedPod, command: Sequence[str], flags: Sequence[str]
) -> list[str]:
    where = [f"--context={api.context}"] if api.context else []
    words = ["kubectl", *where, "-n", job.namespace, "exec", *flags, pod.name, "-c", pod.container]
    return [*words, "--", *command]


def run_on_terminal(words: Sequence[str], environ: Mapping[str, str], *, ours: bool = False) -> int:
    """Run a kubectl command on this terminal. Returns its exit code. `ours`: the command in the pod
    reports its own errors, so kubectl's line about the exit code is dropped. Raises RequestFailed
    if kubectl is not installed."""
    program = shutil.which(words[0], path=environ.get("PATH", os.defpath))
    if program is None:
        raise RequestFailed(
            f"running commands in pods needs kubectl, which is not on the PATH: {words[0]}"
        )
    stderr = subprocess.PIPE if ours else None
    with subprocess.Popen([program, *words[1:]], env=environ, stderr=stderr) as running:
        for line in running.stderr or ():
            if not line.startswith(b"command terminated with exit code"):
                sys.stderr.write(line.decode(errors="replace"))
                sys.stderr.flush()
    return running.returncode


async def _running(api: KubeApi, job: ClusterJob) -> list[ObservedPod]:
    return [pod for pod in await acts.pods(api, job) if pod.phase == "Running"]
