"""A snapshot's bytes in shared memory: for the agent, the ranks and the checkpoint writer.

Forbidden here: asyncio, torch, grpc, sockets.
"""
