"""How nodes find their master: by endpoint (c10d), by etcd, by a shared folder.

Forbidden here: torch, the ranks.
"""
