"""The last round that was formed or adopted: its name, and the place of every node in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elasticrun.core.placement import Candidate, choose, lay_out
from elasticrun.wire.ids import RoundName
from elasticrun.wire.messages import RoundReport, Start


@dataclass(slots=True)
class Round:
    """One round, as the master knows it."""

    name: RoundName
    world_size: int
    adopted: bool = False
    starts: dict[str, Start] = field(default_factory=dict)  # by node; none of an adopted round
    seats: dict[str, int] = field(default_factory=dict)  # node -> group rank
    why_stopped: str = ""

    def is_older_than(self, name: RoundName) -> bool:
        """Whether `name` is of a later round."""
        return (name.term, name.number) > (self.name.term, self.name.number)


def adopt(report: RoundReport) -> Round:
    """A round that another master formed, as far as one node knows it."""
    return Round(report.round, report.world_size, adopted=True)


def begin(
    name: RoundName,
    ready: Sequence[Candidate],
    limit: int,
    previous: Round | None,
    restart_count: int,
) -> Round:
    """Give `limit` of the ready nodes their places in a new round."""
    seats = previous.seats if previous else {}
    roles = {one.node: one.role for one in ready}
    world = lay_out(choose(ready, limit, seats), seats)
    round_ = Round(name, world.world_size)
    for place in world.places:
        round_.seats[place.node] = place.group_rank
        round_.starts[place.node] = Start(
            round=name,
            group_rank=place.group_rank,
            group_world_size=len(world.places),
            first_rank=place.first_rank,
            world_size=world.world_size,
            role_first_rank=place.role_first_rank,
            role_world_size=world.role_sizes[roles[place.node]],
            restart_count=restart_count,
            store=world.store,
            host_store=place.node == world.store_host,
        )
    return round_
