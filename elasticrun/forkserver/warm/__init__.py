"""A PROCESS THAT HAS TORCH IMPORTED BETWEEN JOBS: fork servers are forked from it.

It is the fork server's program before it has an agent (`forkserver.life`), so that a fork of it is
what an exec'd fork server would be. Forbidden here, as in all of the fork server: grpc, CUDA,
threads.
"""
