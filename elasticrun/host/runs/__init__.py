"""Run folders: what a job leaves behind in files, where they lie, and what they say of it.

Files and /proc alone. Forbidden here: talking to a master, starting anything, threads, torch, grpc.
"""
