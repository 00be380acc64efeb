"""The ranks of this node: start, signals, exits; their stores and probes.

Forbidden here: torch, grpc.
"""
