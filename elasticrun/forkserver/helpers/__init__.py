"""PROCESSES OF OURS BESIDE THE RANKS: store hosts, probes, the saver.

Whoever plays the spawner (the fork server, a caller of elastic_launch) starts all of them in one
way, forked or exec'd, and hears of them in one way. Forbidden here: grpc, threads, decisions.
"""
