"""Turns a job's settings into Kubernetes documents or a batch script.

Pure functions. `settings` holds the settings, validated on construction; `grammar` parses words of
a command line; `pods` and `slurm` make the documents and the script; `text` serializes documents.
Decisions of the job's master (membership, restarts) are not made here: schedulers only add and
remove nodes. Forbidden here: I/O, a cluster, the environment, the clock, secrets (a Secret is
named, never read), and `cli`.
"""
