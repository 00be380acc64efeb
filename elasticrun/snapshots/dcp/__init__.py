"""torch's checkpoint format (DCP): from state to items, to files, to metadata.

Used by ranks (`checkpointing`) and by the saver (`saver`). Only this folder of `snapshots` uses
torch's private names; each is part of the pickled format, or has a public fallback for torch
versions that lack it. Forbidden here: collectives and process groups, sockets, threads, grpc, and
every other folder of `snapshots` except `shm`.
"""
