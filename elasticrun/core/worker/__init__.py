"""The agent's state machine: what the local ranks do and when this node leaves.

Forbidden here: I/O, clocks, and the components by which the master decides.
"""
