"""Verbs that manage jobs by name: submit, list, suspend, resume, delete, prune, exec.

Forbidden here: torch; also grpc, YAML and a cluster's API, until the verb needs them.
"""
