"""Storage of checkpoints: folders by path or URL, durable writes, retention.

A checkpoint is a folder `step-000000123`; it counts once its marker `.metadata` exists, which is
written last. Forbidden here: torch, grpc, threads, and every other package except `wire` and
`snapshots.shm`.
"""
