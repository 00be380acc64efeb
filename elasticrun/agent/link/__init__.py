"""How the agent reaches the master: the stream, its beats, a master that runs on this host.

Forbidden here: torch, the ranks.
"""
