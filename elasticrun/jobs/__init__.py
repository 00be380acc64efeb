"""Jobs and the backends that run them: this host, ssh, Slurm and Kubernetes.

`backend` defines the verbs that every backend has, `backends` selects the backend, and `connection`
queries a job's master.

Forbidden here: printing, reading a command line, torch; grpc before a master is queried.
"""
