"""The checkpoint writer: a process beside the ranks that writes, hashes and copies snapshots.

Forbidden here: grpc, asyncio, `core`.
"""
