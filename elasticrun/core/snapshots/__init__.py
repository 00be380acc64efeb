"""Which step is restored, which nodes hold it, which copy it, which write it as a checkpoint.

Forbidden here: I/O, clocks, network checks.
"""
