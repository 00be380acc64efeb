"""What only `make soak` runs, marked where the test stands, and what `make test` has in its place.

Three tiers, by two marks: a test without a mark is quick (`make check`); `slow` starts real jobs,
servers or long tables (`make test`); what is marked here is left to `make soak`, and names the
tests of the same rule that `make test` has. `test_further.py` looks whether they are there
(docs/decisions/018).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

TORCHRUN = "what torchrun does alone: pinned to one version, no change of ours can change it"


def further(*covered_by: str, why: str = "") -> pytest.MarkDecorator:
    """Only in `make soak`. `covered_by`: `test_x` of the same file, `room/test_file::test_x`, or
    `room/test_file` where a whole file is of that rule; `why`, where nothing needs to cover it."""
    assert covered_by or why
    return pytest.mark.soak(*covered_by)


def fresh_seeds(count: int, batch: int) -> range:
    """The first seed of each batch of `count` seeds that no soak of another day runs, so that few
    seeds at a time find what many at once would. A test names the seed that fails."""
    first = datetime.now(UTC).toordinal() * count
    return range(first, first + count, batch)


def examples(count: int) -> int:
    """How many examples of hypothesis a test draws: so many in `make test`, each time others, and
    ten times as many in `make soak`."""
    return count * int(os.environ.get("ELASTICRUN_TEST_EXAMPLES", "1"))


def cases(
    of: Iterable[Any],
    *,
    soaked: Sequence[Any] = (),
    kept: Sequence[Any] = (),
    several: bool = False,
) -> list[Any]:
    """The values for `parametrize`, those of `soaked` (or all but those that are `kept`) marked: a
    case that differs from its neighbours in one word of the same rule. `several`: each is a tuple
    of the values of several names."""
    values = list(of)
    missing = [value for value in (*soaked, *kept) if value not in values]
    assert not missing, f"no cases of this table: {missing}"
    left = [v for v in values if (v in kept if kept else v not in soaked)]
    assert left, "no case of this table is left to `make test`"

    def further_case(value: Any) -> Any:
        return pytest.param(*(value if several else (value,)), marks=pytest.mark.soak)

    return [value if value in left else further_case(value) for value in values]
