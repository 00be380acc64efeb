"""One record for each node; when it is alive, dead, refused or backing off.

Forbidden here: I/O, clocks, and the folders beside it.
"""
