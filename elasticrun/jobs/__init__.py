"""Jobs and the backends that run them: this host, ssh, Slurm and Kubernetes.

`backend` defines the verbs that every backend has, `choosing` selects the backend, and `line`
queries a job's master.

Forbidden here: printing, reading a command line, torch; grpc before a master is queried.
"""
