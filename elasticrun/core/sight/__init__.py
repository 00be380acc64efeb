"""What the master knows of training itself: hangs and their causes, time accounting, incidents.

Forbidden here: I/O, a clock, an order about rounds or ranks. A verdict becomes a wish that the job
grants; everything else is only reported. Rounds, nodes and failures are read, never changed.
"""
