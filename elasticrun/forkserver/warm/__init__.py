"""A PROCESS THAT KEEPS TORCH IMPORTED BETWEEN JOBS: fork servers are forked from it.

It runs the fork server's program before it has an agent (`forkserver.loop`), so a fork of it equals
an exec'd fork server. Forbidden here, as in the whole fork server: grpc, CUDA, threads.
"""
