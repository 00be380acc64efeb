"""`elasticrun demo`: `show` runs a job, injects faults and prints what happens; `train` is the
job's script, which runs only in ranks. Forbidden here: torch outside `train`, and files outside the
demo's temporary folder."""

from typing import Final

FINISH: Final = "finish"
"""The file in the job's folder that ends the training."""

MISTAKE: Final = "mistake"
"""The file that makes rank 0 call a barrier alone."""

ACCURACY: Final = "accuracy"
"""The file with the fraction of test points that the trained model classifies correctly."""
