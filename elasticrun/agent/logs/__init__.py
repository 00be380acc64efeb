"""The output of the ranks: files, tails, the terminal.

Forbidden here: torch, grpc.
"""
