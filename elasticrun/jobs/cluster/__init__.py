"""Jobs of a Kubernetes cluster: the verbs (`verbs`), what pods have printed (`logs`), and how what
is submitted becomes objects (`submit`).

Forbidden here: lightkube before a cluster is asked; torch, grpc.
"""
