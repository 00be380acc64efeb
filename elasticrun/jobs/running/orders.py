"""`elasticrun stop`, `restart`, `exclude NODE`, `include NODE` and `scale N`: orders to a running
job.

The master executes them, and records in the job's events who sent them and why. If it does not
answer, the job's backend stops or scales the job.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from elasticrun.cli.flags import Parser
from elasticrun.cli.trust import withdraw
from elasticrun.config import EXIT_FAILED, EXIT_OK
from elasticrun.host.runs.claim import Claimed, claimed
from elasticrun.host.runs.index import runs_root
from elasticrun.host.runs.layout import RunFolder
from elasticrun.jobs.backend import RequestFailed, submission, was_submitted
from elasticrun.jobs.backends import backend_of
from elasticrun.jobs.connection import JobConnection, NotAnswered, UserJob, find_job, user_at_host
from elasticrun.jobs.rows import DoneRow, as_json
from elasticrun.jobs.running.master_lookup import parse_flags, parser, with_master
from elasticrun.wire.messages import MAX_NODES, Reply, Request

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True, slots=True)
class VerbHelp:
    """The help texts of a verb."""

    does: str
    node: str = ""  # help for its NODE; "": the verb applies to the whole job


ORDERS: Final[Mapping[str, VerbHelp]] = {
    "stop": VerbHelp(
        "End a running job on all of its nodes. Its newest snapshot is written to storage first. "
        "Its launchers exit with 1, so that no scheduler restarts it as preempted."
    ),
    "restart": VerbHelp(
        "Restart the ranks of a running job on all its nodes. Does not count against "
        "--max-restarts."
    ),
    "exclude": VerbHelp(
        "Remove a node from a running job and refuse it for --exclude-for seconds (default: an "
        "hour), as after a failed network check. The other nodes continue, or wait for "
        "another.",
        "its id, or its host, as elasticrun status shows them",
    ),
    "include": VerbHelp(
        "Admit an excluded node, or one in backoff, again.",
        "its id, or its host, as elasticrun status shows them",
    ),
    "scale": VerbHelp(
        "Set the maximum number of nodes of a running job. If it has more, its ranks restart at "
        "once without the nodes that joined last, which stay as spares. If it has fewer, new "
        "nodes are admitted. Does not count against --max-restarts.",
    ),
}

POLL: Final = 1.0
"""Seconds between two polls of a job that is being stopped."""

MAX_REASON: Final = 200
"""Maximum number of characters of a reason."""


def main(verb: str, argv: Sequence[str]) -> int:
    """Run one of ORDERS. Returns the exit code."""
    order = ORDERS[verb]
    made = parser(verb, order.does)
    if order.node:
        made.add_argument("node", metavar="NODE", help=order.node)
    if verb == "scale":
        text = "the new MAX of --nnodes; also lowers a higher MIN; `JOB N` works too"
        made.add_argument("number", metavar="N", help=text)
    text = "the reason, shown in the job's events"
    made.add_argument("--reason", default="", metavar="TEXT", help=text)
    if verb == "stop":
        text = "wait until the job has ended and its newest snapshot is written; then say how"
        made.add_argument("--wait", action="store_true", help=text)
    flags = parse_flags(made, argv)
    if verb == "scale":
        resolve_number(made, flags.ns)
    try:
        if order.node and _are_swapped(flags.ns):
            made.error(f"the node comes first: {made.prog} {flags.ns.job} {flags.ns.node}")
        return with_master(flags, partial(_send_order, verb, order))
    except (NotAnswered, RequestFailed, Claimed) as failure:
        why: Exception = failure
        try:
            done = _fall_back_to_backend(verb, flags.ns, failure)
        except RequestFailed as refused:
            done, why = None, refused
        if not done:
            print(f"{made.prog}: {why}", file=sys.stderr)
            return EXIT_FAILED
        return _print_done(flags.ns, *done)


def _send_order(verb: str, order: VerbHelp, line: JobConnection, ns: argparse.Namespace) -> int:
    reason = " ".join(ns.reason.split())[:MAX_REASON]
    node, number = ns.node if order.node else "", ns.number if verb == "scale" else 0
    request = Request(verb, node, number, who=user_at_host(), reason=reason)
    if verb == "scale" and line.run is not None and was_submitted(line.run):
        done = _scale(line.run, request, line.reply)
    else:
        done = line.reply(request).reason
    _print_done(ns, done, line.run)
    if verb == "stop" and ns.wait:
        over = _wait_until_over(line)
        if ns.output == "text" and over:
            print(f"the job has ended: {over}")
    return EXIT_OK


def _are_swapped(ns: argparse.Namespace) -> bool:
    """Whether the user swapped the job and the node."""
    if not ns.job or ":" in ns.job or find_job(ns.job) != UserJob():
        return False
    return find_job(ns.node) != UserJob()


def resolve_number(made: Parser, ns: argparse.Namespace) -> None:
    """Decide which of `scale`'s two words is the number of nodes, and convert it. Exits with a
    usage error if neither is."""
    if not ns.number.isdecimal():
        ns.number, ns.job = ns.job, ns.number
    if not ns.number.isdecimal() or not 1 <= int(ns.number) <= MAX_NODES:
        made.error(f"{ns.number or ns.job!r} is not a number of nodes: 1 to {MAX_NODES}")
    ns.number = int(ns.number)


def _print_done(ns: argparse.Namespace, sentence: str, run: RunFolder | None) -> int:
    """Print what was done, with the job's name if the user did not type it in full."""
    job = run.job() if run else None
    where = str(run.place) if run else ""
    done = DoneRow(name=job.name if job else ns.job, done=sentence, run_dir=where)
    if run and job and ns.job and ":" not in ns.job and ns.job not in run.names:
        sentence = f"{job.name}: {sentence}"
    print(as_json(done) if ns.output == "json" else sentence)
    return EXIT_OK


def _scale(run: RunFolder, request: Request, send: Callable[[Request], Reply]) -> str:
    with claimed(runs_root(os.environ), submission(run).name):  # avoids duplicate agents
        return backend_of(run, withdraw()).scale(run, request, send)


def _fall_back_to_backend(
    verb: str, ns: argparse.Namespace, why: Exception
) -> tuple[str, RunFolder] | None:
    """Have its backend stop or scale a job whose master failed to do so, because of `why`. None if
    the backend did nothing. Raises RequestFailed if the backend refuses to scale the job."""

    def fail(request: Request) -> Reply:
        raise why

    try:
        run = find_job(ns.job).run if ns.job else None
        if run is None or not was_submitted(run):
            return None
        if verb == "scale":
            return _scale(run, Request(verb, number=ns.number, who=user_at_host()), fail), run
        with contextlib.suppress(RequestFailed):
            return (backend_of(run, withdraw()).stop(run), run) if verb == "stop" else None
    except (NotAnswered, Claimed, OSError):
        pass
    return None


def _wait_until_over(line: JobConnection) -> str:
    """Wait until the job's master reports an outcome or no longer answers: it exits soon after.
    Returns the outcome; "" if it is unknown."""
    try:
        while not (outcome := line.picture().status.outcome):
            line.sleep(POLL)
    except NotAnswered:
        result = line.run.result() if line.run is not None else None
        return result.reason if result is not None else ""
    return outcome
