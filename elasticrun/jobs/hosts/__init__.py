"""Starts a job's agents on named hosts with the system's ssh.

`hostfile` parses the hosts, and `launching` decides what each runs. `far` runs on a host, starts
the agent there and reports on it; `ssh` is the connection to one host, and `fleet` manages all
hosts of a job. `join` makes this machine a node of a job that was started elsewhere.

Forbidden here: grpc, torch, and whatever asks a person for a password.
"""
