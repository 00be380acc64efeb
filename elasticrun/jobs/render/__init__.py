"""WHAT A SCHEDULER IS TOLD: from what is wanted to Kubernetes documents or a batch script.

Pure functions. `wanted` is what can be asked for, checked when it is made; `grammar` turns words of
a command line into their parts; `pods` and `slurm` make the documents and the script; `text` writes
documents out. Nothing is decided here that the job's master decides (who is a member, how often to
restart): schedulers only bring and take away nodes.
Forbidden here: I/O, a cluster, the environment, the clock, secrets (a Secret is named, never read),
and `cli`.
"""
