"""TORCH'S CHECKPOINT FORMAT (DCP): from state to items, to files, to metadata.

Used by ranks (`checkpointing`) and by the saver (`saver`). Only this folder uses torch's private
names; each has a public fallback for torch versions that lack it. Forbidden here: collectives and
process groups, sockets, threads, grpc, and every other folder except `shm` and `wire`.
"""
