"""The ranks of this node: started, signalled, explained; their stores and probes.

Forbidden here: torch, grpc.
"""
