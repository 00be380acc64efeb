"""THE CALLER'S SIDE of the Python API: a program that launches ranks without the command line.

Starts the agent as a process of its own, passes signals on to it, and, where the entry point is a
function, plays its spawner: ranks are then children of the caller, because nobody else has the
function. Forbidden here: grpc, torch (but for what the caller has already imported), decisions.
"""
