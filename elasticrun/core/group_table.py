"""Rules ("in these states, at these events, this method") as a table and as a drawing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elasticrun.core.group_states import State

Method = Callable[[Any, Any, float], None]
"""(the group, the event or order, now)."""

Rules = tuple[tuple[tuple[State, ...], tuple[type, ...], Method], ...]


def tabulate(rules: Rules) -> dict[tuple[State, type], Method]:
    """Every pair that is listed; two rules for one pair are an error."""
    table: dict[tuple[State, type], Method] = {}
    for states, kinds, method in rules:
        for state in states:
            for kind in kinds:
                if (state, kind) in table:
                    raise ValueError(f"two rules for {state.value} and {kind.__name__}")
                table[state, kind] = method
    return table


def draw_table(rules: Rules) -> str:
    """Markdown; a dot is "nothing to do", an empty cell "cannot happen"."""
    table = tabulate(rules)
    kinds = list(dict.fromkeys(kind for _, kinds, _ in rules for kind in kinds))
    lines = [
        "| | " + " | ".join(state.value for state in State) + " |",
        "|---" * (len(State) + 1) + "|",
    ]
    for kind in kinds:
        cells = []
        for state in State:
            method = table.get((state, kind))
            name = "" if method is None else method.__name__.lstrip("_").replace("_", " ")
            cells.append("·" if name == "ignore" else name)
        lines.append(f"| {kind.__name__} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
