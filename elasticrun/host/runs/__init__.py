"""Run folders: the files that a job leaves behind, where they are, and the state they show.

Only files and /proc. Forbidden here: talking to a master, starting anything, threads, torch, grpc.
"""
