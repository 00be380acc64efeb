"""WHERE CHECKPOINTS LIE: folders by path or URL, how a file gets there for certain, what is kept.

A checkpoint is a folder `step-000000123`; it counts once its marker `.metadata` is there, which is
written last. Forbidden here: torch, grpc, threads, and every other room but `shm` and `wire`.
"""
