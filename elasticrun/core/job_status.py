"""The picture that the master's brain gives of the job."""

from __future__ import annotations

from collections.abc import Callable

from elasticrun.core.budget import Budget
from elasticrun.core.crew import Phase
from elasticrun.core.members import Health, Member
from elasticrun.core.membership import Membership
from elasticrun.core.rendezvous import Rendezvous
from elasticrun.core.roster import Roster
from elasticrun.core.rounds import Round
from elasticrun.wire.messages import ExcludedNode, JobSpec, JobStatus, NodeStatus


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
    ends: float | None,
    last_failure: str,
    outcome: str,
    health: Callable[[str], str],
    excluded: tuple[ExcludedNode, ...],
    check: str,
    snapshot: str,
) -> JobStatus:
    """All of it; O(nodes). `ends`: when the wait that `reason` speaks of is over at the latest;
    `health`: node -> what its probes and steps have shown."""
    phase = rdzv.phase.value
    if outcome:
        phase = "ended"
    elif rdzv.phase is Phase.GATHERING and rdzv.is_waiting_for_survivors():
        phase = "stopping"
    rest = f"; at most {max(0.0, ends - now):.0f} s more" if ends is not None else ""

    def why(member: Member) -> str:
        if member.health is not Health.ALIVE:
            return member.reason
        entry = roster.get(member.node)
        told = entry.told if entry else ""
        return (
            membership.sluggish(member, now)
            or rdzv.reason_of(member.node, now)
            or (f"{told}{rest}" if told and told == reason else told)
        )

    return JobStatus(
        job_id=spec.job_id,
        phase=phase,
        reason=f"{reason} ({rdzv.detail()}{rest})" if reason and not outcome else reason,
        round=round_.name if round_ else None,
        world_size=round_.world_size if round_ else 0,
        restart_count=budget.count,
        restarts_left=budget.left(now),
        max_restarts=spec.max_restarts,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        nodes=tuple(
            _node(member, why(member), rdzv, roster, round_, health(member.node))
            for member in membership.nodes()
        ),
        last_failure=last_failure,
        outcome=outcome,
        excluded=excluded,
        check=check,
        snapshot=snapshot,
    )


def _node(
    member: Member,
    reason: str,
    rdzv: Rendezvous,
    roster: Roster,
    round_: Round | None,
    health: str,
) -> NodeStatus:
    entry = roster.get(member.node)  # None: of a restored round, and not heard yet
    here = rdzv.is_member(member.node)
    seat = round_.members.get(member.node) if round_ and here else None
    ranks = seat.ranks if seat else 0
    return NodeStatus(
        node=member.node,
        host=entry.hello.host if entry else "",
        address=entry.hello.address if entry else "",
        state=member.health.value,
        activity="none" if member.health is Health.PARKED else rdzv.activity(member.node),
        reason=reason,
        group_rank=seat.group_rank if seat else -1,
        first_rank=seat.first_rank if seat else -1,
        local_world_size=entry.hello.local_world_size if entry else ranks,
        pids=entry.pids if entry and here else (),
        health=health,
    )
