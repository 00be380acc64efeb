"""THE CALLER'S SIDE of the Python API: a program that launches ranks without the command line.

Starts the agent as a separate process and forwards signals to it. If the entry point is a function,
the caller is also its spawner: the ranks are children of the caller, because only the caller has
the function. Forbidden here: grpc, torch (except what the caller has already imported), decisions.
"""
