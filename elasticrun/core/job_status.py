"""The picture that the master's brain gives of the job."""

from __future__ import annotations

from elasticrun.core.budget import Budget
from elasticrun.core.crew import Phase
from elasticrun.core.membership import Health, Membership
from elasticrun.core.rendezvous import Rendezvous
from elasticrun.core.roster import Roster
from elasticrun.core.rounds import Round
from elasticrun.wire.messages import JobSpec, JobStatus, NodeStatus


def nothing_yet(spec: JobSpec | None) -> JobStatus:
    """Before the first agent, which brings the spec where the master was given none."""
    return JobStatus(
        job_id=spec.job_id if spec else "",
        phase="gathering",
        reason="no agent has attached yet",
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


def picture(
    *,
    spec: JobSpec,
    rdzv: Rendezvous,
    membership: Membership,
    roster: Roster,
    round_: Round | None,
    budget: Budget,
    now: float,
    reason: str,
    last_failure: str,
    outcome: str,
) -> JobStatus:
    """All of it; O(nodes)."""
    phase = rdzv.phase.value
    if outcome:
        phase = "ended"
    elif rdzv.phase is Phase.GATHERING and rdzv.is_waiting_for_survivors():
        phase = "stopping"
    seats = round_.seats if round_ else {}
    starts = round_.starts if round_ else {}
    nodes = []
    for member in membership.nodes():
        entry = roster[member.node]
        here = rdzv.is_member(member.node)
        start = starts.get(member.node) if here else None
        nodes.append(
            NodeStatus(
                node=member.node,
                host=entry.hello.host,
                address=entry.hello.address,
                state=member.health.value,
                activity=rdzv.activity(member.node),
                reason=member.reason
                if member.health is not Health.ALIVE
                else (rdzv.reason_of(member.node) or entry.told),
                group_rank=seats.get(member.node, -1) if here else -1,
                first_rank=start.first_rank if start else -1,
                local_world_size=entry.hello.local_world_size,
                pids=entry.pids if here else (),
            )
        )
    return JobStatus(
        job_id=spec.job_id,
        phase=phase,
        reason=f"{reason} ({rdzv.detail()})" if reason and not outcome else reason,
        round=round_.name if round_ else None,
        world_size=round_.world_size if round_ else 0,
        restart_count=budget.count,
        restarts_left=budget.left(now),
        max_restarts=spec.max_restarts,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        nodes=tuple(nodes),
        last_failure=last_failure,
        outcome=outcome,
    )
