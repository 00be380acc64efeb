"""The demo as a user runs it: one rank killed on purpose, and its exit code is the promise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.further import further
from tests.harness import World

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_demo_keeps_its_promise(world: World) -> None:
    pytest.importorskip("sklearn")
    shown = world.command([sys.executable, str(EXAMPLES / "demo.py")])
    assert shown.wait() == 0, shown.stdout + shown.stderr
    assert "as promised" in shown.stdout
    assert "after the kill" in shown.stdout


@further("test_the_demo_keeps_its_promise")
def test_the_demo_says_when_it_fails(world: World) -> None:
    """One epoch is too little for the wanted accuracy: the exit code has to say so."""
    pytest.importorskip("sklearn")
    shown = world.command([sys.executable, str(EXAMPLES / "demo.py"), "--epochs=3"])
    assert shown.wait() == 1, shown.stdout + shown.stderr
    assert "not as promised" in shown.stdout
