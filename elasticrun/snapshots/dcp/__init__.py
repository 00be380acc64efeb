"""TORCH'S CHECKPOINT FORMAT (DCP): from state to items, to files, to metadata.

Used by ranks (`checkpointing`) and by the saver (`saver`). Only this folder uses private names of
torch, each beside the public alternative for torch versions without it. Forbidden here: collectives
and process groups, sockets, threads, grpc, and every other folder except `shm` and `wire`.
"""
