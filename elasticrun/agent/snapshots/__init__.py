"""This node's snapshots: shared memory, what is held, the checkpoint writer, copies from other
nodes.

Forbidden here: torch, and deciding: what is restored or written the master says.
"""
