"""THE PROCESS THAT HAS TORCH READY: forks ranks, stores, probes, savers on order, reports their
exits.

Single-threaded, started by file path, speaks frames of `wire.spawning` over one inherited
socketpair; it has no path and no port. A saver is a process of its own: it has threads and a port.
Forbidden here: grpc, CUDA, threads (but in a saver), decisions.
"""
