"""The fixture of this room: one job with sick nodes, of which nothing is left at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import passed
from tests.health.jobs import Health


@pytest.fixture
def health(elastic_job: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Health]:
    """See `Health`; a node that left something behind fails the test."""
    created = Health(elastic_job, tmp_path)
    yield created
    if passed(request):
        created.close()
