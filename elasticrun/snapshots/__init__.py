"""Snapshots as bytes and files: shared memory (`shm`), torch's checkpoint format (`dcp`),
checkpoint folders (`storage`), the process that hashes and writes (`saver`). Forbidden: grpc.
"""
