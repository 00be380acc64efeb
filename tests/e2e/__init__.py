"""Whole jobs, with something killed, blocked, taken or frozen."""
