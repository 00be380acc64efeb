"""One record per node; which nodes are alive, dead, refused or in backoff.

Forbidden here: I/O, clocks, and imports from sibling packages.
"""
