"""FOR USERS' OWN TESTS: whole jobs of several nodes on one host, and everything that befalls them.

`plugin` is what pytest loads; `job` is what its fixture `elastic_job` gives; `hosts` makes hosts
out of network namespaces; `step` is what a training script under test calls after each step. A room
above all others: it starts the real command in processes of its own and knows no decision.
Forbidden here: torch, grpc and psutil, imports at pytest's start beyond what `plugin` itself needs,
and sleeping in the place of an event.
"""

from elasticrun.testing.steps import Step, step

__all__ = ["Step", "step"]
