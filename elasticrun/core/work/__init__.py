"""Work that is handed out: which samples of a dataset each rank may use, and which were used by
which step (docs/decisions/042).

Forbidden here: I/O, clocks, network checks, the order of the shards, which only ranks know.
"""
