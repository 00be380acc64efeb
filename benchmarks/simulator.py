"""Re-exports what the benchmarks use of tests/simulator. That folder is not installed, so this
repository is put first on the path, before any other package named `tests`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.simulator.node import NodeSetup
from tests.simulator.ranks import Rank, Worlds
from tests.simulator.script import DEFAULT_SPEC
from tests.simulator.world import World

__all__ = ["DEFAULT_SPEC", "NodeSetup", "Rank", "World", "Worlds"]
