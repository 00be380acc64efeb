"""Whole trainings have the losses and weights that they have under torchrun, bit by bit."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from tests import needs
from tests.fidelity.compare import alike
from tests.fidelity.runner import Case, Runs
from tests.further import further

pytestmark = pytest.mark.slow

ALL = ("ddp", "compiled", "fsdp2", "checkpointer")
ALONE = (
    *(("ddp",), ("loaders",), ("fsdp2",), ("compiled",), ("checkpointer",), ("inductor",)),
    *(("trainer",), ("light",), ("--late", "trainer"), ("--late", "light")),
)
NEEDS = {"trainer": ("transformers", "accelerate"), "light": ("lightning",)}


@further(
    "fidelity/test_imports::test_imports",
    "training/data/test_jobs::test_trainers_of_frameworks_use_each_sample_once",
)
def test_training(runs: Runs) -> None:
    """DDP, torch.compile, FSDP2 and a Checkpointer, each imported after a seed."""
    alike(runs, Case(("train.py", "--late", *ALL)), "fork")


@further(
    "fidelity/test_imports::test_imports",
    "training/data/test_jobs::test_trainers_of_frameworks_use_each_sample_once",
)
@pytest.mark.parametrize("words", ALONE, ids=" ".join)
def test_each_training_alone(runs: Runs, words: tuple[str, ...]) -> None:
    missing = [n for n in NEEDS.get(words[-1], ()) if importlib.util.find_spec(n) is None]
    if missing:
        needs.lacking(f"not installed: {', '.join(missing)}")
    if words[-1] == "inductor" and shutil.which("g++") is None:
        needs.lacking("there is no C++ compiler here")
    alike(runs, Case(("train.py", *words)), "exec", "fork", "warm", at_once=False)


PARKED = (("ddp",), ("compiled",), ("fsdp2",), ("checkpointer",), ("trainer",), ("light",))


@pytest.mark.parametrize("words", PARKED, ids=" ".join)
def test_a_standby_trains_as_torchrun_does(runs: Runs, words: tuple[str, ...]) -> None:
    """The last life was started before the one before it has ended."""
    missing = [n for n in NEEDS.get(words[-1], ()) if importlib.util.find_spec(n) is None]
    if missing:
        needs.lacking(f"not installed: {', '.join(missing)}")
    alike(runs, Case(("train.py", *words), env={"FIDELITY_LATE": "1"}), "parked", at_once=False)
