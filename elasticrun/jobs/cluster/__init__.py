"""Jobs in a Kubernetes cluster: the verbs (`verbs`), the output of pods (`logs`), and turning a
submission into objects (`submit`).

Forbidden here: lightkube before a cluster is queried; torch, grpc.
"""
