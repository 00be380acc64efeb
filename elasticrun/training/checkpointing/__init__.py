"""WHAT A RANK DOES FOR ITS SNAPSHOTS: collect state, copy it into shared memory, restore it.

Imported by `elasticrun.training` on first access to `Checkpointer`. Forbidden here: collectives,
threads that outlive a restore (except when storage hangs), storage access in a training step,
exceptions raised into the script for a failed save, grpc, and every folder except `dcp`, `storage`,
`shm` and `wire`.
"""
