"""What the ranks print: files, tails, the terminal.

Forbidden here: torch, grpc.
"""
