"""What the fields of a message say together: the bounds that no field has alone.

`fields.py` asks in both directions, after the fields themselves have been checked on their way in
and before they are on their way out.
"""

from __future__ import annotations

from typing import Any

from elasticrun.wire import messages as m
from elasticrun.wire.field_kinds import WireError


def agree(value: Any, where: str) -> None:
    """WireError, naming the message `where`, if its fields contradict each other."""
    match value:
        case m.JobSpec() if value.min_nodes > value.max_nodes:
            raise WireError(f"{where}: min_nodes {value.min_nodes} > max_nodes {value.max_nodes}")
        case m.Start() | m.RoundReport() | m.Probe():
            if value.group_rank >= value.group_world_size or value.first_rank >= value.world_size:
                raise WireError(
                    f"{where}: node {value.group_rank} of {value.group_world_size} with first rank "
                    f"{value.first_rank} of {value.world_size}"
                )
        case m.Holding() if not 1 <= len(value.contents) <= value.world_size - value.first_rank:
            raise WireError(
                f"{where}: {len(value.contents)} ranks from rank {value.first_rank} on of "
                f"{value.world_size}"
            )
        case m.Holdings() if (listed := sum(len(h.contents) for h in value.held)) > m.MAX_CONTENTS:
            raise WireError(f"{where} lists {listed} ranks, more than {m.MAX_CONTENTS}")
        case m.Replicate():
            if not value.ranks or max(value.ranks) >= value.world_size:
                raise WireError(f"{where}: no rank, or one beyond {value.world_size}, is copied")
            if len(value.contents) != len(value.ranks):
                raise WireError(f"{where}: {len(value.contents)} contents of other ranks")
        case m.Persist():
            _agree_persist(value, where)


def _agree_persist(value: m.Persist, where: str) -> None:
    if not value.ranks or max(value.ranks) >= value.world_size:
        raise WireError(f"{where}: no rank, or one beyond {value.world_size}, would write")
    if not set(value.shared) <= set(value.ranks) or len(value.ranks) > value.writers:
        raise WireError(f"{where}: ranks write that are not among its {value.writers} writers")
    if value.coordinates is (value.coordinator is not None):
        raise WireError(f"{where}: a node coordinates, or is told who does")
