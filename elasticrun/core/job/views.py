"""The status of the job, as `/status` and `elasticrun status` show it. `core/sight/picture.py` has
what `elasticrun top` and the page show in addition."""

from __future__ import annotations

from elasticrun.core.context import JobContext
from elasticrun.core.health.policy import HealthPolicy
from elasticrun.core.nodes.node import Health, Node
from elasticrun.core.reasons import NoAgentYet, Reason, code, text
from elasticrun.core.rounds.rendezvous import Phase
from elasticrun.core.sight.hangs.watch import Watch
from elasticrun.core.sight.picture import Goodput
from elasticrun.wire.messages import JobSpec, JobStatus, NodeStatus


def nothing_yet(spec: JobSpec | None) -> JobStatus:
    """The status before the first agent, which brings the spec if the master was started without
    one."""
    return JobStatus(
        job_id=spec.job_id if spec else "",
        phase="gathering",
        reason=text(NoAgentYet()),
        round=None,
        world_size=0,
        restart_count=0,
        restarts_left=spec.max_restarts if spec else 0,
        max_restarts=spec.max_restarts if spec else 0,
        min_nodes=spec.min_nodes if spec else 0,
        max_nodes=spec.max_nodes if spec else 0,
        nodes=(),
        last_failure="",
        outcome="",
    )


def job_status(
    ctx: JobContext,
    health: HealthPolicy,
    *,
    reason: Reason | None,
    ends: float | None,
    last_failure: Reason | None,
    snapshot: str,
    watch: Watch,
    goodput: Goodput | None,
) -> JobStatus:
    """The full status; O(nodes). `ends`: when the wait that `reason` describes ends at the
    latest."""
    now, rdzv, budget, spec = ctx.now, ctx.rdzv, ctx.restarts.budget, ctx.spec
    phase = rdzv.phase.value
    if ctx.outcome is not None:
        phase = "ended"
    elif rdzv.phase is Phase.GATHERING and rdzv.awaits_survivors:
        phase = "stopping"
    rest = f"; at most {max(0.0, ends - now):.0f} s more" if ends is not None else ""
    waits_for = text(reason)
    waits = reason is not None and ctx.outcome is None

    def why(node: Node) -> str:
        if node.health is not Health.ALIVE:
            return text(node.reason)
        sent = node.sent_reason
        return (
            ctx.membership.why_sluggish(node, now)
            or rdzv.reason_of(node.id, now)
            or (f"{sent}{rest}" if sent and sent == waits_for else sent)
        )

    verdict = watch.verdict()
    return JobStatus(
        job_id=spec.job_id,
        phase=phase,
        reason=f"{waits_for} ({rdzv.detail()}{rest})" if waits else waits_for,
        round=ctx.round.name if ctx.round else None,
        world_size=ctx.round.info.world_size if ctx.round else 0,
        restart_count=budget.count,
        restarts_left=budget.remaining(now),
        max_restarts=spec.max_restarts,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        nodes=tuple(
            _node(ctx, node, why(node), health.health(node.id)) for node in ctx.nodes.values()
        ),
        last_failure=text(last_failure),
        failed=code(last_failure),
        outcome=ctx.outcome.reason if ctx.outcome else "",
        ended=ctx.outcome.code if ctx.outcome else None,
        excluded=ctx.exclusions.page(now),
        check=health.summary(),
        snapshot=snapshot,
        verdict=verdict.sentence if verdict else "",
        quiet=watch.quiet(),
        goodput=goodput.summary if goodput is not None else "",
        hang=verdict.klass if verdict and not verdict.says else "",
    )


def _node(ctx: JobContext, node: Node, reason: str, health: str) -> NodeStatus:
    hello = node.known_hello  # None: a member of a restored round that has not attached yet
    is_member = ctx.rdzv.last.is_member(node.id)
    seat = ctx.round.members.get(node.id) if ctx.round and is_member else None
    ranks = seat.ranks if seat else 0
    return NodeStatus(
        node=node.id,
        host=hello.host if hello else "",
        address=hello.address if hello else "",
        state=node.health.value,
        activity="none" if node.health is Health.DEAD else ctx.rdzv.activity(node.id),
        reason=reason,
        group_rank=seat.group_rank if seat else -1,
        first_rank=seat.first_rank if seat else -1,
        local_world_size=hello.local_world_size if hello else ranks,
        pids=node.pids if is_member else (),
        health=health,
        notices=node.notices,
        standby=node.standby,
    )
