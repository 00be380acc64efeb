"""Jobs in a Kubernetes cluster, from the user's side.

`kubeconfig` finds the API server and the credentials, `api` queries it, `observed` reads objects
and pods, `acts` creates, changes and deletes jobs, `pod_logs` reads the logs of pods, `inside` runs
kubectl, and `capacity` reports the nodes' capacity. The operator has another client and its own
rights.

Forbidden here: printing, torch, grpc. lightkube is an optional extra: only modules that use `api`
import it.
"""
