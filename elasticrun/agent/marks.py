"""What ranks read in their segments' control pages: which step is whole, which never will be."""

from __future__ import annotations

from collections.abc import Iterable

from elasticrun.agent.held import Held
from elasticrun.wire.segment import NONE


class Marks:
    """Of the present life of the ranks."""

    def __init__(self) -> None:
        self.watermark = NONE
        self.given_up = NONE
        self.resumed = False
        """Whether the watermark is a step of this very life."""

    def begin(self, restored: int) -> None:
        """A new life goes on from this step; NONE: from nothing in memory."""
        self.watermark, self.given_up, self.resumed = restored, NONE, False

    def show(self, held: Iterable[Held]) -> None:
        """Write both into these segments."""
        for one in held:
            if not one.gone:
                one.segment.watermark = self.watermark
                one.segment.given_up = self.given_up

    def rise(self, step: int) -> bool:
        """This step of the present life is whole; whether that is news."""
        if step < 0 or (step <= self.watermark and self.resumed):
            return False
        self.watermark, self.resumed = step, True
        return True

    def give_up(self, step: int) -> bool:
        """Steps above the watermark up to this one will never be whole; whether that is news."""
        if step <= max(self.watermark, self.given_up):
            return False
        self.given_up = step
        return True
