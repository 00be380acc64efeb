"""Imports, seeds and settings in every order do in a rank what they do under torchrun."""

from __future__ import annotations

import pytest

from tests.fidelity.compare import alike
from tests.fidelity.runner import Case, Runs

pytestmark = pytest.mark.slow

IMPORTS = Case(("-m", "trainer.imports", "--debug"))
CUSTOMIZED = Case(("customized.py",), customized=True, executed=True)
VARIABLES = Case(("variables.py",), executed=True)


def test_imports_by_exec(runs: Runs) -> None:
    """Seeds before and after each import; vendored packages, stubs, patches, thread-locals,
    variables, signal handlers, hooks, streams, atexit."""
    alike(runs, IMPORTS, "exec")
