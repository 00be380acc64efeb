"""The record: the master's machines as `Facts`, and `Facts` given to the machines of the next.

What is not written down is asked of the agents, who say all of it again on every stream: which
round they run, what failed, what has stopped. Beats and joins are no facts.
"""

from __future__ import annotations

from elasticrun.core.breakpoint_save import BreakpointSave
from elasticrun.core.exclusion import Exclusions
from elasticrun.core.facts import Facts, RoundFacts
from elasticrun.core.members import Health
from elasticrun.core.membership import Membership
from elasticrun.core.rendezvous import Rendezvous
from elasticrun.core.roster import Roster
from elasticrun.core.rounds import Round, restore
from elasticrun.core.settlement import Settlement
from elasticrun.core.silences import recalled
from elasticrun.core.stays import Stays
from elasticrun.core.succession import Standing
from elasticrun.wire.messages import End, JobSpec

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
    saves: BreakpointSave,
    outcome: End | None,
    now: float,
) -> Facts:
    """All that must outlive this master; O(nodes)."""
    was = rdzv.standing(now)
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
        round=_round_facts(round_, was, settlement.window.excused) if round_ else None,
        order=roster.order(keep, others=spec.max_nodes),
        charges=settlement.budget.ages(now),
        restart_count=settlement.budget.count,
        short_lives=settlement.budget.short_lives,
        left_out=tuple(one.fact(node, now) for node, one in membership.pasts(now)[-MAX_LEFT_OUT:]),
        fickle=stays.record(now),
        starved=was.starved,
        outcome=outcome,
        blind=rdzv.is_blind,
        blamed=settlement.blame.record(now),
        excluded=exclusions.page(now),
        slow_ages=exclusions.slow_ages(now),
        written=saves.written,
        rejected=saves.rejected(),
        rewound_from=saves.rewound_from,
        restore_step=saves.restore_step,
    )


def _round_facts(round_: Round, was: Standing, excuse: str) -> RoundFacts:
    return RoundFacts(
        name=round_.name,
        world_size=round_.world_size,
        restart_count=round_.restart_count,
        store=round_.store,
        store_node=round_.store_node,
        age=was.age,
        seats=tuple(round_.members.values()),
        adopted=round_.adopted,
        over="" if was.running else round_.why_stopped or "it is over",
        lost=was.lost,
        excuse=excuse,
        gone=was.gone,
        done=was.done,
        waiting=was.waiting,
        fenced=was.fenced,
        silent=was.silent,
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
    saves: BreakpointSave,
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
        rdzv.restore_wait(facts.starved, now)
        if facts.blind:
            rdzv.succeed_another(now)
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
    rdzv.restore(
        {seat.node: seat.ranks for seat in was.seats},
        was.world_size,
        Standing(
            running=not was.over,
            lost=was.lost,
            gone=was.gone,
            done=was.done,
            waiting=was.waiting,
            fenced=was.fenced,
            age=was.age,
            silent=was.silent,
            starved=facts.starved,
        ),
        now,
        redial=redial,
    )
    rdzv.restore_wait(facts.starved, now)
    round_ = restore(was)
    saves.begin_round(was.name, was.world_size, was.restore, round_.seats)
    saves.expect(node for node in round_.seats if node not in gone)
    return round_
