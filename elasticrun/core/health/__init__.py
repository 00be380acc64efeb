"""Network checks and slow nodes: which nodes probe with which, and what that proves.

Forbidden here: I/O, clocks, snapshots.
"""
