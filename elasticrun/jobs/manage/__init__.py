"""Verbs that manage jobs by name: submit, list, suspend, resume, delete, prune, exec.

Forbidden here: torch; grpc, YAML and a cluster's API before the verb needs them.
"""
