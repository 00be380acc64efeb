"""What programs here take from tests/simulator, which is no part of what is installed: it is found
beside them, before any other package that is called `tests`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.simulator.node import NodeSetup
from tests.simulator.ranks import Rank, Worlds
from tests.simulator.script import DEFAULT_SPEC
from tests.simulator.world import World

__all__ = ["DEFAULT_SPEC", "NodeSetup", "Rank", "World", "Worlds"]
