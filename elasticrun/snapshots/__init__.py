"""Snapshots as bytes and files: shared memory (`shm`), torch's checkpoint format (`dcp`), folders
of checkpoints (`storage`), the process that hashes and writes (`saver`). Forbidden: grpc.
"""
