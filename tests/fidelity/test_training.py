"""Whole trainings have the losses and weights that they have under torchrun, bit by bit."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from tests import needs
from tests.fidelity.compare import alike
from tests.fidelity.runner import Case, Runs
from tests.further import cases, further

pytestmark = pytest.mark.slow

ALL = ("ddp", "compiled", "fsdp2", "checkpointer")
ALONE = (
    *(("ddp",), ("loaders",), ("fsdp2",), ("compiled",), ("checkpointer",), ("inductor",)),
    *(("trainer",), ("light",), ("--late", "trainer"), ("--late", "light")),
)
TOGETHER = ("ddp", "compiled", "fsdp2")
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
    skip_without(words[-1])
    if words[-1] == "inductor" and shutil.which("g++") is None:
        needs.lacking("there is no C++ compiler here")
    alike(runs, Case(("train.py", *words)), "exec", "fork", "warm", at_once=False)


def skip_without(name: str) -> None:
    """Skip if the packages of this script are not installed."""
    missing = [package for package in NEEDS.get(name, ()) if not importlib.util.find_spec(package)]
    if missing:
        needs.lacking(f"not installed: {', '.join(missing)}")


@pytest.mark.parametrize(
    "words",
    cases([("ddp",), TOGETHER, ("checkpointer",), ("trainer",), ("light",)], kept=[("ddp",)]),
    ids=" ".join,
)
def test_a_standby_trains_as_torchrun_does(runs: Runs, words: tuple[str, ...]) -> None:
    """The last life was started before the one before it has ended."""
    skip_without(words[-1])
    alike(runs, Case(("train.py", *words), env={"FIDELITY_LATE": "1"}), "parked", at_once=False)
