"""The demo as a user runs it: one rank killed on purpose, and its exit code is the promise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.further import cases
from tests.harness import World

DEMO = Path(__file__).parents[2] / "examples/demo.py"


@pytest.mark.parametrize("kept", cases([True, False], kept=[True]), ids=["kept", "broken"])
def test_the_demo_keeps_its_promise_or_says_so(world: World, kept: bool) -> None:
    """Three epochs are too few for the wanted accuracy: the exit code has to say so."""
    pytest.importorskip("sklearn")
    shown = world.command([sys.executable, str(DEMO), *([] if kept else ["--epochs=3"])])
    assert shown.wait() == (0 if kept else 1), shown.stdout + shown.stderr
    assert ("the demo failed" in shown.stdout) != kept
    assert ("all checks passed" in shown.stdout) == kept
    assert ("What to type next" in shown.stdout) == kept
    assert "after the kill" in shown.stdout or not kept
