"""Network checks and slow nodes: who probes with whom, and what that proves.

Forbidden here: I/O, clocks, snapshots.
"""
