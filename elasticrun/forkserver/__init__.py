"""THE PROCESS WITH TORCH IMPORTED: forks ranks and helpers on request and reports their exits.

Single-threaded, started by file path. It exchanges frames of `wire.spawning` over one inherited
socketpair; it has no socket path and no port. Forbidden here: grpc, CUDA, threads, decisions.
"""
