"""`elasticrun stop`, `restart`, `exclude NODE`, `include NODE` and `scale N`: what is to be done to
a job that runs. The master carries it out, and notes among the job's events who asked, and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elasticrun.cli.job.asking import JobLine, NotAnswered, as_json, parser, run, who
from elasticrun.wire.messages import MAX_NODES, Request

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True, slots=True)
class OrderOf:
    """What `--help` says of a verb."""

    does: str
    node: str = ""  # what is said of its NODE; "": it is of the whole job


ORDERS: Final[Mapping[str, OrderOf]] = {
    "stop": OrderOf(
        "End a running job on all of its nodes. Where it saves snapshots at a breakpoint, its last "
        "one is written out before. Its launchers end with 1, so that no scheduler takes it for "
        "preempted and starts it again."
    ),
    "restart": OrderOf(
        "Stop the ranks of a running job and start them again, on all nodes that are there; no "
        "restart of --max-restarts is spent."
    ),
    "exclude": OrderOf(
        "Take a node out of a running job and refuse it (--exclude-for seconds long, by default an "
        "hour), as one that has failed the network check. Others go on, or wait for another.",
        "its id, or its host, as elasticrun status shows them",
    ),
    "include": OrderOf(
        "Let a node come back that was excluded or left out.",
        "its id, or its host, as elasticrun status shows them",
    ),
    "scale": OrderOf(
        "Set how many nodes a running job has at most. Where it has more, a round without the last "
        "to come begins at once, and these stay as spares; where it has fewer, those that come are "
        "let in. No restart of --max-restarts is spent.",
    ),
}

POLL: Final = 1.0
"""Seconds between two looks at a job that ends."""

MAX_REASON: Final = 200
"""Characters of a reason."""


def main(verb: str, argv: Sequence[str]) -> int:
    """One of ORDERS, with its own arguments."""
    order = ORDERS[verb]
    made = parser(verb, order.does)
    if order.node:
        made.add_argument("node", metavar="NODE", help=order.node)
    if verb == "scale":
        text = "the new MAX of --nnodes; a MIN above it is lowered to it"
        made.add_argument("number", type=_number, metavar="N", help=text)
    text = "why, for those who read the job's events"
    made.add_argument("--reason", default="", metavar="TEXT", help=text)
    if verb == "stop":
        text = "until the job has ended, however long its last snapshot takes"
        made.add_argument("--wait", action="store_true", help=text)

    def ask(line: JobLine, ns: argparse.Namespace) -> int:
        node = ns.node if order.node else ""
        reason = " ".join(ns.reason.split())[:MAX_REASON]
        number = ns.number if verb == "scale" else 0
        reply = line.reply(Request(verb, node, number, who=who(), reason=reason))
        print(as_json(reply) if ns.output == "json" else reply.reason)
        if verb == "stop" and ns.wait:
            _until_over(line)
        return 0

    return run(made, argv, ask)


def _number(text: str) -> int:
    """Of nodes: ValueError, which argparse tells of, for none."""
    number = int(text)
    if not 1 <= number <= MAX_NODES:
        raise ValueError
    return number


_number.__name__ = "number of nodes"  # in argparse's sentence


def _until_over(line: JobLine) -> None:
    """Until the job's master says that it is over, or is there no more: it ends soon after."""
    try:
        while not line.picture().status.outcome:
            line.pause(POLL)
    except NotAnswered:
        return
