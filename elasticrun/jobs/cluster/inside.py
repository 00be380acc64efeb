"""Verbs that kubectl runs in a pod of a job: `exec` in that of any node, and verbs that need the
job's master in the master's pod.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from elasticrun.cli.flags import PROG, Parser
from elasticrun.cli.trust import withdraw
from elasticrun.jobs.cluster.arguments import add_cluster, known_run
from elasticrun.jobs.connection import user_at_host
from elasticrun.jobs.manage.jobs import exec_parser, exec_words, exit_code_of
from elasticrun.jobs.manage.listing import add_output
from elasticrun.jobs.running.incidents import job_and_number

if TYPE_CHECKING:
    import argparse

    from elasticrun.jobs.kube.api import KubeApi
    from elasticrun.jobs.kube.observed import ClusterJob

    MakeCommand = Callable[[KubeApi, ClusterJob], Awaitable[list[str]]]

MASTER_VERBS: Final = {
    "events": "--follow", "incidents": "", "stacks": "--rank", "top": "--once",
    "restart": "--reason", "exclude": "--reason", "include": "--reason",
}  # fmt: skip
"""Verbs that need the job's master, and the flag that each has besides the common ones, if any."""


def run_at_master(verb: str, words: Sequence[str]) -> int:
    """Run one of OWN in the pod of the job's master. Returns its exit code."""
    does = f"`{PROG} {verb}` for a job in a cluster; kubectl runs it beside the job's master."
    made = Parser(prog=f"{PROG} {verb}", description=does)
    of_a_node, flag = verb in ("exclude", "include"), MASTER_VERBS[verb]
    if of_a_node:
        text = "its index, or the name of its pod, its host, or the cluster's node"
        made.add_argument("node", metavar="NODE", help=text)
    text = "its name or a unique prefix; optional if there is only one"
    text += "; and the number of an incident" * (not flag)
    made.add_argument("words", metavar="JOB" if flag else "JOB N", nargs="*", help=text)
    if flag:
        takes: dict[str, Any] = {"action": "store_true"}
        if flag in ("--rank", "--reason"):
            takes = {"metavar": flag[2:].upper(), "default": ""}
        text = "as for a job on this host"
        made.add_argument(*["-f"] * (flag == "--follow"), flag, help=text, **takes)
    add_cluster(made)
    add_output(made)
    ns = made.parse_args(words)
    if len(ns.words) > 2 - bool(flag) or (len(ns.words) == 2 and not ns.words[1].isdecimal()):
        made.error(f"{' '.join(ns.words)}: expected one job{', and a number' * (not flag)}")
    ns.job, number = (" ".join(ns.words), 0) if flag else job_and_number(ns.words)

    command = [PROG, verb, f"--output={ns.output}", *[str(number)] * bool(number)]
    if flag == "--reason":  # inside the pod the user is the container's
        ns.reason = ": ".join(filter(None, (f"for {user_at_host()}", ns.reason)))
    if flag and (value := getattr(ns, flag[2:])):
        command.append(flag if value is True else f"{flag}={value}")

    async def make_command(api: KubeApi, job: ClusterJob) -> list[str]:
        from elasticrun.jobs.kube import inside

        ends = verb in ("top", "events")  # ended by ^C, which only a terminal forwards
        node = ns.node if of_a_node else ""
        return await inside.master_command(api, job, command, node=node, terminal=ends)

    return exit_code_of(lambda: _run(ns, make_command, ours=True), made.prog)


def execute(words: Sequence[str]) -> int:
    """Run `exec JOB [--node X] -- command`. Returns the command's exit code."""
    made = exec_parser(
        "Run a command in a pod of a job, by kubectl.",
        "its index, or the name of its pod or of the cluster's node [default: the first]",
    )
    add_cluster(made)
    ns, command = exec_words(made, words)

    async def make_command(api: KubeApi, job: ClusterJob) -> list[str]:
        from elasticrun.jobs.kube import inside

        return await inside.node_command(api, job, ns.node, command)

    return exit_code_of(lambda: _run(ns, make_command), made.prog)


def _run(ns: argparse.Namespace, make_command: MakeCommand, *, ours: bool = False) -> int:
    """Find the job, have `make_command` make the kubectl command, and run it. `ours`: as in
    `run_on_terminal`. Raises RequestFailed."""
    exact = known_run(ns) is not None
    # Late import: the client library is slow to import, and an optional extra.
    from elasticrun.jobs.kube import acts, inside
    from elasticrun.jobs.kube.api import KubeApi

    async def where() -> list[str]:
        async with KubeApi(ns.context, ns.namespace) as api:
            return await make_command(api, await acts.find(api, ns.job, exact=exact))

    return inside.run_on_terminal(asyncio.run(where()), withdraw(), ours=ours)
