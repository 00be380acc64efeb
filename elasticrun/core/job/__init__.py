"""The master's state machine: who hears which event, when the job ends, what the next master must
know.

Forbidden here: I/O, clocks, random numbers.
"""
