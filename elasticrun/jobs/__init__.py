"""Jobs where they run: the verbs that every place has (`backend`), this host, ssh, Slurm and
Kubernetes, which of them is meant (`choosing`), and the asking of a job's master (`line`).

Forbidden here: printing, reading a command line, torch; grpc before a master is asked.
"""
