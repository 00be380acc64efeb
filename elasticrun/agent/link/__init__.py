"""The agent's connection to the master: the stream, heartbeats, a master process on this host.

Forbidden here: torch, the ranks.
"""
