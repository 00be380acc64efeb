"""Run folders: the files that a job leaves behind, their location, and the job's state in them.

Only files and /proc. Forbidden here: talking to a master, starting anything, threads, torch, grpc.
"""
