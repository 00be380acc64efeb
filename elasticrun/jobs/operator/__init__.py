"""ELASTICJOB AND ITS OPERATOR: a job as an object of Kubernetes, and what keeps its pods.

`crd` is the object: the structs of its spec and status, and the schema made of them; `objects` what
is made for it, and what is read of its pods; `plan` the one decision (what there is → what is to be
done, and the new status), pure; `controller` the loop that looks, asks each job's master, has it
planned and carries it out; `cluster` the talk with the API server. Nothing is decided here that the
job's master decides: the operator brings and takes away nodes, and training goes on without it.
Forbidden in all but `controller` and `cluster`: I/O, the clock, lightkube. Torch everywhere.
"""
