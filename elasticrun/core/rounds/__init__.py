"""Rendezvous: when a round forms or ends, who sits where, what a failure costs and whose fault it
was.

Forbidden here: I/O, clocks, network checks, snapshots.
"""
