"""Jobs in a Kubernetes cluster: the verbs (`verbs`), those that kubectl runs in a pod (`inside`),
the output of pods (`logs`), and turning a submission into objects (`submit`). `arguments` selects
the cluster and the job.

Forbidden here: lightkube before a cluster is queried; torch, grpc.
"""
