"""OUR PROCESSES BESIDE THE RANKS: store hosts, probes, the saver.

Every spawner (the fork server, a caller of elastic_launch) starts them the same way, by fork or
exec, and receives their messages the same way. Forbidden here: grpc, threads, decisions.
"""
