"""Why a round ended, as incidents describe it: the cause, what failed first, and what followed."""

from __future__ import annotations

from dataclasses import dataclass

from elasticrun.config import STOPPED_AFTER
from elasticrun.core.context import JobContext
from elasticrun.core.nodes.admission import ASKED, DIFFERS, SLOW
from elasticrun.core.nodes.node import Health
from elasticrun.core.reasons import (
    BackedOff,
    ByOperator,
    Excluded,
    HasLeft,
    Joined,
    Leaves,
    NodeLost,
    RanksStopped,
    Reason,
    ReplicasDiffer,
    Scaled,
    text,
)
from elasticrun.core.rounds.failures import ended_before, what_happened
from elasticrun.core.words import plural, rank_names
from elasticrun.wire.messages import Failure, FailureKind

MAX_KINDS = 4
"""Maximum number of different failures of other ranks that an incident lists."""

FAILURES = ("rank_failed", "hang", "script", "node_lost", "corruption")
"""Causes that are errors in events and logs; other causes are not."""

_OF_A_RANK = {FailureKind.HUNG: "hang", FailureKind.FINAL: "script"}


@dataclass(frozen=True, slots=True)
class Origin:
    """What failed first, and the cause. `node` and `rank`: "" and -1 if none is responsible."""

    cause: str
    sentence: str
    node: str = ""
    rank: int = -1
    exitcode: int = 0
    kind: str = ""
    ended_before: str = ""
    silent: float = 0.0  # seconds since the last sign of life of a lost node


def origin_of(ctx: JobContext, reason: Reason) -> Origin:
    """What failed first in the last round, if `reason` ended it. O(failures), once per incident."""
    if (node := _node_of(reason)) and ctx.round is not None and node in ctx.round.seats:
        return Origin(_of_a_node(reason), text(reason), node, silent=_seconds_silent(ctx, node))
    window = ctx.restarts.window
    failures = window.failures
    if failures and not window.excused:
        return _of_a_failure(ctx, failures[0])
    if isinstance(reason, ReplicasDiffer):
        return Origin("corruption", text(reason))
    if isinstance(reason, Joined | Scaled):
        return Origin("scaled", text(reason))
    return Origin("operator" if isinstance(reason, ByOperator) else "master", text(reason))


def followers(ctx: JobContext, origin: Origin) -> str:
    """What happened to the other ranks that failed, in one line; "" if none failed."""
    kinds: dict[str, list[int]] = {}
    for failure in ctx.restarts.window.failures:
        if failure.rank != origin.rank:
            kinds.setdefault(what_happened(failure), []).append(failure.rank)
    clauses = [f"{rank_names(ranks)}: {what}" for what, ranks in list(kinds.items())[:MAX_KINDS]]
    more = len(kinds) - MAX_KINDS
    return "; ".join(clauses) + (f"; {plural(more, 'other end')}" if more > 0 else "")


def node_of(ctx: JobContext, rank: int) -> str:
    """The node of the last round that has this rank; "" if unknown."""
    seats = () if ctx.round is None else ctx.round.members.values()
    return next((s.node for s in seats if s.first_rank <= rank < s.first_rank + s.ranks), "")


def _node_of(reason: Reason) -> str:
    """The node that is lost, or that has begun to stop its ranks without an order; "" if none."""
    match reason:
        case NodeLost(node=node) | RanksStopped(node=node, over=False):
            return node
    return ""


def _of_a_node(reason: Reason) -> str:
    match reason:
        case NodeLost(how=BackedOff()):
            return "rank_failed"
        case NodeLost(how=HasLeft(why=Excluded(by=by)) | Excluded(by=by)):
            named = {SLOW: "node_slow", ASKED: "operator", DIFFERS: "corruption"}
            return named.get(by, "node_lost")
        case NodeLost(how=HasLeft(why=Leaves(signal=signum))) if signum:
            return "preempted"
    return "node_lost"


def _seconds_silent(ctx: JobContext, name: str) -> float:
    """Seconds since the last sign of life of a node that is suspect or dead; else 0.0. A stream
    that the kernel closed when the process died is a sign of life."""
    node = ctx.nodes.get(name)
    if node is None or node.health not in (Health.SUSPECT, Health.DEAD):
        return 0.0
    closed = node.known_hello is not None and node.quiet < STOPPED_AFTER
    last = max(node.broke_at, node.last_heard) if closed else node.last_heard
    return max(0.0, ctx.now - last)


def _of_a_failure(ctx: JobContext, failure: Failure) -> Origin:
    node = node_of(ctx, failure.rank)
    alone = ctx.round is None or len(ctx.round.seats) < 2
    where = f"rank {failure.rank}" + ("" if alone or not node else f" on node {node}")
    if failure.kind is FailureKind.HUNG:
        sentence = failure.message or f"{where} hung"  # the verdict names the rank
    elif failure.kind is FailureKind.PEER_LOST and (who := ended_before(failure)):
        sentence = f"{who} exited with 0 while others continued; {where} lost its connection"
    else:
        sentence = f"{where} failed ({what_happened(failure)})"
    cause = _OF_A_RANK.get(failure.kind, "rank_failed")
    end = (failure.exitcode, failure.kind, failure.ended_before)
    return Origin(cause, sentence, node, failure.rank, *end)
