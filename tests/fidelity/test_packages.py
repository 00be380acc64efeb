"""The packages that training scripts use most: their imports do in a forked rank what they do under
torchrun. What is not installed is skipped (CONTRIBUTING.md has the environment with all)."""

from __future__ import annotations

import importlib.util

import pytest

from tests import needs
from tests.fidelity.compare import alike
from tests.fidelity.runner import Case, Runs
from tests.further import further

pytestmark = pytest.mark.slow

PACKAGES = (
    *("wandb", "mlflow", "tensorboard", "matplotlib.pyplot", "pandas", "pyarrow", "polars"),
    *("datasets", "transformers", "accelerate", "peft", "lightning", "torchmetrics", "h5py"),
    *("zarr", "numba", "sklearn", "hydra", "omegaconf", "ray", "s3fs", "cv2", "sentencepiece"),
    *("tokenizers", "tiktoken"),
)
"""The modules that scripts import of them."""


@further("fidelity/test_imports::test_imports")
@pytest.mark.parametrize("name", PACKAGES)
def test_a_package(runs: Runs, name: str) -> None:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        needs.lacking(f"not installed: {name.partition('.')[0]}")
    alike(runs, Case(("packages.py", name), ranks=1), "fork", "warm")


@further("fidelity/test_imports::test_imports")
def test_lightning_before_torch(runs: Runs) -> None:
    """It sets PYTORCH_NVML_BASED_CUDA_CHECK, which only Python code reads, and imports torch."""
    needs.packages("lightning")
    alike(runs, Case(("packages.py", "lightning", "torch"), ranks=1), "fork")
