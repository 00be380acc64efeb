"""How nodes find their master: by endpoint (c10d), in etcd, in a shared folder.

Forbidden here: torch, and code that starts or signals ranks.
"""
