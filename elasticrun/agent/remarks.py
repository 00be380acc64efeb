"""Sentences of ranks and savers for the operator: each once in a life of the ranks."""

from __future__ import annotations

from typing import Final

from elasticrun.agent.snapshot_peers import one_line
from elasticrun.operator_log import logger

REMARKS_MOST: Final = 20
"""Sentences of ranks and savers that are shown in one life."""


class Remarks:
    """Call it with a sentence."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, text: str, level: str = "warning") -> None:
        text = one_line(text)
        if text not in self._told and len(self._told) < REMARKS_MOST:
            self._told.add(text)
            getattr(logger, level)("%s", text)

    def clear(self) -> None:
        """A new life of the ranks: all may be said again."""
        self._told.clear()
