"""This node's snapshots: shared memory, the inventory, the checkpoint writer, copies from other
nodes.

Forbidden here: torch, and decisions: the master decides what is restored or written.
"""
