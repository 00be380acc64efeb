"""THE PROCESS THAT HAS TORCH READY: forks ranks and helpers on order, reports their exits.

Single-threaded, started by file path, speaks frames of `wire.spawning` over one inherited
socketpair; it has no path and no port. Forbidden here: grpc, CUDA, threads, decisions.
"""
