"""Which cases of a table every run of the tests has, and which only `make soak`.

`make test` has an hour on two cores. A case that differs from its neighbours in one word of the
same rule is left to soak; so is what torchrun does alone, for it is pinned to one version and no
change of ours can change it (docs/decisions/018).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def cases(of: Iterable[Any], *, soaked: Sequence[Any]) -> list[Any]:
    """The values for `parametrize`, those of `soaked` marked."""
    values = list(of)
    missing = [value for value in soaked if value not in values]
    assert not missing, f"no cases of this table: {missing}"
    return [pytest.param(v, marks=pytest.mark.soak) if v in soaked else v for v in values]
