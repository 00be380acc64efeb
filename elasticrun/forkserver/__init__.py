"""THE PROCESS THAT HAS TORCH READY: forks ranks, stores, probes on order, reports their exits.

Single-threaded, started by file path, speaks frames of `wire.spawner` over one inherited
socketpair; it has no path and no port. Forbidden here: grpc, CUDA, threads, decisions.
"""
