"""Imports, seeds and settings in every order do in a rank what they do under torchrun."""

from __future__ import annotations

import pytest

from tests.fidelity.compare import alike
from tests.fidelity.runner import Case, Runs
from tests.further import further

pytestmark = pytest.mark.slow

IMPORTS = Case(("-m", "trainer.imports", "--debug"))
CUSTOMIZED = Case(("customized.py",), customized=True, executed=True)
VARIABLES = Case(("variables.py",), executed=True)


def test_imports(runs: Runs) -> None:
    """Seeds before and after each import; vendored packages, stubs, patches, thread-locals,
    signal handlers, hooks, streams, atexit."""
    alike(runs, IMPORTS, "fork")


@further("test_imports", "forkserver/test_looks_like_exec")
def test_imports_by_exec_and_beside_a_warm_process(runs: Runs) -> None:
    alike(runs, IMPORTS, "exec", "warm")


@further("forkserver/test_trust::test_a_script_that_sets_what_an_import_reads")
def test_variables_that_are_set_by_the_script(runs: Runs) -> None:
    """What torch reads at its import has an effect, and the script's first lines run once."""
    alike(runs, VARIABLES, "fork", "warm")


@further(
    "forkserver/test_trust::test_a_sitecustomize_runs_in_each_rank_and_its_hook_is_kept",
    "forkserver/test_trust::test_lines_of_pth_files",
)
def test_what_the_interpreter_runs_at_its_start(runs: Runs) -> None:
    """sitecustomize and code of `.pth` files run in each rank, with its RANK."""
    alike(runs, CUSTOMIZED, "exec", "fork", "warm")
