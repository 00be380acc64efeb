"""Which step is restored, who holds it, who copies it, who writes it as a checkpoint.

Forbidden here: I/O, clocks, network checks.
"""
