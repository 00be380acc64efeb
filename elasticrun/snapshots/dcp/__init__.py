"""WHAT WE KNOW OF TORCH'S CHECKPOINT FORMAT (DCP): state to items, to files, to metadata.

Used by ranks (`checkpointing`) and by the saver (`saver`). Private names of torch stand here
alone, each beside the public way that is taken where it is missing. Forbidden here: collectives and
process groups, sockets, threads, grpc, and every other room but `shm` and `wire`.
"""
