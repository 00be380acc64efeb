"""A rank that introduces itself: whether it is one of ours, and what it is told."""

from __future__ import annotations

from typing import Final

from elasticrun.agent.persisting import named
from elasticrun.wire import snapshots as s
from elasticrun.wire.messages import Start
from elasticrun.wire.segment import NONE, VERSION

MAX_KEY: Final = 2**63

FOLDER_MOST: Final = 4096
"""Characters of the path or URL of a folder of checkpoints."""


def refusal(here: s.RankHere, start: Start | None, nproc: int) -> str:
    """Why this rank is not heard, in a clause; "" if it is. `start`: of the ranks that live here;
    None: none does."""
    if here.version != VERSION:
        return f"its segments are of version {here.version}, ours of {VERSION}"
    if start is None or not 0 <= here.local_rank < nproc:
        return "no such rank was started"
    if len(here.folder) > FOLDER_MOST or not 0 <= here.keep_last < 2**31 > here.keep_every >= 0:
        return "it names a folder, or a number of checkpoints, that there cannot be"
    if not 0 <= here.replicas <= 1:
        return f"it wants {here.replicas} replicas; there may be 0 or 1"
    place = (start.first_rank + here.local_rank, start.world_size)
    if (here.rank, here.world_size) != place:
        said = f"rank {here.rank} of {here.world_size}"
        return f"it says that it is {said}, and is rank {place[0]} of {place[1]}"
    return ""


def is_impossible(need: s.NeedSegment) -> bool:
    """Whether it names a layout or a content that there cannot be."""
    return not 0 < need.content < MAX_KEY or not 0 <= need.layout < MAX_KEY


def resume(start: Start, *, same: bool, put_off: tuple[int, ...]) -> s.Resume:
    """What it goes on from. `same`: its own snapshot of that step lies here; `put_off`: signals
    that are not to end it before its state is saved."""
    restore = start.restore
    return s.Resume(
        present=named(start.round),
        round=s.Named() if restore is None else named(restore.round),
        step=NONE if restore is None else restore.step,
        world_size=0 if restore is None else restore.world_size,
        same=same,
        rewound_from=start.rewound_from,
        put_off=put_off,
    )
