"""The record: the master's machines as `Facts`, and `Facts` given to the machines of the next.

What is not written down is asked of the agents, who say all of it again on every stream: which
round they run, what failed, what has stopped. Beats and joins are no facts.

The picture that the master's brain gives of the job.
"""

from __future__ import annotations

from collections.abc import Callable

from elasticrun.core.nodes.admission import Exclusions, Stays, recalled
from elasticrun.core.nodes.membership import Membership
from elasticrun.core.nodes.node import Health, Member, Roster
from elasticrun.core.persisted import Facts, RoundFacts
from elasticrun.core.rounds.budget import Budget, Settlement
from elasticrun.core.rounds.rendezvous import Phase, Rendezvous
from elasticrun.core.rounds.round import Round, restore
from elasticrun.core.snapshots.snapshots import Snapshots
from elasticrun.wire.messages import End, ExcludedNode, JobSpec, JobStatus, NodeStatus

MAX_LEFT_OUT = 1000
"""Nodes whose deaths by silence are recorded, the newest."""


def facts_of(
    *,
    spec: JobSpec,
    term: int,
    number: int,
    round_: Round | None,
    rdzv: Rendezvous,
    membership: Membership,
    roster: Roster,
    settlement: Settlement,
    stays: Stays,
    exclusions: Exclusions,
    saves: Snapshots,
    outcome: End | None,
    now: float,
) -> Facts:
    """All that must outlive this master; O(nodes)."""
    keep = {
        member.node
        for member in membership.nodes()
        if member.health in (Health.ALIVE, Health.SUSPECT)
    }
    keep.update(round_.members if round_ else ())
    return Facts(
        spec=spec,
        term=term,
        number=number,
        round=_round_facts(round_, rdzv, settlement.window.excused, now) if round_ else None,
        order=roster.order(keep, others=spec.max_nodes),
        charges=settlement.budget.ages(now),
        restart_count=settlement.budget.count,
        short_lives=settlement.budget.short_lives,
        left_out=tuple(one.fact(node, now) for node, one in membership.pasts(now)[-MAX_LEFT_OUT:]),
        fickle=stays.record(now),
        starved=rdzv.starved(now),
        outcome=outcome,
        blind=rdzv.takeover.expected_until is not None,
        blamed=settlement.blame.record(now),
        excluded=exclusions.page(now),
        slow_ages=exclusions.slow_ages(now),
        written=saves.checkpoints.written,
        rejected=saves.points.rejected(),
        rewound_from=saves.points.rewound_from,
        restore_step=saves.points.restore_step,
    )


def _round_facts(round_: Round, rdzv: Rendezvous, excuse: str, now: float) -> RoundFacts:
    last, running = rdzv.last, rdzv.phase is Phase.RUNNING
    return RoundFacts(
        name=round_.name,
        world_size=round_.world_size,
        restart_count=round_.restart_count,
        store=round_.store,
        store_node=round_.store_node,
        age=now - rdzv.formed_at,
        seats=tuple(round_.members.values()),
        adopted=round_.adopted,
        over="" if running else round_.why_stopped or "it is over",
        lost=last.lost[0] if last.lost else "",
        excuse=excuse,
        gone=tuple(last.away),
        done=tuple(node for node in last.away if node in last.completed),
        waiting=() if running else tuple(n for n in rdzv.ready if not last.is_member(n)),
        fenced=last.fenced,
        silent=now - last.last_word,
        restore=round_.restore,
        rewound_from=round_.rewound_from,
        suspect=round_.suspect,
        restore_step=round_.restore_step,
    )


def load(
    facts: Facts,
    *,
    rdzv: Rendezvous,
    membership: Membership,
    roster: Roster,
    settlement: Settlement,
    stays: Stays,
    exclusions: Exclusions,
    saves: Snapshots,
    now: float,
) -> Round | None:
    """Give every machine what it knew; the round of the record, None if none was formed."""
    roster.remember(facts.order)
    settlement.budget.restore(facts.restart_count, facts.charges, facts.short_lives, now)
    settlement.blame.restore(facts.blamed, now)
    membership.remember({one.node: recalled(one, now) for one in facts.left_out})
    stays.restore(facts.fickle, now)
    exclusions.restore(facts.excluded, facts.slow_ages, now)
    saves.restore(facts.written, facts.rejected, facts.rewound_from, facts.restore_step)
    if facts.outcome is not None:
        return restore(facts.round) if facts.round else None
    if facts.round is None:
        rdzv.restore(None, facts.starved, now, 0.0)
        if facts.blind:
            rdzv.takeover.expect_round(now)
        return None
    was = facts.round
    settlement.restore_round(was.excuse, adopted=was.adopted)
    redial = membership.redial(len(was.seats))
    gone = set(was.gone)
    stays.taken_over(seat.node for seat in was.seats)
    for seat in was.seats:
        if seat.node in gone:
            membership.recall(seat.node, seat.incarnation, now)
        else:
            membership.expect(seat.node, seat.incarnation, now, redial=redial)
    rdzv.restore(was, facts.starved, now, redial)
    round_ = restore(was)
    saves.begin_round(was.name, was.world_size, was.restore, round_.seats)
    saves.points.expect(node for node in round_.seats if node not in gone)
    return round_


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
    here = rdzv.last.is_member(member.node)
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
