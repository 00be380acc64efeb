"""The pytest plugin for users' own tests: whole jobs of several nodes on one host, with fault
injection.

`plugin` is what pytest loads; `job` implements its fixture `elastic_job`; `hosts` makes hosts out
of network namespaces; `step` is called by a training script under test after each step. This
package is above all others: it starts the real command in separate processes and makes no
decisions. Forbidden here: torch, grpc and psutil, imports at pytest's start beyond what `plugin`
itself needs, and sleeping instead of waiting for an event.
"""

from elasticrun.testing.steps import Step, step

__all__ = ["Step", "step"]

WARM_FOLDER = "ELASTICRUN_TEST_WARM"
"""Environment variable with the folder of the warm process that all processes of a pytest run
share; `off`: there is none."""
