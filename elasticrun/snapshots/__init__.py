"""Snapshots as bytes and files: shared memory (`shm`), torch's checkpoint format (`dcp`),
checkpoint folders (`storage`), the process that hashes, writes and copies them (`saver`).
Forbidden: grpc.
"""
