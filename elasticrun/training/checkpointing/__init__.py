"""WHAT A RANK DOES FOR ITS SNAPSHOTS: collect state, copy it into shared memory, restore it.

Imported by `elasticrun.training` on first access to `Checkpointer`. Forbidden here: collectives,
threads that outlive a restore (except for a storage that hangs), storage access in a training step,
to raise into the script for a failed save, grpc, and every folder except `dcp`, `storage`, `shm`
and `wire`.
"""
