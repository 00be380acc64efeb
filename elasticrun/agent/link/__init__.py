"""The agent's connection to the master: the stream, heartbeats, a master process on this host.

Forbidden here: torch, and code that starts or signals ranks.
"""
