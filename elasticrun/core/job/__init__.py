"""The master's state machine: routes events to components, ends the job, records facts for the next
master.

Forbidden here: I/O, clocks, random numbers.
"""
