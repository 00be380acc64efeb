"""This node's snapshots: shared memory, inventory, checkpoint writer, copies from other nodes.

Forbidden here: torch, and decisions. The master decides what is restored or written.
"""
