"""Jobs in a Kubernetes cluster, as their user sees them: the asking of the API server (`api`), what
its objects say of a job and its pods (`seen`), what pods have printed (`pod_logs`), what nodes have
(`room`). The operator has its own talk with the server, and rights of its own.

Forbidden here: printing, torch, grpc. lightkube is an extra: it is imported where `api` is.
"""
