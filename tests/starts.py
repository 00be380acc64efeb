"""Starts that differ from another one, in what all nodes of the round know or in this node's
place."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from elasticrun.wire.messages import RoundInfo, Start
from elasticrun.wire.types import RoundName

OF_ALL = frozenset(RoundInfo.__struct_fields__)


def changed(start: Start, name: RoundName | None = None, **changes: Any) -> Start:
    """The same Start except for these fields of it or of its round, or in the round `name`."""
    of_all = {key: changes.pop(key) for key in OF_ALL & changes.keys()}
    info = replace(start.info, name=name or start.round, **of_all)
    return replace(start, info=info, **changes)
