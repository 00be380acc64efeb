"""ElasticJob and its operator: a job as a Kubernetes object, and the controller of its pods.

`crd` defines the structs of spec and status, and the schema generated from them. `objects` builds
the objects for a job and reads its pods. `view` is what is known of a job, `status` its new status,
`plan` the reconcile decision (observed state → orders and the new status); all three are pure.
`controller` is the loop: observe, query each job's master, plan, act. `cluster` is the API client.
The operator makes no decision that belongs to the job's master: it adds and removes nodes, and
training continues without it. Forbidden in all but `controller` and `cluster`: I/O, the clock,
lightkube. Forbidden everywhere: torch.
"""
