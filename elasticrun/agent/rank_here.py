"""A rank that introduces itself: whether it is one of ours, and what it is told."""

from __future__ import annotations

import os
import select
from typing import Final

from elasticrun.agent.held import Sizes
from elasticrun.agent.memory import NoRoom
from elasticrun.agent.persisting import named
from elasticrun.wire import env, snapshots as s
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


class Speakers:
    """The process that speaks for each local rank in this life: the first that did so. It need not
    be the one that was started, which may be a shell around it. Another one is a child, say an
    evaluation, whose state is not the rank's."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, int]] = {}  # pid and pidfd, -1: nobody comes after it

    def refusal(self, local_rank: int, pid: int) -> str:
        """Why this process is not heard for that rank, in a clause; "" if it speaks for it."""
        first, pidfd = self._first.get(local_rank, (pid, -1))
        if first != pid:
            if not _has_ended(pidfd):
                return (
                    f"process {first} speaks for that rank, and the state of another one is not "
                    f"the rank's: start that without {env.SNAPSHOTS}"
                )
            os.close(pidfd)
            del self._first[local_rank]
        if local_rank not in self._first:
            try:
                self._first[local_rank] = (pid, _opened(pid))
            except ProcessLookupError:
                return "its process has ended"
        return ""

    def clear(self) -> None:
        """A new life begins, or none will."""
        for _, pidfd in self._first.values():
            if pidfd >= 0:
                os.close(pidfd)
        self._first.clear()


def _opened(pid: int) -> int:
    """A pidfd; -1 where there is none to be had, and of a process with a session of its own, as
    every one has that we start for a rank: that rank ends with it. ProcessLookupError."""
    try:
        return -1 if os.getsid(pid) == pid else os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return -1


def _has_ended(pidfd: int) -> bool:
    """Whether that process has; false where nobody can tell."""
    if pidfd < 0:
        return False
    look = select.poll()
    look.register(pidfd, select.POLLIN)
    return bool(look.poll(0))


def sizes_of(need: s.NeedSegment) -> Sizes:
    """What it asks for. NoRoom for a layout or a content that there cannot be."""
    if not 0 < need.content < MAX_KEY or not 0 <= need.layout < MAX_KEY:
        raise NoRoom("it names a layout that there cannot be")
    return Sizes(need.layout, need.layout_length, need.slot_bytes, need.slots)


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
        suspect=start.suspect,
        restore_step=start.restore_step,
    )
