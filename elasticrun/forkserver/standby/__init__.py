"""THE NEXT LIFE OF EACH RANK, STARTED AHEAD OF TIME: a process that runs the script up to its first
effect and waits there, held by a tracer.

What a standby may do is decided by `rules`, what it has read is compared by `reads`; neither knows
ptrace. Forbidden here: grpc, threads, decisions about the job, and whatever stays in a rank.
"""
