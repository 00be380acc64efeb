"""The checkpoint writer: a separate process that writes, hashes and copies snapshots.

Forbidden here: grpc, asyncio, `core`.
"""
