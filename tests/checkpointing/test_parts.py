"""Nested states: flattened as DCP does it, and back."""

from __future__ import annotations

from typing import Any

import pytest

from elasticrun.checkpointing.parts import unflatten
from elasticrun.dcp.items import flatten


@pytest.mark.parametrize(
    "state",
    [
        {"lr_lambdas": [{}], "last_epoch": 3},  # a LambdaLR of functools.partial's
        {"x": [{}, {"a": 1}]},
        {"x": [[{}], 3, {}]},
        {"y": {}, "z": []},
        {"e": [{"b": {}}, {"a": [1, 2]}]},
        {"deep": {"er": {"empty": {}, "full": (1, 2)}}},
    ],
)
def test_what_leaves_no_trace_in_a_checkpoint_comes_back_too(state: dict[str, Any]) -> None:
    flat = flatten(state)
    assert unflatten({flat.paths[fqn]: value for fqn, value in flat.values.items()}, state) == state
