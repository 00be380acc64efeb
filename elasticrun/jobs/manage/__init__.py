"""What a person does with jobs as wholes: convert them; the operator of ElasticJobs.

Forbidden here: torch; grpc, YAML and a cluster's API before the verb needs them.
"""
