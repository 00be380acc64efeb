"""THE JOB MASTER (shell), one per job: carries out what `core.job` decides.

Owns the loop, the gRPC server and the status page. Forbidden here: rules (they are in core/),
torch, locks, and handlers that do more than decode and enqueue.
"""
