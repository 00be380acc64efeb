"""WHAT A RANK DOES FOR ITS SNAPSHOTS: collect state, copy it into shared memory, put it back.

Imported by `elasticrun.training` when `Checkpointer` is first named. Forbidden here: collectives,
threads that outlive a restore (but for a storage that hangs), storage in a training step, to raise
into the script for a save that failed, grpc, and every room but `dcp`, `storage`,
`shm` and `wire`.
"""
