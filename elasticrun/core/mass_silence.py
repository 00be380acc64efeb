"""When so many nodes fall silent together that it is the master that has been cut off.

Nodes die one by one, or a few at a time. Where more than half of a round's nodes (of three at
least) are silent at once, the one that hears nothing is the likelier to be at fault: the verdict
waits for MASS_SILENCE_HOLD, and is given then if they are silent still.
"""

from __future__ import annotations

from collections.abc import Collection

from elasticrun.config import MASS_SILENCE_HOLD

SMALLEST = 3
"""Of fewer nodes in a round nothing can be told: with two, half of them is one."""


class MassSilence:
    """Whether verdicts are held back; times are monotonic seconds."""

    def __init__(self) -> None:
        self._until: float | None = None
        self._silent: set[str] = set()  # who is silent while verdicts are held back

    def holds_until(self, silent: Collection[str], size: int, now: float) -> float | None:
        """Until when nobody is given up, now that these of the round's `size` nodes are silent too;
        None: the verdict may be given."""
        self._silent.update(silent)
        if size < SMALLEST or 2 * len(self._silent) <= size:
            self._over()
            return None
        if self._until is None:
            self._until = now + MASS_SILENCE_HOLD
        return self._until if now < self._until else None

    def overslept(self, by: float) -> None:
        """The master did not listen for so many seconds: they do not count."""
        if self._until is not None:
            self._until += by

    def settled(self, node: str) -> None:
        """It is heard again, or has gone. Of the last of them: the next mass silence is another
        one. O(1)."""
        if self._until is not None:
            self._silent.discard(node)
            if not self._silent:
                self._over()

    def reason(self) -> str:
        """Why no verdict is given although nodes are silent; empty if none is held back."""
        if self._until is None:
            return ""
        return (
            "more than half of the nodes fell silent together, so it is the master that may be cut "
            f"off; nobody is given up for {MASS_SILENCE_HOLD:g} s"
        )

    def _over(self) -> None:
        self._until = None
        self._silent.clear()
