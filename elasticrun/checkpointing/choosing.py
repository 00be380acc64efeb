"""What all ranks go on from, and that before anything is loaded.

That is the newest step, in memory or in storage. What ranks have failed with soon after they went
on from it is suspect and comes last: it is tried again before training begins anew. A step that a
person asks for is taken and no other.

Rank 0 compares memory with storage and tells the others. A checkpoint in storage is looked at by
all ranks, each a part of it; where one finds it spoiled, rank 0 chooses once more, in the same life
of the ranks: nothing has been loaded, so there is nothing to undo.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from elasticrun.checkpointing.board import Board
from elasticrun.checkpointing.state import State
from elasticrun.checkpointing.storing import SpoiledError, Stored
from elasticrun.storage.errors import StorageError
from elasticrun.storage.folder import Folder

LOOK_LIMIT: Final = 10.0
"""Seconds for a look into storage, where there is a step in memory to go on from."""

MOST_SPOILED: Final = 8
"""Checkpoints found spoiled in one life, one after the other: then it is the storage."""


class NotAgreed(RuntimeError):
    """Another rank cannot look at the checkpoint; a sentence."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What both ways need to know."""

    folder: Folder
    rank: int
    world_size: int
    slots: int
    keep_last: int
    keep_every: int
    verify: bool
    replicas: int = 0
    weights_only: bool = True
    least_slots: int = 0  # that will do where there is no room for more; 0: no fewer


class NotThere(RuntimeError):
    """The step that a person asks for cannot be had; a sentence."""


MOST_NAMED: Final = 10
"""Checkpoints that a sentence names."""


class Choice:
    """One restore. `memory`: the step that can be had from memory, -1: none. Checkpoints of step
    `rewound_from` and later ones come last, -1: none does; and so does memory if it is `suspect`.
    `restore_step`: that a person asks for; -1: nobody does. `tell`: a sentence to the operator."""

    def __init__(
        self,
        setting: Setting,
        board: Board,
        tell: Callable[[str], None],
        memory: int = -1,
        rewound_from: int = -1,
        *,
        suspect: bool = False,
        restore_step: int = -1,
    ) -> None:
        self._setting = setting
        self._board = board
        self._tell = tell
        self._memory = memory
        self._rewound = rewound_from
        self._suspect = suspect
        self._restore_step = restore_step
        self._spoiled = -1  # what was found so last: none from there on
        self._round = 0  # of choosing

    def restore(self, state: State) -> tuple[str, int]:
        """Choose; from storage it is loaded too. Its name ("memory", "storage", "nothing") and the
        step. SpoiledError, NotAgreed, NotThere, and whatever `Stored` raises."""
        for self._round in range(MOST_SPOILED):
            source, step = self._choose()
            if source != "storage":
                return source, step
            stored, wrong = self._look(step)
            if not wrong:
                stored.load(state)
                return source, step
            if self._setting.rank == 0:
                self._tell(stored.condemn(wrong))
            self._spoiled = step
        raise SpoiledError(
            f"{MOST_SPOILED} checkpoints in {self._setting.folder.url} were found spoiled, one "
            "after the other: see to the storage; the next start looks at those before them"
        )

    def _choose(self) -> tuple[str, int]:
        """The same on all ranks: rank 0 finds it."""
        key = f"from/{self._round}"
        if self._setting.rank != 0:
            source, _, what = self._board.hear(key).partition(" ")
            if source == "away":
                raise NotAgreed(f"rank 0 cannot say what to go on from: {what}")
            return source, int(what)
        try:
            chosen = self._asked_for() if self._restore_step >= 0 else self._best()
        except Exception as error:  # the others must not wait for what is not to come
            self._board.say(key, f"away {error!s:.500}")
            raise
        self._board.say(key, f"{chosen[0]} {chosen[1]}")
        return chosen

    def _asked_for(self) -> tuple[str, int]:
        step, folder = self._restore_step, self._setting.folder
        if self._memory == step:
            return "memory", step
        whole = sorted(one.step for one in folder.survey() if one.committed)
        if step in whole:
            return "storage", step
        there = ", ".join(map(str, whole[-MOST_NAMED:])) or "none"
        raise NotThere(
            f"--restore-step={step}: step {step} is not whole in memory, and {folder.url} has no "
            f"whole checkpoint of it (it has: {there})"
        )

    def _best(self) -> tuple[str, int]:
        """The larger step wins, and memory where they are equal; what is suspect comes last."""
        memory = -1 if self._suspect else self._memory
        below = [step for step in (self._rewound, self._spoiled) if step >= 0]
        stored = self._newest(memory, min(below, default=-1))
        if max(memory, stored) < 0 and (self._suspect or self._rewound >= 0):
            memory, stored = self._memory, self._newest(self._memory, self._spoiled)
            if max(memory, stored) >= 0:
                again = f"step {max(memory, stored)} is tried again"
                self._tell(
                    f"{again}, although ranks have failed soon after it: nothing else is left"
                )
        if memory >= 0 and memory >= stored:
            return "memory", memory
        return ("storage", stored) if stored >= 0 else ("nothing", 0)

    def _newest(self, memory: int, below: int) -> int:
        """In storage; a step in memory does not wait for a storage that is away."""
        folder = self._setting.folder
        if memory < 0:
            return folder.newest(below)
        answer: SimpleQueue[int | Exception] = SimpleQueue()

        def look() -> None:
            try:
                answer.put(folder.newest(below, above=memory))
            except Exception as error:  # of a library that knows the storage
                answer.put(error)

        try:
            # not by `threading`, whose start() waits for ever for a thread that dies for want of
            # memory before it is one
            _thread.start_new_thread(look, ())
            found = answer.get(timeout=LOOK_LIMIT)
        except RuntimeError as error:
            found = StorageError(str(error))
        except Empty:
            found = StorageError(f"{folder.url} has not answered for {LOOK_LIMIT:.0f} s")
        if isinstance(found, int):
            return found
        self._tell(f"step {memory} is taken from memory, storage was not looked at: {found}")
        return -1

    def _look(self, step: int) -> tuple[Stored, str]:
        """The checkpoint, and "" if no rank finds a fault in it; then it may be loaded. Else what
        the first one found, the same for all."""
        setting, key = self._setting, f"whole/{self._round}"
        try:
            stored = Stored(
                *(setting.folder, step, setting.rank, setting.world_size),
                *(setting.verify, setting.weights_only),
            )
            wrong = stored.fault()
        except Exception as error:  # the others must not wait for this rank
            self._board.object(key, f"away rank {setting.rank}: {error!s:.500}")
            raise
        heard = self._board.object(key, f"spoiled {wrong}") if wrong else self._board.agreed(key)
        why, _, wrong = heard.partition(" ")
        if why == "away":
            raise NotAgreed(f"step {step} in storage cannot be restored by all ranks: {wrong}")
        return stored, wrong
