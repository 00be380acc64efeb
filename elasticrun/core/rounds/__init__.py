"""Rendezvous: when a round forms or ends, rank assignment, the cost of a failure and who caused it.

Forbidden here: I/O, clocks, network checks, snapshots.
"""
