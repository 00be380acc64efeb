"""Jobs in a Kubernetes cluster, from the user's side.

`api` queries the API server, `observed` reads objects and pods, `pod_logs` reads the logs of pods,
`capacity` reports the nodes' capacity. The operator has its own client and its own rights.

Forbidden here: printing, torch, grpc. lightkube is an optional extra: only modules that use `api`
import it.
"""
