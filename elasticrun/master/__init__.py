"""The job master, one process per job: carries out what `core.job` decides (I/O, no decisions).

It owns the event loop, the gRPC server and the status page. Forbidden here: rules (they are in
core/), torch, locks, and handlers that do more than decode and enqueue.
"""
