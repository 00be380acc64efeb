"""Each test is a rank of its own, though all of them are one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elasticrun.checkpointing import line


@pytest.fixture(autouse=True)
def as_if_just_born() -> Iterator[None]:
    """Nothing is known of the agent that another test has played."""
    yield
    line._places.clear()
